"""Command line to frozen configuration. Nothing else reads flags.

Owns: flags, their help, defaults of addresses. Does not know: what the values do.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields
from pathlib import Path

from control_plane.cluster_config import ClusterConfig
from control_plane.recording_config import DEFAULT_MB, RecordingConfig, read_recording_flags
from control_plane.security_config import (
    SecurityConfig,
    add_security_flags,
    read_security_flags,
    with_password,
)
from control_plane.service_limits import ServiceLimits
from protos.model_location import HubModel, ModelLocation, locate_model

_DESCRIPTION = """\
Serve large language models: the control plane.

It runs on a CPU machine, takes requests on the public port, and decides what the workers do that
attach to the worker port. Of a model it uses tokenizer and configuration; of the weights it only
reads what tells one model from another.
"""

_EPILOG = """\
examples:
  # one model; then start a worker with the same directory, and ask for something
  pagewire-control --model ./my-model
  pagewire-worker --model ./my-model --control-plane 127.0.0.1:50052
  pagewire generate "The capital of France is"

  # for other machines, with prefix metadata that survives a restart
  pagewire-control --model ./my-model --host 0.0.0.0 --redis-url redis://10.0.0.5:6379/0

  # two models under names of your choice
  pagewire-control --model ./a --served-model-name small --model ./b --served-model-name large

SIGTERM finishes running requests within --grace-s and exits with 0.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where a served model is found and what clients call it."""

    location: ModelLocation
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlPlaneConfig:
    """Everything the process is told. Built once.

    Attributes:
        models: At least one.
        host: Address that the ports bind to.
        port: Public API; 0 takes a free one.
        worker_port: Control stream; 0 takes a free one.
        metrics_port: Prometheus over HTTP; 0 takes a free one.
        metrics_host: Address of that port; None: `host`.
        redis_url: redis://, rediss:// or memory://.
        cluster: Engine side.
        security: Certificates and tokens.
        recording: Where control streams are recorded; None: nowhere.
        limits: What one call may cost.
        max_n: Most continuations of one request.
        grace_s: How long running requests may take to finish after SIGTERM.
        log_level: Of the standard library's names, lower case.
    """

    models: tuple[ModelSource, ...]
    host: str = "127.0.0.1"
    port: int = 50051
    worker_port: int = 50052
    metrics_port: int = 9464
    metrics_host: str | None = None
    redis_url: str = "memory://"
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    recording: RecordingConfig | None = None
    limits: ServiceLimits = field(default_factory=ServiceLimits)
    max_n: int = 1
    grace_s: float = 30.0
    log_level: str = "info"

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("no model to serve; give at least one --model")
        for name in ("port", "worker_port", "metrics_port"):
            if not 0 <= getattr(self, name) <= 65535:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} must be in [0, 65535], got {getattr(self, name)}")
        if not self.grace_s >= 0:
            raise ValueError(f"--grace-s must not be negative, got {self.grace_s}")


def parse_args(argv: list[str] | None = None) -> ControlPlaneConfig:
    """Read the command line; on a mistake print it and exit with 2."""
    parser = _build_parser()
    args = parser.parse_args(argv)
    try:
        return ControlPlaneConfig(
            models=_model_sources(args.model, args.served_model_name),
            host=args.host,
            port=args.port,
            worker_port=args.worker_port,
            metrics_port=args.metrics_port,
            metrics_host=args.metrics_host,
            redis_url=with_password(args.redis_url, args.redis_password_file),
            security=read_security_flags(args),
            recording=read_recording_flags(args.record, args.record_max_mb),
            cluster=ClusterConfig(
                deployment=args.deployment,
                shard=args.shard,
                lookahead=args.lookahead,
                max_lookahead=args.max_lookahead,
                max_num_batched_tokens=args.max_num_batched_tokens,
                max_num_seqs=args.max_num_seqs,
                block_size=args.block_size,
                kv_dtype=args.kv_dtype,
                prefix_caching=not args.no_prefix_caching,
                lease_s=args.lease_s,
                step_timeout_s=args.step_timeout_s,
                readiness_s=args.readiness_s,
                replica_wait_s=args.replica_wait_s,
                adoption_wait_s=args.adoption_wait_s,
                return_wait_s=args.return_wait_s,
                max_queued_requests=args.max_queued_requests,
                max_queued_tokens=args.max_queued_tokens,
                max_queue_wait_s=args.max_queue_wait_s,
            ),
            grace_s=args.grace_s,
            log_level=args.log_level,
        )
    except ValueError as error:
        parser.error(str(error))


def _model_sources(models: list[str], names: list[str]) -> tuple[ModelSource, ...]:
    if names and len(names) != len(models):
        raise ValueError(
            f"{len(models)} --model and {len(names)} --served-model-name were given; give one name "
            "per model, in the same order, or none"
        )
    locations = [locate_model(model) for model in models]
    return tuple(
        ModelSource(location=location, name=name)
        for location, name in zip(
            locations, names or [_default_name(location) for location in locations], strict=True
        )
    )


def _default_name(location: ModelLocation) -> str:
    return location.repo_id if isinstance(location, HubModel) else location.resolve().name


def _build_parser() -> argparse.ArgumentParser:
    cluster = ClusterConfig()
    defaults = {field.name: field.default for field in fields(ControlPlaneConfig)}
    parser = argparse.ArgumentParser(
        prog="pagewire-control",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    models = parser.add_argument_group("models")
    models.add_argument(
        "--model",
        action="append",
        required=True,
        metavar="MODEL",
        help="model directory, a name below .pagewire/models, FILE.gguf with config and tokenizer "
        "beside it, or a hub id (the only one that asks the network); repeat it for several models",
    )
    models.add_argument(
        "--served-model-name",
        action="append",
        default=[],
        metavar="NAME",
        help="what clients call the model (default: the directory's name, or the hub id); one per "
        "--model",
    )

    network = parser.add_argument_group("network")
    network.add_argument(
        "--host",
        default=defaults["host"],
        help="address to bind; 0.0.0.0 lets other machines in (default: %(default)s)",
    )
    for name, what in (
        ("port", "public gRPC API"),
        ("worker_port", "control stream that workers dial; keep it inside your network"),
        ("metrics_port", "Prometheus metrics and /healthz, over HTTP, for everybody"),
    ):
        network.add_argument(
            "--" + name.replace("_", "-"),
            type=int,
            default=defaults[name],
            metavar="PORT",
            help=f"{what}; 0 takes a free port and prints it (default: %(default)s)",
        )

    network.add_argument(
        "--metrics-host",
        metavar="HOST",
        help="address that the metrics port binds to (default: --host)",
    )

    add_security_flags(parser)

    state = parser.add_argument_group("state")
    state.add_argument(
        "--redis-url",
        default=defaults["redis_url"],
        metavar="URL",
        help="where metadata of cached prefixes outlives this process: redis://, rediss:// or "
        "memory:// for nowhere (default: %(default)s)",
    )
    state.add_argument(
        "--deployment",
        default=cluster.deployment,
        metavar="NAME",
        help="namespace in that store (default: %(default)s)",
    )
    state.add_argument(
        "--shard",
        default=cluster.shard,
        metavar="NAME",
        help="which control plane of the deployment this is (default: %(default)s)",
    )

    scheduling = parser.add_argument_group("scheduling")
    scheduling.add_argument(
        "--lookahead",
        type=int,
        default=cluster.lookahead,
        metavar="STEPS",
        help="least number of steps ordered beyond the one whose result is awaited (default: "
        "%(default)s)",
    )
    scheduling.add_argument(
        "--max-lookahead",
        type=int,
        default=cluster.max_lookahead,
        metavar="STEPS",
        help="most of them; between the two, as many as the round trip to the worker takes "
        "(default: %(default)s)",
    )
    for flag, metavar, what in (
        ("--max-num-batched-tokens", "TOKENS", "most tokens computed in one step"),
        ("--max-num-seqs", "SEQS", "most sequences that run at once on a replica"),
    ):
        scheduling.add_argument(
            flag, type=int, metavar=metavar, help=f"{what} (default: as the worker announces)"
        )
    for flag, kind, metavar, what in (
        ("--block-size", int, "TOKENS", "block size"),
        ("--kv-dtype", str, "DTYPE", "data type"),
    ):
        scheduling.add_argument(
            flag,
            type=kind,
            metavar=metavar,
            help=f"refuse workers with another KV {what} (default: that of a model's first worker)",
        )
    scheduling.add_argument(
        "--no-prefix-caching",
        action="store_true",
        help="compute every prompt in full, even where its prefix is cached",
    )

    limits = parser.add_argument_group("limits and times")
    for flag, default, what in (
        ("--max-queued-requests", cluster.max_queued_requests, "requests that may wait"),
        ("--max-queued-tokens", cluster.max_queued_tokens, "prompt tokens of waiting requests"),
    ):
        limits.add_argument(
            flag,
            type=int,
            default=default,
            metavar="N",
            help=f"{what}; further ones are refused with RESOURCE_EXHAUSTED (default: %(default)s)",
        )
    for flag, default, what in (
        ("--lease-s", cluster.lease_s, "silence after which a worker counts as gone"),
        ("--step-timeout-s", cluster.step_timeout_s, "longest time of one step of a worker"),
        (
            "--readiness-s",
            cluster.readiness_s,
            "a worker whose step takes longer is not ready: it gets new requests only where there "
            "is no other, and health checks of the model do not count it",
        ),
        (
            "--max-queue-wait-s",
            cluster.max_queue_wait_s,
            "a request that would probably wait longer for its turn is refused at once with "
            "RESOURCE_EXHAUSTED; those of a batch wait",
        ),
        ("--replica-wait-s", cluster.replica_wait_s, "how long a request waits for a worker"),
        (
            "--adoption-wait-s",
            cluster.adoption_wait_s,
            "how long a worker that comes back waits for what the store knows of its cache",
        ),
        (
            "--return-wait-s",
            cluster.return_wait_s,
            "how long requests wait, after a restart of this process, for workers that have cached "
            "prefixes and are not back yet; from the first worker on, and only if the store knows "
            "others",
        ),
        (
            "--grace-s",
            defaults["grace_s"],
            "how long running requests may take to finish after SIGTERM",
        ),
    ):
        limits.add_argument(
            flag,
            type=float,
            default=default,
            metavar="SECONDS",
            help=f"{what} (default: %(default)s)",
        )
    recording = parser.add_argument_group(
        "recording",
        "For finding out why something was answered as it was. PROMPTS AND ANSWERS ARE IN IT,\n"
        "as token ids: keep it like they are kept.",
    )
    recording.add_argument(
        "--record",
        type=Path,
        metavar="DIR",
        help="write the control stream of every replica below DIR, readable for this user alone, "
        "for `pagewire replay` to run again (default: nothing is recorded)",
    )
    recording.add_argument(
        "--record-max-mb",
        type=int,
        metavar="MB",
        help=f"most that is kept of one replica; the oldest goes first (default: {DEFAULT_MB})",
    )
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default=defaults["log_level"],
        help="least severe lines on stderr (default: %(default)s)",
    )
    return parser
