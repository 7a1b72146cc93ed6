"""Command line to frozen configuration. Nothing else reads flags.

Owns: flags, their help, defaults that do not depend on the device. Does not know: torch, so that
--help and a mistyped flag answer at once.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
from dataclasses import dataclass, fields
from pathlib import Path

from data_plane.simulated_profile import PROFILES, SimulationProfile, read_profile
from protos.model_location import ModelLocation, locate_model
from protos.secret_files import read_secret
from protos.tls_files import CLIENT_FLAGS, TlsFiles

_ID_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,128}")
_SIZE_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*(|[KMGT]i?B?)", re.IGNORECASE)
_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}

# Each has two threads and a connection; beyond this a process is short of both.
MAX_SIMULATED_WORKERS = 256
# The control plane is told how long a worker waits: a week is for ever, and can be told.
MAX_GRACE_S = 604_800.0
DEVICES = ("auto", "cpu", "cuda")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")

_DESCRIPTION = """\
Serve large language models: a data-plane worker.

It loads one model, allocates its KV cache, dials the control plane and executes what that orders.
Start as many as you like, on any machine that reaches the control plane's worker port; each is
found by itself. Its model must be a copy of the control plane's, file by file.
"""

_EPILOG = """\
examples:
  # beside a control plane on the same machine
  pagewire-worker --model ./my-model

  # on a GPU machine
  pagewire-worker --model /models/my-model --control-plane 10.0.0.5:50052 --device cuda

  # a small one on the CPU
  pagewire-worker --model ./my-model --device cpu --kv-cache-memory 512MiB --max-model-len 2048

  # 16 that compute nothing but take an H200's time, to measure a control plane with
  pagewire-worker --model ./my-model --simulate h200-0.6b --simulate-workers 16

SIGTERM or SIGINT drains: the worker takes nothing new, finishes its sequences within --grace-s and
exits with 0; a second signal ends it at once. Other exit codes: 1 internal fault, 2 it cannot start
like this, 3 the control plane refuses it for good, 4 another process uses its --worker-id, 5 its
device failed.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Everything the process is told. Built once. None: derived from the device or the model.

    Attributes:
        model: Directory with config.json, tokenizer.json and weights, or a hub repository.
        control_plane: host:port of the worker port.
        tls: Certificates; None: the stream is plain text.
        token_file: Holds the token that the worker port asks for.
        worker_id: Names the process; two with one id replace each other.
        replica_id: Ranks of one replica share it.
        device: One of DEVICES.
        dtype: Of weights and KV cache; "auto" is the checkpoint's own.
        block_size: Tokens per KV block; a power of two.
        num_blocks: KV blocks, the null block included.
        kv_cache_memory: Bytes of KV cache; num_blocks goes before it.
        gpu_memory_utilization: Share of a GPU's memory to use, in (0, 1].
        max_num_seqs: Sequences that run at once.
        max_model_len: Longest sequence, prompt and output.
        max_num_batched_tokens: Tokens one step computes at most.
        attention_backend: A name, or "auto".
        load_format: One of LOAD_FORMATS.
        enforce_eager: No CUDA graphs.
        threads: CPU threads of one step.
        simulate: Compute nothing, only take this long; None: a real worker.
        simulate_workers: So many simulated workers in this process, each with a number behind its
            ids if there are several.
        grace_s: How long a draining worker waits for its sequences.
        log_level: Of the standard library's names, lower case.
    """

    model: ModelLocation
    control_plane: str = "127.0.0.1:50052"
    tls: TlsFiles | None = None
    token_file: Path | None = None
    worker_id: str
    replica_id: str
    device: str = "auto"
    dtype: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    attention_backend: str = "auto"
    load_format: str = "auto"
    enforce_eager: bool = False
    threads: int = 1
    simulate: SimulationProfile | None = None
    simulate_workers: int = 1
    grace_s: float = 30.0
    log_level: str = "info"

    def __post_init__(self) -> None:
        host, _, port = self.control_plane.rpartition(":")
        if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
            raise ValueError(
                f"--control-plane must be HOST:PORT, e.g. 127.0.0.1:50052, got {self.control_plane}"
            )
        for name in ("worker_id", "replica_id"):
            if not _ID_PATTERN.fullmatch(getattr(self, name)):
                raise ValueError(
                    f"{_flag(name)} must be 1 to 128 of A-Z a-z 0-9 . _ -, "
                    f"got {getattr(self, name)!r}"
                )
        if self.device not in DEVICES:
            raise ValueError(f"--device must be one of {', '.join(DEVICES)}, got {self.device}")
        if self.load_format not in LOAD_FORMATS:
            raise ValueError(
                f"--load-format must be one of {', '.join(LOAD_FORMATS)}, got {self.load_format}"
            )
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ValueError(f"--block-size must be a power of two, got {self.block_size}")
        for name, least in (
            ("num_blocks", 2),
            ("kv_cache_memory", 1),
            ("max_num_seqs", 1),
            ("max_model_len", 2),
            ("max_num_batched_tokens", 1),
            ("threads", 1),
            ("simulate_workers", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{_flag(name)} must be at least {least}, got {value}")
        if (
            self.max_num_seqs is not None
            and self.max_num_batched_tokens is not None
            and self.max_num_batched_tokens < self.max_num_seqs
        ):
            raise ValueError(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be at least "
                f"--max-num-seqs ({self.max_num_seqs}): every sequence decodes one token per step"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"--gpu-memory-utilization must be in (0, 1], got {self.gpu_memory_utilization}"
            )
        if not 0 <= self.grace_s <= MAX_GRACE_S:
            raise ValueError(f"--grace-s must be in [0, {MAX_GRACE_S:g}], got {self.grace_s}")
        self._check_simulation()

    def _check_simulation(self) -> None:
        if self.simulate is None:
            if self.simulate_workers != 1:
                raise ValueError("--simulate-workers needs --simulate: real workers are processes")
            return
        if self.simulate_workers > MAX_SIMULATED_WORKERS:
            raise ValueError(
                f"--simulate-workers must be at most {MAX_SIMULATED_WORKERS}, got "
                f"{self.simulate_workers}; start further processes"
            )
        # What says how tensors are computed or kept has no meaning without any.
        for name in (
            *("attention_backend", "load_format", "enforce_eager"),
            *("kv_cache_memory", "gpu_memory_utilization"),
        ):
            if getattr(self, name) != _DEFAULTS[name]:
                raise ValueError(f"{_flag(name)} has no meaning with --simulate: nothing computes")
        if self.device == "cuda":
            raise ValueError("--device cuda has no meaning with --simulate: no device is used")


_DEFAULTS = {field.name: field.default for field in fields(WorkerConfig)}


def parse_args(argv: list[str] | None = None) -> WorkerConfig:
    """Read the command line; on a mistake print it and exit with 2."""
    parser = _build_parser()
    args = parser.parse_args(argv)
    try:
        worker_id = args.worker_id or default_worker_id()
        return WorkerConfig(
            model=locate_model(args.model),
            control_plane=args.control_plane,
            tls=_tls(args),
            token_file=_token_file(args.token_file),
            worker_id=worker_id,
            replica_id=args.replica_id or worker_id,
            device=args.device,
            dtype=args.dtype,
            block_size=args.block_size,
            num_blocks=args.num_blocks,
            kv_cache_memory=None
            if args.kv_cache_memory is None
            else parse_size(args.kv_cache_memory),
            gpu_memory_utilization=args.gpu_memory_utilization,
            max_num_seqs=args.max_num_seqs,
            max_model_len=args.max_model_len,
            max_num_batched_tokens=args.max_num_batched_tokens,
            attention_backend=args.attention_backend,
            load_format=args.load_format,
            enforce_eager=args.enforce_eager,
            threads=default_threads() if args.threads is None else args.threads,
            simulate=None if args.simulate is None else read_profile(args.simulate),
            simulate_workers=args.simulate_workers,
            grace_s=args.grace_s,
            log_level=args.log_level,
        )
    except ValueError as error:
        parser.error(str(error))


def parse_size(text: str) -> int:
    """Read bytes: a number, or one with K, M, G or T and optionally B or iB, all powers of 1024.

    Raises:
        ValueError: it is none.
    """
    match = _SIZE_PATTERN.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"--kv-cache-memory must be bytes or e.g. 512MiB or 2G, got {text!r}")
    return int(float(match[1]) * 1024 ** _UNITS[match[2][:1].upper()])


def default_worker_id() -> str:
    """Return a name that no other process has: host, process id, a random part."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:64] or "worker"
    # Containers share host names and process ids more often than one would think.
    return f"{host}-{os.getpid()}-{os.urandom(3).hex()}"


def default_threads() -> int:
    """Return half of the cores this process may use: one thread per physical core, as a rule."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


def read_token(path: Path) -> str:
    """The first line of a token file that is not empty or a comment.

    Raises:
        ValueError: It cannot be read or holds none; the message never quotes it.
    """
    try:
        lines = read_secret(path, "--token-file").decode("ascii").split("\n")
    except UnicodeDecodeError:
        raise ValueError(f"--token-file: {path} holds more than ASCII characters") from None
    tokens = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not tokens:
        raise ValueError(f"--token-file: {path} holds no token")
    if not tokens[0].isprintable() or " " in tokens[0]:
        raise ValueError(f"--token-file: the first line of {path} is not one word")
    return tokens[0]


def _tls(args: argparse.Namespace) -> TlsFiles | None:
    if args.tls_ca is None:
        for flag, value in (("--tls-cert", args.tls_cert), ("--tls-key", args.tls_key)):
            if value is not None:
                raise ValueError(f"{flag} needs --tls-ca: without it the stream is plain text")
        return None
    tls = TlsFiles(ca=args.tls_ca, cert=args.tls_cert, key=args.tls_key, flags=CLIENT_FLAGS)
    tls.read()  # before the model is loaded for nothing
    return tls


def _token_file(path: Path | None) -> Path | None:
    if path is not None:
        read_token(path)
    return path


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pagewire-worker",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="MODEL",
        help="model directory, a name below .pagewire/models, FILE.gguf with config and tokenizer "
        "beside it, or a hub id (the only one that asks the network)",
    )
    network = parser.add_argument_group("network")
    network.add_argument(
        "--control-plane",
        default=_DEFAULTS["control_plane"],
        metavar="HOST:PORT",
        help="worker port of the control plane; it is dialled until it answers "
        "(default: %(default)s)",
    )
    for flag, metavar, what in (
        ("--tls-ca", "PEM", "speak TLS, with a control plane whose certificate one in here signed"),
        ("--tls-cert", "PEM", "certificate to show to it, if it asks for one"),
        ("--tls-key", "PEM", "private key of --tls-cert"),
        ("--token-file", "FILE", "its first line is the token that the worker port asks for"),
    ):
        network.add_argument(flag, type=Path, metavar=metavar, help=what)
    network.add_argument(
        "--worker-id",
        metavar="NAME",
        help="names this process; if two use one name, the newer wins (default: host, process id "
        "and a random part)",
    )
    network.add_argument(
        "--replica-id",
        metavar="NAME",
        help="copy of the model that it belongs to (default: the worker id)",
    )
    network.add_argument(
        "--grace-s",
        type=float,
        default=_DEFAULTS["grace_s"],
        metavar="SECONDS",
        help="how long sequences may take to finish after SIGTERM (default: %(default)g)",
    )

    device = parser.add_argument_group("device")
    device.add_argument(
        "--device",
        choices=DEVICES,
        default=_DEFAULTS["device"],
        help="auto takes a GPU if there is one (default: %(default)s)",
    )
    device.add_argument(
        "--dtype",
        default=_DEFAULTS["dtype"],
        metavar="TYPE",
        help="float32, bfloat16 or float16, for weights and KV cache; auto is the checkpoint's own "
        "(default: %(default)s)",
    )
    device.add_argument(
        "--attention-backend",
        default=_DEFAULTS["attention_backend"],
        metavar="NAME",
        help="how attention is computed; auto takes the fastest that can (default: %(default)s)",
    )
    device.add_argument(
        "--load-format",
        choices=LOAD_FORMATS,
        default=_DEFAULTS["load_format"],
        help="auto prefers safetensors over GGUF; dummy makes random weights from config.json, to "
        "measure with (the weight file may be empty) (default: %(default)s)",
    )
    device.add_argument(
        "--enforce-eager",
        action="store_true",
        help="order every kernel by itself instead of replaying CUDA graphs: slower, for debugging",
    )
    device.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help=f"CPU threads of one step (default: half of the cores, here {default_threads()})",
    )

    memory = parser.add_argument_group("memory and limits")
    memory.add_argument(
        "--block-size",
        type=int,
        default=_DEFAULTS["block_size"],
        metavar="TOKENS",
        help="tokens per KV block; the same for all workers of a model (default: %(default)s)",
    )
    memory.add_argument(
        "--kv-cache-memory",
        metavar="SIZE",
        help="size of the KV cache, e.g. 2GiB (default: what --gpu-memory-utilization leaves on a "
        "GPU, at most 1 GiB on a CPU)",
    )
    memory.add_argument(
        "--num-blocks",
        type=int,
        metavar="N",
        help="size of the KV cache in blocks, instead of --kv-cache-memory",
    )
    memory.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=_DEFAULTS["gpu_memory_utilization"],
        metavar="SHARE",
        help="share of the GPU's memory for weights, KV cache and all (default: %(default)s)",
    )
    memory.add_argument(
        "--max-model-len",
        type=int,
        metavar="TOKENS",
        help="longest prompt plus output (default: what the model was trained for)",
    )
    memory.add_argument(
        "--max-num-seqs",
        type=int,
        metavar="N",
        help="sequences that run at once (default: 256 on a GPU, 32 on a CPU)",
    )
    memory.add_argument(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        help="tokens that one step computes at most: larger means shorter time to the first token, "
        "longer pauses for the others (default: 8192 on a GPU, 512 on a CPU)",
    )

    simulation = parser.add_argument_group("simulation")
    simulation.add_argument(
        "--simulate",
        metavar="PROFILE",
        help="compute nothing: say made-up words, the same for the same request, after the time "
        f"that a device would take. PROFILE is {', '.join(PROFILES)}, a time per step such as "
        "8ms, or FILE.json with step_us, row_us, kv_token_us, prefill_token_us, ... Needs no "
        "torch; of the model only its configuration is used",
    )
    simulation.add_argument(
        "--simulate-workers",
        type=int,
        default=_DEFAULTS["simulate_workers"],
        metavar="N",
        help="so many simulated workers in this process, each a replica of its own "
        "(default: %(default)s)",
    )

    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default=_DEFAULTS["log_level"],
        help="least severe lines on stderr (default: %(default)s)",
    )
    return parser
