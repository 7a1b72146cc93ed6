"""What a run showed: counters taken over its measured window, and what they make.

Owns: the sums. Does not know: how anything came about.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tests.benchmarks.scale.service_model import Device, Replica
    from tests.benchmarks.scale.workload import Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Figures of one run. Rates are per simulated second; `_max` is the busiest control plane's.

    Attributes:
        hit_rate: Prompt tokens found in a cache.
        reusable: Prompt tokens that somebody has sent before: what no cache can exceed.
        ttft_ms: p50 and p99.
        queue_ms: From the control plane to a row: p50 and p99.
        replica_balance: Work of the busiest replica over the mean; work is device time of rows and
            prefill tokens.
        plane_balance: The same per replica of a control plane.
        requests_per_s: Of the whole fleet, as are steps, output and changes.
        changes_per_s: Blocks that got or lost their name: what the prefix store is told at most.
        forwarded: Share of requests that arrived at another control plane than the one that serves.
        spilled: Share that its key's owner had no room for.
        is_overloaded: One in a hundred waits longer than a second for a row.
    """

    seconds: float
    hit_rate: float
    reusable: float
    ttft_ms: tuple[float, float]
    queue_ms: tuple[float, float]
    replica_balance: float
    plane_balance: float
    requests_per_s: float
    requests_per_s_max: float
    steps_per_s: float
    steps_per_s_max: float
    output_per_s: float
    output_per_s_max: float
    changes_per_s: float
    changes_per_s_max: float
    rows: float
    forwarded: float
    spilled: float
    is_overloaded: bool


def _counters(replicas: Sequence[Replica]) -> NDArray[np.float64]:
    return np.array(
        [
            (
                replica.num_steps,
                replica.num_row_steps,
                replica.num_prefill_tokens,
                replica.cache.num_registered + replica.cache.num_evicted,
            )
            for replica in replicas
        ],
        dtype=np.float64,
    )


class Window:
    """The measured part of a run."""

    def __init__(self, now: float, replicas: Sequence[Replica]) -> None:
        self.began_s = now
        self.ended_s = now
        self.is_open = True
        self.num_forwarded = 0
        self.num_spilled = 0
        self._turns: list[Turn] = []
        self._queue_s: list[float] = []
        self._num_hits = 0
        self._num_looked_up = 0
        self._device = replicas[0].device
        self._counters = _counters(replicas)

    def arrived(self, turn: Turn) -> None:
        self._turns.append(turn)

    def admitted(self, turn: Turn, now: float) -> None:
        self._queue_s.append(now - turn.ready_s)
        self._num_hits += turn.num_hit_blocks
        self._num_looked_up += turn.num_prompt_blocks

    def close(self, now: float, replicas: Sequence[Replica]) -> None:
        """Nothing that arrives from now on counts."""
        self.ended_s, self.is_open = now, False
        self._counters = _counters(replicas) - self._counters

    def outcome(self, now: float, owner_of: Sequence[int], num_planes: int) -> Outcome:
        """Sum up; a turn still without a first token counts as if it came now."""
        device: Device = self._device
        seconds = self.ended_s - self.began_s
        turns = self._turns
        ttft = np.array(
            [
                (turn.first_token_s if turn.first_token_s >= 0 else now) - turn.arrived_s
                for turn in turns
            ]
        )
        steps, rows, prefill, changes = (self._counters / seconds).T
        work = rows * device.per_row_s + prefill * device.per_token_s
        owners = np.array(owner_of)

        def per_plane(values: NDArray[np.float64]) -> NDArray[np.float64]:
            return np.bincount(owners, values, num_planes).astype(np.float64)

        sizes = np.bincount(owners, minlength=num_planes)
        requests = np.bincount([turn.control_plane for turn in turns], minlength=num_planes)
        # A row's first token comes from its prefill; so output is more than the rows decoded.
        firsts = len(turns) / seconds
        per_plane_work = per_plane(work) / sizes
        new = sum(turn.num_prompt_blocks - _num_reusable(turn) for turn in turns)
        prompts = sum(turn.num_prompt_blocks for turn in turns)
        return Outcome(
            seconds=seconds,
            hit_rate=self._num_hits / max(self._num_looked_up, 1),
            reusable=1 - new / prompts,
            ttft_ms=_percentiles_ms(ttft),
            queue_ms=_percentiles_ms(np.array(self._queue_s or [0.0])),
            replica_balance=float(work.max() / work.mean()),
            plane_balance=float(per_plane_work.max() / per_plane_work.mean()),
            requests_per_s=len(turns) / seconds,
            requests_per_s_max=float(requests.max()) / seconds,
            steps_per_s=float(steps.sum()),
            steps_per_s_max=float(per_plane(steps).max()),
            output_per_s=float(rows.sum()) + firsts,
            output_per_s_max=float(per_plane(rows).max()) + float(requests.max()) / seconds,
            changes_per_s=float(changes.sum()),
            changes_per_s_max=float(per_plane(changes).max()),
            rows=float(rows.sum() / steps.sum()),
            forwarded=self.num_forwarded / len(turns),
            spilled=self.num_spilled / len(turns),
            is_overloaded=_percentiles_ms(np.array(self._queue_s or [0.0]))[1] > 1e3,
        )


def _num_reusable(turn: Turn) -> int:
    """Blocks of the prompt before its question, unless they are the session's own first ones."""
    return sum(segment.num_blocks for segment in turn.chain[:-1])


def _percentiles_ms(seconds: NDArray[np.float64]) -> tuple[float, float]:
    p50, p99 = np.percentile(seconds, (50, 99)) * 1e3
    return float(p50), float(p99)
