"""Executes steps on a device that is not there: made-up tokens after a made-up time.

Owns: the device's clock, the rows' state and the rule of tokens and stops. Does not know: tensors,
messages, versions' rules. numpy only; per step it touches the rows that run by array operations
and those that start or branch off one by one.

The clock is a queue that runs ahead, as a real device's: a step begins when it is ordered or when
the step before it ends, whichever is later. `launch` returns at once; only `wait` sleeps.

Tokens. The one at index t of a sequence (prompt included) is a hash of t, the prompt, the index
among the request's continuations and, unless it is greedy, the seed. Nothing else counts: not the
row, the batch, the worker, how often the sequence was replayed, nor earlier tokens. So a request
gives the same tokens wherever and however it runs.

Stops. A row ends with LENGTH at max_total_tokens, with STOP at one of its stop token ids, which it
meets by chance, or at its first end-of-sequence id, which comes with a chance of 1 in
`mean_output_tokens` per token and never by itself otherwise. Before min_tokens neither comes.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from data_plane.step_work import StepOutput

if TYPE_CHECKING:
    from collections.abc import Callable

    from data_plane.simulated_profile import SimulationProfile
    from data_plane.step_work import BoolArray, Forks, Int32Array, Int64Array, NewRow, StepWork

    UInt64Array = npt.NDArray[np.uint64]

_STOP, _LENGTH = 1, 2  # values of the wire's FinishReason
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_NO_ID = -1

_U64_GOLDEN = np.uint64(_GOLDEN)
_U64_M1, _U64_M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_U64_30, _U64_27, _U64_31, _U64_32 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(32)
_U64_LOW = np.uint64(0xFFFFFFFF)


@dataclass(slots=True)
class SimulationCounters:
    """What a simulated device did. Written by the launch thread only.

    Attributes:
        num_steps: Executed.
        num_tokens: Drawn.
        busy_us: Time it computed.
        waited_us: Time it stood still although a row was waiting for its next token: the step came
            too late.
        num_waits: How often it did.
        longest_wait_us: The longest such pause.
    """

    num_steps: int = 0
    num_tokens: int = 0
    busy_us: float = 0.0
    waited_us: float = 0.0
    num_waits: int = 0
    longest_wait_us: float = 0.0


class SimulatedStep:
    """A step that was ordered: its outcome is known, its time has to pass."""

    __slots__ = ("_clock", "_ends_at_s", "_output", "_sleep")

    def __init__(
        self,
        output: StepOutput,
        ends_at_s: float,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._output = output
        self._ends_at_s = ends_at_s
        self._clock = clock
        self._sleep = sleep

    def wait(self) -> StepOutput:
        """Sleep until the device has got there."""
        while (left_s := self._ends_at_s - self._clock()) > 0:
            self._sleep(left_s)
        return self._output


class SimulatedRunner:
    """One simulated device. `launch` and `reset` are called from one thread."""

    def __init__(
        self,
        profile: SimulationProfile,
        *,
        max_num_seqs: int,
        num_blocks: int,
        token_pool: Int32Array,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Make an idle device.

        Args:
            profile: How long steps take.
            max_num_seqs: Rows.
            num_blocks: KV blocks, the null block included.
            token_pool: Ids that are drawn, each with the same chance. At least one.
            clock: Seconds, monotonic.
            sleep: Of seconds.
        """
        if not token_pool.size:
            raise ValueError("token_pool must hold at least one id")
        self.profile = profile
        self.counters = SimulationCounters()
        self._pool = token_pool
        self._clock = clock
        self._sleep = sleep
        self._ends_at_s = clock()
        self._generations: Int64Array = np.zeros(num_blocks, np.int64)
        self._eos_threshold = (
            round((1 << 32) / profile.mean_output_tokens) if profile.mean_output_tokens else 0
        )
        # Per row.
        self._active: BoolArray = np.zeros(max_num_seqs, np.bool_)
        self._bases = [0] * max_num_seqs
        self._keys: UInt64Array = np.zeros(max_num_seqs, np.uint64)
        self._max_total: Int64Array = np.zeros(max_num_seqs, np.int64)
        self._min_total: Int64Array = np.zeros(max_num_seqs, np.int64)
        self._thresholds: UInt64Array = np.zeros(max_num_seqs, np.uint64)
        self._eos: Int32Array = np.full(max_num_seqs, _NO_ID, np.int32)
        self._stop_ids: Int32Array = np.full((max_num_seqs, 1), _NO_ID, np.int32)
        self._num_stop_ids: Int64Array = np.zeros(max_num_seqs, np.int64)

    @property
    def generations(self) -> Int64Array:
        """[num_blocks] int64: version of the plan that last handed the block out, 0 for never."""
        return self._generations

    def reset(self) -> None:
        """Drop all rows; generations stay. No step is under way."""
        self._active[:] = False

    def launch(self, work: StepWork) -> SimulatedStep:
        """Order a step behind all others; it begins when they have ended."""
        now_s = self._clock()
        self._generations[work.handed_out] = work.version
        if work.removed_rows.size:
            self._active[work.removed_rows] = False
        for new_row in work.added:
            self._add(new_row)
        if work.forks.child_rows.size:
            self._fork(work.forks)
        is_live = self._active[work.rows]
        time_us = self._step_time_us(work, is_live)
        # A row that could have computed before was kept waiting.
        waited_us = (now_s - self._ends_at_s) * 1e6
        if waited_us > 0 and bool((is_live & work.is_decode).any()):
            self._count_wait(waited_us)
        self._ends_at_s = max(now_s, self._ends_at_s) + time_us / 1e6
        output = self._draw(work, is_live, round(time_us))
        counters = self.counters
        counters.num_steps += 1
        counters.busy_us += time_us
        counters.num_tokens += output.token_ids.size
        return SimulatedStep(output, self._ends_at_s, self._clock, self._sleep)

    def _count_wait(self, waited_us: float) -> None:
        counters = self.counters
        counters.num_waits += 1
        counters.waited_us += waited_us
        counters.longest_wait_us = max(counters.longest_wait_us, waited_us)

    def _step_time_us(self, work: StepWork, is_live: BoolArray) -> float:
        starts, num_new = work.start_positions, work.num_new_tokens
        decodes = is_live & work.is_decode
        num_prefill_tokens = num_pairs = 0
        if not work.is_decode.all():
            chunks = ~work.is_decode
            first = starts[chunks]
            count = num_new[chunks].astype(np.int64)
            num_prefill_tokens = int(count.sum())
            num_pairs = int((count * first + count * (count + 1) // 2).sum())
        return self.profile.step_time_us(
            num_rows=int(np.count_nonzero(is_live & work.samples)),
            num_kv_tokens=int(starts[decodes].sum()) + int(np.count_nonzero(decodes)),
            num_prefill_tokens=num_prefill_tokens,
            num_pairs=num_pairs,
        )

    def _draw(self, work: StepWork, is_live: BoolArray, time_us: int) -> StepOutput:
        samples = work.samples
        is_live = is_live[samples]
        rows = work.rows[samples][is_live]
        index = (work.start_positions + work.num_new_tokens)[samples][is_live]
        mixed = _mix(self._keys[rows] + (index.astype(np.uint64) + np.uint64(1)) * _U64_GOLDEN)
        token_ids = self._pool[self._pool_index(mixed)]
        may_stop = index >= self._min_total[rows]
        ends = ((mixed & _U64_LOW) < self._thresholds[rows]) & may_stop
        token_ids[ends] = self._eos[rows[ends]]
        if self._num_stop_ids[rows].any():
            self._meet_stop_ids(rows, mixed, token_ids, ends, may_stop)
        reasons = np.where(
            ends, _STOP, np.where(index + 1 >= self._max_total[rows], _LENGTH, 0)
        ).astype(np.uint8)
        is_finished = reasons != 0
        finished_rows = rows[is_finished]
        self._active[finished_rows] = False
        return StepOutput(
            counts=is_live.astype(np.uint8),
            token_ids=token_ids,
            finished_rows=finished_rows,
            finish_reasons=reasons[is_finished],
            device_time_us=time_us,
        )

    def _pool_index(self, mixed: UInt64Array) -> Int64Array:
        # The upper half picks the token, the lower one decides about the end.
        return (((mixed >> _U64_32) * np.uint64(self._pool.size)) >> _U64_32).astype(np.int64)

    def _meet_stop_ids(
        self,
        rows: Int32Array,
        mixed: UInt64Array,
        token_ids: Int32Array,
        ends: BoolArray,
        may_stop: BoolArray,
    ) -> None:
        """End rows that drew a stop id; where it is too early, draw the next one of the pool."""
        width = int(self._num_stop_ids[rows].max())
        stop_ids = self._stop_ids[rows, :width]
        meets = (stop_ids == token_ids[:, None]).any(axis=1)
        ends |= meets & may_stop
        for at in np.flatnonzero(meets & ~may_stop).tolist():
            first = int(self._pool_index(mixed[at : at + 1])[0])
            avoided = set(stop_ids[at].tolist())
            for step in range(1, self._pool.size):
                token_id = int(self._pool[(first + step) % self._pool.size])
                if token_id not in avoided:
                    token_ids[at] = token_id
                    break

    def _add(self, new_row: NewRow) -> None:
        row, sampling = new_row.row, new_row.sampling
        prompt = new_row.token_ids[: new_row.num_prompt_tokens]
        digest = hashlib.blake2b(prompt.astype("<i4", copy=False).tobytes(), digest_size=8)
        seed = new_row.seed if sampling.temperature > 0 else 0
        self._bases[row] = int.from_bytes(digest.digest(), "little") ^ _mix_int(seed + _GOLDEN)
        self._keys[row] = _mix_int(self._bases[row] + new_row.sequence_index * _GOLDEN)
        self._max_total[row] = new_row.max_total_tokens
        self._min_total[row] = new_row.num_prompt_tokens + sampling.min_tokens
        has_end = new_row.eos_token_ids.size > 0 and not sampling.ignore_eos
        self._eos[row] = new_row.eos_token_ids[0] if has_end else _NO_ID
        self._thresholds[row] = self._eos_threshold if has_end else 0
        stop_ids = sampling.stop_token_ids
        if len(stop_ids) > self._stop_ids.shape[1]:
            missing = len(stop_ids) - self._stop_ids.shape[1]
            self._stop_ids = np.pad(self._stop_ids, ((0, 0), (0, missing)), constant_values=_NO_ID)
        self._stop_ids[row] = _NO_ID
        self._stop_ids[row, : len(stop_ids)] = stop_ids
        self._num_stop_ids[row] = len(stop_ids)
        self._active[row] = True

    def _fork(self, forks: Forks) -> None:
        # What a child inherits does not count for its tokens, but for its name among the siblings.
        for parent, child, index in zip(
            forks.parent_rows.tolist(),
            forks.child_rows.tolist(),
            forks.sequence_indices.tolist(),
            strict=True,
        ):
            self._bases[child] = self._bases[parent]
            self._keys[child] = _mix_int(self._bases[parent] + index * _GOLDEN)
            for column in (
                self._active,
                self._max_total,
                self._min_total,
                self._thresholds,
                self._eos,
                self._stop_ids,
                self._num_stop_ids,
            ):
                column[child] = column[parent]


def _mix(values: UInt64Array) -> UInt64Array:
    """SplitMix64's finalizer, a bijection of 64 bits.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    values = (values ^ (values >> _U64_30)) * _U64_M1
    values = (values ^ (values >> _U64_27)) * _U64_M2
    return values ^ (values >> _U64_31)


def _mix_int(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
