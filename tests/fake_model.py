"""A model without tensors whose next token depends on every token of a row, through its blocks.

Each slot of the cache holds a chain value: a hash of the token there and of the chain value of the
position before it, read back through the row's block table as attention would. The next token is a
hash over all chain values of the row. So a wrong prefix hit, a block reused too early, a missing
copy or a lost token gives other tokens than `expected_output` does.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np

from data_plane.step_work import NewRow, RowSampling, StepError, StepOutput, StepWork

STOP, LENGTH = 1, 2
_MASK = (1 << 64) - 1
_WEIGHTS = np.random.default_rng(7).integers(1, 1 << 63, 1 << 14, np.uint64) | np.uint64(1)


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _chain(previous: int, token: int) -> int:
    return _mix((previous * 0x9E3779B97F4A7C15 + token + 1) & _MASK)


def _draw(
    chains: np.ndarray,
    *,
    vocab_size: int,
    sampling: RowSampling,
    stops: frozenset[int],
    seed: int,
    sequence_index: int,
    num_output: int,
) -> int:
    """Return the token behind `chains` ([n] uint64); num_output tokens were drawn before it."""
    state = int(np.bitwise_xor.reduce(chains * _WEIGHTS[: chains.size]))
    if sampling.temperature > 0:
        state ^= _mix(seed ^ _mix(sequence_index * 2**32 + chains.size))
    token = _mix(state) % vocab_size
    while num_output < sampling.min_tokens and token in stops:
        token = (token + 1) % vocab_size
    return token


def _stops(sampling: RowSampling, eos_token_ids: tuple[int, ...]) -> frozenset[int]:
    return frozenset(sampling.stop_token_ids + (() if sampling.ignore_eos else eos_token_ids))


def expected_output(
    prompt: list[int],
    *,
    max_total_tokens: int,
    vocab_size: int = 512,
    sampling: RowSampling | None = None,
    eos_token_ids: tuple[int, ...] = (2,),
    seed: int = 0,
    sequence_index: int = 0,
) -> tuple[list[int], int]:
    """Return what FakeModelRunner must generate for a prompt, and the FinishReason."""
    sampling = sampling or RowSampling(temperature=0.0)
    stops = _stops(sampling, eos_token_ids)
    chains: list[int] = []
    for token in prompt:
        chains.append(_chain(chains[-1] if chains else 0, token))
    output: list[int] = []
    while True:
        token = _draw(
            np.array(chains, np.uint64),
            vocab_size=vocab_size,
            sampling=sampling,
            stops=stops,
            seed=seed,
            sequence_index=sequence_index,
            num_output=len(output),
        )
        output.append(token)
        if token in stops:
            return output, STOP
        if len(prompt) + len(output) >= max_total_tokens:
            return output, LENGTH
        chains.append(_chain(chains[-1], token))


@dataclass
class _FakeRow:
    """Device state of a row."""

    new_row: NewRow
    sequence_index: int
    table: list[int]
    last_token: int = -1
    is_stopped: bool = False


@dataclass
class _FakePending:
    output: StepOutput | None
    error: StepError | None = None

    def wait(self) -> StepOutput:
        if self.error is not None:
            raise self.error
        assert self.output is not None
        return self.output


@dataclass
class FakeModelRunner:
    """Same interface as ModelRunner, on the CPU, at once, without torch.

    Attributes:
        gate: While it is cleared, `launch` blocks at its start: a long step.
        fail_launch: Versions whose launch raises StepError (once each).
        fail_wait: Versions whose `wait` raises StepError (once each).
        launched: (version, step) of every step executed.
        num_resets: Calls of `reset`.
    """

    num_blocks: int = 64
    block_size: int = 4
    vocab_size: int = 512
    gate: threading.Event = field(default_factory=threading.Event)
    fail_launch: set[int] = field(default_factory=set)
    fail_wait: set[int] = field(default_factory=set)
    launched: list[tuple[int, int]] = field(default_factory=list)
    num_resets: int = 0
    is_fatal: bool = False

    def __post_init__(self) -> None:
        self.gate.set()
        self.in_step = threading.Event()
        self.generations = np.zeros(self.num_blocks, np.int64)
        # Uninitialised memory is not zero.
        self._kv = np.random.default_rng(3).integers(
            1, 1 << 63, (self.num_blocks, self.block_size), np.uint64
        )
        self._rows: dict[int, _FakeRow] = {}

    def warm_up(self) -> None:
        pass

    def reset(self) -> None:
        self._rows.clear()
        self.num_resets += 1

    def launch(self, work: StepWork) -> _FakePending:
        self.in_step.set()
        self.gate.wait()
        if work.version in self.fail_launch:
            self.fail_launch.discard(work.version)
            raise StepError("injected launch failure", is_fatal=self.is_fatal)
        self.launched.append((work.version, work.step))
        self._apply_deltas(work)
        output = self._execute(work)
        if work.version in self.fail_wait:
            self.fail_wait.discard(work.version)
            return _FakePending(None, StepError("injected device failure"))
        return _FakePending(output)

    def _apply_deltas(self, work: StepWork) -> None:
        for row in work.removed_rows.tolist():
            del self._rows[row]
        for new_row in work.added:
            assert new_row.row not in self._rows, f"row {new_row.row} is occupied"
            self._rows[new_row.row] = _FakeRow(
                new_row, new_row.sequence_index, new_row.block_ids.tolist()
            )
        forks = work.forks
        for parent, child, index, token in zip(
            forks.parent_rows.tolist(),
            forks.child_rows.tolist(),
            forks.sequence_indices.tolist(),
            forks.token_ids.tolist(),
            strict=True,
        ):
            assert child not in self._rows, f"row {child} is occupied"
            source = self._rows[parent]
            self._rows[child] = _FakeRow(
                source.new_row,
                index,
                list(source.table),
                source.last_token if token < 0 else token,
                source.is_stopped,
            )
        copies = work.copies
        for src, dst in zip(copies.src.tolist(), copies.dst.tolist(), strict=True):
            self._kv[dst] = self._kv[src]
        for dst, row, index in zip(
            copies.dst.tolist(), copies.rows.tolist(), copies.indices.tolist(), strict=True
        ):
            self._rows[row].table[index] = dst
        first = 0
        for row, count in zip(
            work.appended_rows.tolist(), work.appended_counts.tolist(), strict=True
        ):
            self._rows[row].table += work.appended_block_ids[first : first + count].tolist()
            first += count
        self.generations[work.handed_out] = work.version

    def _execute(self, work: StepWork) -> StepOutput:
        counts: list[int] = []
        token_ids: list[int] = []
        finished_rows: list[int] = []
        finish_reasons: list[int] = []
        shares_logits = {
            child: parent
            for child, parent, shares in zip(
                work.forks.child_rows.tolist(),
                work.forks.parent_rows.tolist(),
                work.forks.shares_logits.tolist(),
                strict=True,
            )
            if shares
        }
        first = 0
        # All writes of a step come before its draws: a child reads what its parent wrote.
        for row, count, start, is_decode in zip(
            work.rows.tolist(),
            work.num_new_tokens.tolist(),
            work.start_positions.tolist(),
            work.is_decode.tolist(),
            strict=True,
        ):
            state = self._rows[row]
            if is_decode:
                tokens = [state.last_token]
            else:
                tokens = work.chunk_token_ids[first : first + count].tolist()
                first += count
            if not state.is_stopped:
                self._write(state, start, tokens)
        ends = (work.start_positions + work.num_new_tokens).tolist()
        for row, end, samples in zip(work.rows.tolist(), ends, work.samples.tolist(), strict=True):
            if not samples:
                continue
            state = self._rows[row]
            if state.is_stopped:
                counts.append(0)
                continue
            reader = self._rows[shares_logits.get(row, row)]
            token, reason = self._sample(state, self._read(reader, end))
            counts.append(1)
            token_ids.append(token)
            if reason:
                finished_rows.append(row)
                finish_reasons.append(reason)
        return StepOutput(
            counts=np.array(counts, np.uint8),
            token_ids=np.array(token_ids, np.int32),
            finished_rows=np.array(finished_rows, np.int32),
            finish_reasons=np.array(finish_reasons, np.uint8),
            device_time_us=1,
        )

    def _write(self, state: _FakeRow, start: int, tokens: list[int]) -> None:
        previous = int(self._read(state, start)[-1]) if start else 0
        for position, token in enumerate(tokens, start):
            block_id = state.table[position // self.block_size]
            assert block_id != 0, "a step writes the null block"
            previous = _chain(previous, token)
            self._kv[block_id, position % self.block_size] = previous

    def _read(self, state: _FakeRow, end: int) -> np.ndarray:
        num_blocks = -(-end // self.block_size)
        return self._kv[state.table[:num_blocks]].reshape(-1)[:end]

    def _sample(self, state: _FakeRow, chains: np.ndarray) -> tuple[int, int]:
        row = state.new_row
        stops = _stops(row.sampling, tuple(row.eos_token_ids.tolist()))
        token = _draw(
            chains,
            vocab_size=self.vocab_size,
            sampling=row.sampling,
            stops=stops,
            seed=row.seed,
            sequence_index=state.sequence_index,
            num_output=chains.size - row.num_prompt_tokens,
        )
        state.last_token = token
        reason = 0
        if token in stops:
            reason = STOP
        elif chains.size + 1 >= row.max_total_tokens:
            reason = LENGTH
        state.is_stopped = bool(reason)
        return token, reason
