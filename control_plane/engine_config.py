"""What one replica's engine goes by, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.admission import PROBATION_TOKENS

# A request that was retried alone is believed after PROBATION_TOKENS: more than the steps that can
# have been in flight at its loss.
MAX_LOOKAHEAD = PROBATION_TOKENS - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What one replica's engine goes by. Times in seconds.

    Attributes:
        lookahead: Steps ordered beyond the one whose result is awaited.
        vocab_size: Token ids of results are below it.
        lease_s: Silence after which the worker counts as gone.
        step_timeout_s: Longest time for one step; counts from when the worker could begin it.
        audit_interval_s: Least time between two audits, block by block, of an idle pool.
        adoption_wait_s: How long the first plan of a stream may wait for the prefix index.
    """

    lookahead: int
    vocab_size: int
    lease_s: float
    step_timeout_s: float
    audit_interval_s: float = 60.0
    adoption_wait_s: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.lookahead <= MAX_LOOKAHEAD:
            raise ValueError(f"lookahead must be in [0, {MAX_LOOKAHEAD}], got {self.lookahead}")
        for name in ("lease_s", "step_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(slots=True)
class EngineCounters:
    """Since the engine was built."""

    plans_sent: int = 0
    plan_bytes: int = 0
    prompt_tokens_sent: int = 0
    replayed_tokens: int = 0
    num_resets: int = 0
    num_nacks: int = 0
    num_step_failures: int = 0
    generation_tokens: int = 0
    device_time_us: int = 0
    adopted_blocks: int = 0
    refused_entries: int = 0
