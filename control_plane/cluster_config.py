"""Limits and times of the engine side, built once at start."""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.engine_config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig(EngineConfig):
    """What the cluster goes by, and each of its engines. Times in seconds.

    Attributes:
        deployment: Namespace of the prefix store.
        shard: Which control plane of the deployment this is; terms are counted per shard.
        max_num_batched_tokens: Most tokens per step; None: what the worker announces.
        max_num_seqs: Most rows per replica; None: what the worker announces.
        block_size: Refuse workers with another one; None: the first worker decides.
        kv_dtype: Refuse workers with another one; None: the first worker decides.
        prefix_caching: Whether blocks are found again by their hash.
        max_bypass: How many requests may overtake one that does not fit.
        return_wait_s: How long after the first worker came back from an earlier control plane
            requests wait for others that are known to have cached prefixes; longer than any worker
            pauses between two attempts. 0: they do not wait.
        replica_wait_s: How long a request waits for a replica before it fails as unavailable.
        max_queued_requests: Requests without a row, over all replicas, before new ones are refused.
        max_queued_tokens: Prompt tokens of those requests, likewise.
        max_queue_wait_s: A new request that would wait longer for a row, by how fast others got
            theirs, is refused.
        term_gather_s: How long after the start Hellos are awaited before the term is settled.
    """

    deployment: str = "default"
    shard: str = "0"
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    block_size: int | None = None
    kv_dtype: str | None = None
    prefix_caching: bool = True
    max_bypass: int = 16
    return_wait_s: float = 1.5
    replica_wait_s: float = 30.0
    max_queued_requests: int = 4096
    max_queued_tokens: int = 4_000_000
    max_queue_wait_s: float = 60.0
    term_gather_s: float = 0.5

    def __post_init__(self) -> None:
        # Not super(): a class with slots is built anew, and its cell names the one before.
        EngineConfig.__post_init__(self)
        for name in (
            "return_wait_s",
            "replica_wait_s",
            "max_queue_wait_s",
            "term_gather_s",
            "max_bypass",
        ):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in (
            "max_queued_requests",
            "max_queued_tokens",
            "max_num_batched_tokens",
            "max_num_seqs",
            "block_size",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be positive, got {value}")
