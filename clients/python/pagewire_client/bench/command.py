"""`pagewire bench`: flags to parameters, a run, and what it shows.

Owns: flags, their help, files that are written. Does not know: how anything is sent or measured.
"""

from __future__ import annotations

import json
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagewire_client.bench import config as bench_config
from pagewire_client.bench.config import BenchConfig

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from pagewire_client.client import Client
    from protos.tls_files import TlsFiles

DESCRIPTION = """\
Send a load of a known shape and say what it took: times to the first token, between tokens and
of whole requests, tokens per second, requests within a limit. The same parameters send the same
requests. Ctrl-C ends a run and shows what there is.
"""

EPILOG = """\
examples:
  pagewire bench --requests 200 --concurrency 16                 # as many as 16 users
  pagewire bench --arrivals poisson --rate 5 --duration-s 60 --slo-ttft-ms 300 --slo-itl-ms 50
  pagewire bench --workload shared-prefix --prefix-len 2048 --prefix-groups 8 --prompt-len 64
  pagewire bench --workload multi-turn --turns 5 --json chat.json --plot chat.png
  pagewire bench --workload burst-256               # the 256 requests of docs/performance.md
  pagewire bench --workload decode-rows --batch 64  # its decode rows

LENGTHS is N, LOW-HIGH (uniform), lognormal:MEDIAN:SIGMA:LOW:HIGH, or sharegpt or alpaca: lognormals
whose means are those of figure 11 of the PagedAttention paper (prompts 161 and 19 tokens, outputs
338 and 58), with sigmas 1.1/0.9 and 0.6/0.8, clipped to [4, 1024].

A trace is a file of JSON lines: {"at_s": 0.5, "prompt_tokens": 300, "output_tokens": 80}; instead
of prompt_tokens a "prompt" or "token_ids"; with "prefix": NAME and "prefix_tokens": N, lines of
one name begin alike.
"""

# What a workload of fixed shape is: nothing of it is left to flags.
_FIXED_VALUES: dict[str, Any] = {
    "arrivals": "burst",
    "concurrency": 0,
    "temperature": 0.6,
    "ignore_eos": True,
    "as_text": False,
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Everything but how to reach the server."""
    defaults = BenchConfig(server="-")
    load = parser.add_argument_group("load")
    load.add_argument(
        "--workload",
        choices=bench_config.WORKLOADS + bench_config.FIXED_WORKLOADS,
        default=defaults.workload,
        help="what the requests are; burst-256 and decode-rows set arrivals, lengths and "
        "temperature themselves (default: %(default)s)",
    )
    load.add_argument(
        "--arrivals",
        choices=bench_config.ARRIVALS,
        help="closed: --concurrency are always under way; poisson: at --rate, whatever becomes of "
        "them; burst: all at once (default: closed, trace for a trace)",
    )
    _number(load, "--concurrency", int, "N", "requests under way; with poisson the most, 0: any")
    _number(load, "--rate", float, "PER_S", "requests per second of poisson arrivals")
    _number(load, "--requests", int, "N", "how many are sent at most", dest="num_requests")
    _number(load, "--duration-s", float, "S", "none is sent later than this; 0: no such limit")
    _number(load, "--drain-s", float, "S", "what is under way then may take so long")
    _number(load, "--timeout-s", float, "S", "of one request")
    _number(load, "--warmup", int, "N", "requests before, which are not counted")
    _number(load, "--seed", int, "N", "of prompts, lengths, arrivals and sampling")

    shape = parser.add_argument_group("requests")
    for name, what in (("prompt", "of prompts"), ("output", "of outputs")):
        shape.add_argument(
            f"--{name}-len",
            dest=f"{name}_lengths",
            metavar="LENGTHS",
            help=f"{what}, in tokens (default: sharegpt)",
        )
    _number(shape, "--prefix-len", int, "N", "tokens that a group shares", dest="prefix_length")
    _number(shape, "--prefix-groups", int, "N", "such groups")
    _number(shape, "--turns", int, "N", "of a conversation, each with all before it in its prompt")
    _number(shape, "--think-s", float, "S", "pause before the next turn")
    shape.add_argument("--trace", metavar="FILE", help="JSON lines, for --workload trace")
    _number(shape, "--batch", int, "ROWS", "of --workload decode-rows")
    shape.add_argument(
        "--cache-salt",
        metavar="TEXT",
        help="where prefixes are shared (default: a new salt per run, so that none is a hit that "
        "this run has not made)",
    )
    shape.add_argument(
        "--text",
        dest="as_text",
        action="store_true",
        default=None,
        help="prompts are words, about a token each, instead of token ids",
    )
    shape.add_argument("--model", metavar="NAME", help="which model, if several are served")
    _number(shape, "--temperature", float, "T", "0 is greedy")
    shape.add_argument(
        "--respect-eos",
        dest="ignore_eos",
        action="store_false",
        default=None,
        help="outputs may end before their length",
    )

    sending = parser.add_argument_group("sending")
    sending.add_argument(
        "--via",
        choices=("stream", "batch"),
        help="stream: a Generate call each; batch: GenerateBatch, for throughput without times of "
        "tokens (default: stream)",
    )
    _number(
        sending,
        "--flush-ms",
        float,
        "MS",
        "the server may gather tokens so long; 0: it sends every step",
    )
    _number(sending, "--processes", int, "N", "that send; one takes some 10 000 messages/s")
    _number(sending, "--channels", int, "N", "connections of each process")

    result = parser.add_argument_group("result")
    _number(result, "--slo-ttft-ms", float, "MS", "a good request has its first token by then")
    _number(result, "--slo-itl-ms", float, "MS", "and at most this mean time between tokens")
    result.add_argument("--json", type=Path, metavar="FILE", help="write all numbers here")
    result.add_argument("--plot", type=Path, metavar="FILE.png", help="draw them; needs matplotlib")
    result.add_argument("--no-progress", action="store_true", help="no line about how far it is")


def _number(
    group: Any,
    flag: str,
    kind: Callable[[str], Any],
    metavar: str,
    text: str,
    *,
    dest: str | None = None,
) -> None:
    dest = dest or flag.removeprefix("--").replace("-", "_")
    default = BenchConfig.__dataclass_fields__[dest].default
    # None stands for the default, so that what was given can be told from what was not.
    group.add_argument(
        flag, type=kind, metavar=metavar, dest=dest, help=f"{text} (default: {default:g})"
    )


def read_config(args: argparse.Namespace, server: str) -> BenchConfig:
    """The parameters that the flags name.

    Raises:
        ValueError: They contradict each other, or one is out of its range.
    """
    names = [name for name in BenchConfig.__dataclass_fields__ if hasattr(args, name)]
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    given["server"] = server
    given.setdefault("cache_salt", f"bench-{secrets.token_hex(6)}")
    workload = given["workload"]
    if workload in bench_config.FIXED_WORKLOADS:
        clashes = sorted(
            bench_config.flag(name)
            for name in (*_FIXED_VALUES, "num_requests", "prompt_lengths", "output_lengths")
            if name in given
        )
        if clashes:
            raise ValueError(f"{', '.join(clashes)}: --workload {workload} sets that itself")
        given |= _FIXED_VALUES
        given["num_requests"] = 256
        if workload == "decode-rows":
            given["num_requests"] = given.get("batch", BenchConfig.batch)
    elif "batch" in given:
        raise ValueError("--batch belongs to --workload decode-rows")
    elif workload == "trace":
        given.setdefault("arrivals", "trace")
        given.setdefault("num_requests", bench_config.MAX_REQUESTS)
    if "arrivals" not in given and "rate" in given:
        given["arrivals"] = "poisson"
    if given.get("arrivals") == "poisson":
        given.setdefault("concurrency", 0)
    return BenchConfig(**given)


def run(
    client: Client, args: argparse.Namespace, *, tls: TlsFiles | None, token: str | None
) -> bool:
    """Run it, show it, write what was asked for.

    Args:
        client: Asked about the model.
        args: What `add_flags` added.
        tls: How the server is reached, as by `client`.
        token: Likewise.

    Returns:
        Whether the run came to its end.

    Raises:
        ValueError: The flags are nonsense, or a file cannot be read or written.
        PagewireError: Nothing answers, or there is no such model.
    """
    # Not at the head: whoever chats needs none of it.
    from pagewire_client.bench.calls import Access
    from pagewire_client.bench.plot import draw, require_matplotlib
    from pagewire_client.bench.processes import BenchProcessError, run_bench
    from pagewire_client.bench.progress import Progress
    from pagewire_client.bench.report import summarize, table
    from pagewire_client.bench.workload import Workload

    access = Access(server=client.server, tls=tls, token=token)
    config = read_config(args, client.server)
    if args.plot is not None:
        require_matplotlib()
    for path in (args.json, args.plot):
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"{path.parent} is not a directory")
    config, server = _with_model(config, client)
    try:
        # Made here as well, so that a mistake in a trace is told before anything starts.
        num_requests = Workload(config).num_requests
        out = None if args.no_progress else sys.stderr
        progress = Progress(out, num_requests, duration_s=config.duration_s)
        try:
            outcome = run_bench(config, access, progress)
        finally:
            progress.close()
        summary = summarize(config, outcome, server=server)
        sys.stdout.write(table(summary))
        if args.json is not None:
            args.json.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        if args.plot is not None:
            draw(args.plot, summary, outcome)
    except (OSError, BenchProcessError) as error:
        raise ValueError(str(error)) from None
    return not outcome.is_interrupted


def _with_model(config: BenchConfig, client: Client) -> tuple[BenchConfig, dict[str, Any]]:
    """The parameters with the vocabulary of the model, and what the server says of itself."""
    models = client.models(timeout_s=10.0)
    model = next((m for m in models if m.name == config.model or not config.model), None)
    if model is None or (not config.model and len(models) > 1):
        served = ", ".join(m.name for m in models)
        raise ValueError(f"--model {config.model or '(none)'}: name one of {served}")
    values = config.to_json() | {"vocab_size": config.vocab_size or model.vocab_size}
    stats = client.stats(timeout_s=10.0)
    server = {
        "model": model.name,
        "fingerprint": model.fingerprint,
        "replicas": [
            {
                "replica_id": replica.replica_id,
                "lookahead": replica.lookahead,
                "devices": [worker.device for worker in replica.workers],
                "backends": [worker.backend for worker in replica.workers],
            }
            for replica in stats.replicas
        ],
    }
    return BenchConfig.from_json(values), server
