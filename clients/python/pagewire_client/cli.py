"""`pagewire`: ask a server from the command line.

Owns: what people see in a terminal. Does not know: anything `Client` does not.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from pagewire_client.bench import command as bench
from pagewire_client.client import Client
from pagewire_client.errors import PagewireError
from pagewire_client.options import DEFAULT_SERVER
from pagewire_client.replay import command as replay
from protos.tls_files import CLIENT_FLAGS, TlsFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagewire_client.client import Generation
    from pagewire_client.requests import GenerateOptions
    from protos.pagewire.v1 import inference_pb2

_STATUS_TIMEOUT_S = 10.0

# What a model writes must not steer somebody's terminal.
_CONTROLS = dict.fromkeys(
    (code for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"), "\ufffd"
)

_EPILOG = """\
examples:
  pagewire generate "The capital of France is" --max-tokens 16
  pagewire chat "Tell me a joke"
  pagewire chat                      (a conversation; Ctrl-D ends it)
  pagewire status --server 10.0.0.5:50051
  pagewire models --server llm.example:50051 --tls-ca ca.pem --token-file token
  pagewire replay ./recordings --model ./my-model       (after pagewire-control --record)
  pagewire bench --requests 200 --concurrency 16      (pagewire bench --help)
"""


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 for a failed call, 2 for wrong usage."""
    args = _build_parser().parse_args(argv)
    if args.run is replay.main:
        return replay.main(args)
    run: Callable[[Client, argparse.Namespace], None] = args.run
    server: str = getattr(args, "server", None) or os.environ.get("PAGEWIRE_SERVER", DEFAULT_SERVER)
    try:
        client = Client(server, tls=_tls(args), token=_token(args))
    except ValueError as error:
        print(f"pagewire: {error}", file=sys.stderr)
        return 2
    try:
        with client:
            run(client, args)
    except PagewireError as error:
        print(f"pagewire: {error.message}", file=sys.stderr)
        return 1
    except UnicodeDecodeError as error:
        print(
            f"pagewire: standard input is no text in {error.encoding}: byte {error.start} is no "
            "part of a character. Convert it, or set PYTHONIOENCODING to what it is in.",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output is gone; keep the interpreter from complaining at exit.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - lives until the process ends
        return 141
    return 0


def _build_parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--server",
        metavar="HOST:PORT",
        default=argparse.SUPPRESS,
        help=f"public port of a control plane (default: $PAGEWIRE_SERVER or {DEFAULT_SERVER})",
    )
    for flag, metavar, what in (
        ("--tls-ca", "PEM", "speak TLS, with a server whose certificate one in here signed"),
        ("--tls-cert", "PEM", "certificate to show to the server, if it asks for one"),
        ("--tls-key", "PEM", "private key of --tls-cert"),
        ("--token-file", "FILE", "its first word is the token to call with"),
    ):
        common.add_argument(flag, metavar=metavar, default=argparse.SUPPRESS, help=what)
    common.add_argument(
        "--tls",
        action="store_true",
        default=argparse.SUPPRESS,
        help="speak TLS, with a server whose certificate this system trusts",
    )
    parser = argparse.ArgumentParser(
        prog="pagewire",
        description="Ask a Pagewire server.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[common],
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")

    sampling = argparse.ArgumentParser(add_help=False)
    sampling.add_argument("--model", metavar="NAME", help="which model, if several are served")
    sampling.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="end after N tokens (default: at the model's own end, or where no more fit)",
    )
    sampling.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="0 always takes the most probable token (default: 1)",
    )
    sampling.add_argument("--top-p", type=float, metavar="P", help="nucleus, in (0, 1]")
    sampling.add_argument("--top-k", type=int, metavar="K", help="the K most probable tokens")
    sampling.add_argument("--seed", type=int, metavar="N", help="same seed, same tokens")
    sampling.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; repeatable"
    )

    def add(name: str, run: Callable[..., None], text: str, *parents: Any) -> Any:
        command = commands.add_parser(name, help=text, description=text, parents=[common, *parents])
        command.set_defaults(run=run)
        return command

    generate = add("generate", _generate, "Continue a text.", sampling)
    generate.add_argument("prompt", metavar="PROMPT", help="the text; - reads standard input")
    chat = add("chat", _chat, "Talk to the model; without a message, a conversation.", sampling)
    chat.add_argument("message", metavar="MESSAGE", nargs="?", help="one message, answered once")
    chat.add_argument("--system", metavar="TEXT", help="instructions before the conversation")
    add("models", _models, "List the served models.")
    add("status", _status, "Show replicas, their blocks and queues.")
    load = add("bench", _bench, "Measure a server under load.")
    load.description, load.epilog = bench.DESCRIPTION, bench.EPILOG
    load.formatter_class = argparse.RawDescriptionHelpFormatter
    bench.add_flags(load)
    # It asks no server, so it has none of the common flags.
    replaying = commands.add_parser(
        "replay",
        help=replay.TEXT,
        description=replay.DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    replaying.set_defaults(run=replay.main)
    replay.add_arguments(replaying)
    return parser


def _tls(args: argparse.Namespace) -> TlsFiles | None:
    given = {name: getattr(args, f"tls_{name}", None) for name in ("ca", "cert", "key")}
    if not any(given.values()) and not getattr(args, "tls", False):
        return None
    return TlsFiles(**given, flags=CLIENT_FLAGS)


def _token(args: argparse.Namespace) -> str | None:
    path: str | None = getattr(args, "token_file", None)
    if path is None:
        return None
    try:
        with open(path, encoding="ascii") as file:
            words = file.read().split()
    except OSError as error:
        raise ValueError(f"--token-file: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"--token-file: {path} holds more than ASCII characters") from None
    if not words:
        raise ValueError(f"--token-file: {path} is empty")
    return words[0]


def _options(args: argparse.Namespace) -> GenerateOptions:
    names = ("model", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop")
    options: Any = {n: getattr(args, n) for n in names if getattr(args, n) is not None}
    return options


def _generate(client: Client, args: argparse.Namespace) -> None:
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    with client.generate(prompt, **_options(args)) as generation:
        _print_stream(generation)


def _chat(client: Client, args: argparse.Namespace) -> None:
    messages: list[dict[str, str]] = []
    if args.system:
        messages.append({"role": "system", "content": args.system})
    if args.message is not None:
        messages.append({"role": "user", "content": args.message})
        with client.chat(messages, **_options(args)) as generation:
            _print_stream(generation)
        return
    print("Ctrl-C ends an answer, Ctrl-D the conversation.", file=sys.stderr)
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        answer = _answer(client, messages, args)
        if answer is None:
            messages.pop()
        else:
            messages.append({"role": "assistant", "content": answer})


def _answer(
    client: Client, messages: Sequence[dict[str, str]], args: argparse.Namespace
) -> str | None:
    """One turn; None if it failed, which a conversation survives."""
    try:
        with client.chat(messages, **_options(args)) as generation:
            try:
                _print_stream(generation)
            except KeyboardInterrupt:
                print()
            output = generation.log.outputs.get(0)
            return output.text if output else ""
    except PagewireError as error:
        print(f"pagewire: {error.message}", file=sys.stderr)
        return None


def _print_stream(generation: Generation) -> None:
    ends_line = False
    for chunk in generation:
        # What cannot be shown here must not end an answer.
        encoding = sys.stdout.encoding or "utf-8"
        text = chunk.text.encode(encoding, "replace").decode(encoding)
        if sys.stdout.isatty():
            text = text.translate(_CONTROLS)
        print(text, end="", flush=True)
        if text:
            ends_line = text.endswith("\n")
        if chunk.finish_reason == "error":
            print("\n[the model produced nothing usable]", file=sys.stderr)
    if not ends_line:
        print()


def _models(client: Client, args: argparse.Namespace) -> None:
    del args
    rows = [
        (
            model.name,
            str(model.max_model_len),
            str(model.ready_replicas),
            "yes" if model.has_chat_template else "no",
            model.fingerprint[:12],
        )
        for model in client.models(timeout_s=_STATUS_TIMEOUT_S)
    ]
    _print_table(("MODEL", "MAX LENGTH", "READY REPLICAS", "CHAT", "FINGERPRINT"), rows)


def _status(client: Client, args: argparse.Namespace) -> None:
    del args
    stats = client.stats(timeout_s=_STATUS_TIMEOUT_S)
    started = stats.started_at.ToDatetime().isoformat(sep=" ", timespec="seconds")
    print(f"control plane: term {stats.term}, started {started} UTC")
    print(f"prefix store:  {stats.prefix_store}")
    print(f"unplaced:      {stats.num_requests_unplaced} requests wait for a replica")
    print()
    if not stats.replicas:
        print("No replica is attached. Start a worker with --control-plane HOST:WORKER_PORT.")
        return
    header = ("REPLICA", "MODEL", "EPOCH", "VERSION", "LAG", "BLOCKS", "CACHED", "RUN", "WAIT")
    _print_table(
        (*header, "HITS", "WORKERS"), [_replica_row(replica) for replica in stats.replicas]
    )


def _replica_row(replica: inference_pb2.ReplicaStats) -> tuple[str, ...]:
    used = replica.usable_blocks - replica.free_blocks
    hits = replica.prefix_hits / replica.prefix_queries if replica.prefix_queries else 0.0
    workers = ", ".join(
        f"{w.worker_id} ({w.device}{', draining' if w.draining else ''})" for w in replica.workers
    )
    return (
        replica.replica_id,
        replica.model,
        replica.replica_epoch[:8],
        str(replica.confirmed_version),
        str(max(0, replica.sent_version - replica.confirmed_version)),
        f"{used}/{replica.usable_blocks}",
        str(replica.cached_blocks),
        str(replica.num_requests_running),
        str(replica.num_requests_waiting),
        f"{hits:.0%}",
        workers or "lost",
    )


def _bench(client: Client, args: argparse.Namespace) -> None:
    try:
        has_ended = bench.run(client, args, tls=_tls(args), token=_token(args))
    except ValueError as error:
        print(f"pagewire bench: {error}", file=sys.stderr)
        sys.exit(2)
    if not has_ended:
        raise KeyboardInterrupt


def _print_table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, *rows):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        # Some of it, such as a device's name, is what workers say.
        print(line.translate(_CONTROLS).rstrip())


if __name__ == "__main__":
    sys.exit(main())
