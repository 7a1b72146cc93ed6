"""What one replica's engine goes by, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass

# Workers queue what is ordered, and whoever is retried alone is watched for longer than that.
MAX_LOOKAHEAD = 64
# Leases travel as a number of nanoseconds, so none lasts for ever.
MAX_LEASE_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What one replica's engine goes by. Times in seconds.

    Attributes:
        lookahead: Steps ordered beyond the one whose result is awaited, at least.
        max_lookahead: As many at most, where the round trip asks for more; below `lookahead` it is
            that.
        lease_s: Silence after which a worker counts as gone.
        step_timeout_s: A step unconfirmed for this long loses the worker even if it heartbeats;
            counts from when the worker could begin it.
        readiness_s: A replica whose oldest step is unconfirmed for this long is not ready: it gets
            new requests only where there is no other.
        adoption_wait_s: How long a worker that served before waits for its first plan until the
            prefix index is loaded and checked; what comes later may still be taken over.
        audit_interval_s: Least time between two audits, block by block, of an idle replica's pool.
            The number of its free blocks is checked whenever it is idle.
    """

    lookahead: int = 1
    max_lookahead: int = 16
    lease_s: float = 10.0
    step_timeout_s: float = 120.0
    readiness_s: float = 20.0
    adoption_wait_s: float = 1.0
    audit_interval_s: float = 60.0

    @property
    def longest_lookahead(self) -> int:
        """What workers are promised."""
        return max(self.lookahead, self.max_lookahead)

    def __post_init__(self) -> None:
        for name in ("lookahead", "max_lookahead"):
            if not 0 <= getattr(self, name) <= MAX_LOOKAHEAD:
                raise ValueError(
                    f"{name} must be in [0, {MAX_LOOKAHEAD}], got {getattr(self, name)}"
                )
        if not 0 < self.lease_s <= MAX_LEASE_S:
            raise ValueError(f"lease_s must be in (0, {MAX_LEASE_S:g}], got {self.lease_s}")
        for name in ("step_timeout_s", "readiness_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("adoption_wait_s", "audit_interval_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")


@dataclass(slots=True)
class EngineCounters:
    """Since the engine was built.

    Attributes:
        steps: Confirmed ones.
        wasted_steps: Those among them that computed nothing for anybody.
        wasted_rows: Rows of confirmed steps whose sequence had ended before.
    """

    sequences_started: int = 0
    plans_sent: int = 0
    plan_bytes: int = 0
    prompt_tokens_sent: int = 0
    replayed_tokens: int = 0
    num_resets: int = 0
    num_nacks: int = 0
    num_step_failures: int = 0
    generation_tokens: int = 0
    steps: int = 0
    wasted_steps: int = 0
    wasted_rows: int = 0
    device_time_us: int = 0
    adopted_blocks: int = 0
    refused_entries: int = 0
