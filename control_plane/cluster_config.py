"""Limits and times of the engine side, built once at start."""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.engine_config import MAX_LOOKAHEAD


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Limits and times of the engine side. Times in seconds.

    Attributes:
        deployment: Namespace of the prefix store.
        shard: Which control plane of the deployment this is; terms are counted per shard.
        lookahead: Steps ordered beyond the one whose result is awaited.
        max_num_batched_tokens: Most tokens per step; None: what the worker announces.
        max_num_seqs: Most rows per replica; None: what the worker announces.
        block_size: Refuse workers with another one; None: the first worker decides.
        kv_dtype: Refuse workers with another one; None: the first worker decides.
        prefix_caching: Whether blocks are found again by their hash.
        max_bypass: How many requests may overtake one that does not fit.
        lease_s: Silence after which a worker counts as gone.
        step_timeout_s: A step unconfirmed for this long loses the worker even if it heartbeats.
        replica_wait_s: How long a request waits for a replica before it fails as unavailable.
        max_queued_requests: Requests without a row, over all replicas, before new ones are refused.
        max_queued_tokens: Prompt tokens of those requests, likewise.
        adoption_wait_s: How long a worker that served before waits for its first plan until the
            prefix index is loaded and checked; what comes later may still be taken over.
        term_gather_s: How long after the start Hellos are awaited before the term is settled.
        audit_interval_s: Least time between two audits, block by block, of an idle replica's pool;
            one takes up to half a second for 100 000 blocks. Their number is checked every time.
    """

    deployment: str = "default"
    shard: str = "0"
    lookahead: int = 2
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    block_size: int | None = None
    kv_dtype: str | None = None
    prefix_caching: bool = True
    max_bypass: int = 16
    lease_s: float = 10.0
    step_timeout_s: float = 120.0
    replica_wait_s: float = 30.0
    max_queued_requests: int = 4096
    max_queued_tokens: int = 4_000_000
    adoption_wait_s: float = 1.0
    term_gather_s: float = 0.5
    audit_interval_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("lease_s", "step_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in (
            "replica_wait_s",
            "adoption_wait_s",
            "term_gather_s",
            "audit_interval_s",
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
        if not 0 <= self.lookahead <= MAX_LOOKAHEAD:
            raise ValueError(f"lookahead must be in [0, {MAX_LOOKAHEAD}], got {self.lookahead}")
