"""A worker's side of the scheduling contract, written from the rules and not from the scheduler.

It checks every step as a worker would, keeps what each block slot contains, and draws every token
from what it reads through the block tables: a wrong hit, a block reused too early or a lost write
shows up as a wrong token. Steps are checked when they arrive and run later, so that a reset can
find some of them not run.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from control_plane.request import FinishReason, Sequence

if TYPE_CHECKING:
    from control_plane.block_pool import BlockPool
    from control_plane.scheduled_step import ScheduledStep

EOS = 7
VOCAB_SIZE = 12
_NAN_TOKEN = 9  # a prompt that starts with it yields no token at its third output


def kv_before(sequence: Sequence) -> int:
    """What a sequence's KV starts from: nothing is shared between two salts."""
    return sum(sequence.request.cache_salt.encode())


def kv_of(previous: int, token: int) -> int:
    """What a position's KV is: it depends on everything before it."""
    return hash((previous, token, 0x5EED))


def draw(contents: tuple[int, ...], seed: int, index: int) -> int:
    """The token that attention over these contents yields."""
    return hash((contents, seed, index)) % VOCAB_SIZE


def is_nan(tokens: list[int], num_prompt: int) -> bool:
    return tokens[0] == _NAN_TOKEN and len(tokens) == num_prompt + 2


def stop_reason(sequence: Sequence, num_output: int, token: int) -> FinishReason | None:
    request = sequence.request
    sampling = request.sampling
    ends = set(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        ends.update(request.eos_token_ids)
    if token in ends and num_output > sampling.min_tokens:
        return FinishReason.STOP
    if request.num_prompt_tokens + num_output == request.max_total_tokens:
        return FinishReason.LENGTH
    return None


def expected_output(sequence: Sequence) -> tuple[list[int], FinishReason]:
    """All that the sequence may ever emit, computed without blocks, rows or steps."""
    request = sequence.request
    tokens: list[int] = request.prompt_token_ids.tolist()
    num_prompt = len(tokens)
    contents: list[int] = []
    while True:
        for token in tokens[len(contents) :]:
            contents.append(kv_of(contents[-1] if contents else kv_before(sequence), token))
        if is_nan(tokens, num_prompt):
            return tokens[num_prompt:], FinishReason.ERROR
        token = draw(tuple(contents), request.seed, sequence.index)
        tokens.append(token)
        reason = stop_reason(sequence, len(tokens) - num_prompt, token)
        if reason is not None:
            return tokens[num_prompt:], reason


@dataclass
class _HostRow:
    """The validator's view: what every ordered plan together says of a row."""

    sequence: Sequence
    table: list[int]
    num_known: int
    num_computed: int
    limit: int


@dataclass
class _DeviceRow:
    sequence: Sequence
    tokens: list[int]
    is_active: bool = True


@dataclass
class _Work:
    version: int
    removed: list[int]
    added: list[tuple[int, Sequence, list[int]]]
    handed_out: list[int]
    # (row, first position, number of tokens, table, samples), ascending by row
    rows: list[tuple[int, int, int, list[int], bool]] = field(default_factory=list)


@dataclass
class Result:
    version: int
    counts: np.ndarray
    token_ids: np.ndarray
    finished_rows: np.ndarray
    finish_reasons: np.ndarray

    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        return self.counts, self.token_ids, self.finished_rows, self.finish_reasons


def _ascending(column: np.ndarray) -> list[int]:
    values = column.tolist()
    assert column.dtype == np.int32
    assert values == sorted(set(values)), values
    return values


class SimulatedDevice:
    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        pool: BlockPool,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.pool = pool  # to see which blocks have a name; nothing else is asked of it
        self.applied_version = 0
        self.host_rows: dict[int, _HostRow] = {}
        self.device_rows: dict[int, _DeviceRow] = {}
        self.contents = [[0] * block_size for _ in range(num_blocks)]
        self.generations = [0] * num_blocks
        self.queue: deque[_Work] = deque()
        self.results: deque[Result] = deque()

    # Receiving a plan.

    def apply(self, step: ScheduledStep) -> None:
        assert step.version > self.applied_version
        self.applied_version = step.version
        removed = _ascending(step.removed_rows)
        for row in removed:
            assert row in self.host_rows, f"row {row} is not occupied"
            del self.host_rows[row]
        handed_out: list[int] = []
        self._add(step, handed_out)
        self._append(step, handed_out)
        assert len(set(handed_out)) == len(handed_out), "handed out twice in one plan"
        added = [(one.row, one.sequence, one.token_ids.tolist()) for one in step.added]
        work = _Work(step.version, removed, added, handed_out)
        self._order(step, work)
        self.queue.append(work)

    def _held(self) -> dict[int, int]:
        held: dict[int, int] = {}
        for row in self.host_rows.values():
            for block in row.table:
                held[block] = held.get(block, 0) + 1
        return held

    def _add(self, step: ScheduledStep, handed_out: list[int]) -> None:
        held = self._held()
        rows = [one.row for one in step.added]
        assert rows == sorted(set(rows))
        groups = {one.sequence.request for one in step.added}
        for request in groups:
            got = {one.sequence for one in step.added if one.sequence.request is request}
            assert got == set(request.live_sequences), "admitted in part"
        for one in step.added:
            assert 0 <= one.row < self.max_num_seqs
            assert one.row not in self.host_rows, f"row {one.row} is occupied"
            tokens, table = one.token_ids.tolist(), one.block_ids.tolist()
            assert tokens == one.sequence.token_ids().tolist()
            assert one.token_ids.dtype == one.block_ids.dtype == np.int32
            assert one.num_computed_tokens == one.num_hit_blocks * self.block_size
            assert 0 <= one.num_computed_tokens < len(tokens)
            assert len(set(table)) == len(table)
            assert all(0 < block < self.num_blocks for block in table)
            fresh = table[one.num_hit_blocks :]
            assert not [block for block in fresh if held.get(block)], "in use"
            handed_out += fresh
            request = one.sequence.request
            self.host_rows[one.row] = _HostRow(
                one.sequence,
                table,
                len(tokens),
                one.num_computed_tokens,
                request.max_total_tokens - 1,
            )
            assert len(tokens) < request.max_total_tokens
        hits = {b for one in step.added for b in one.block_ids[: one.num_hit_blocks].tolist()}
        assert not hits & set(handed_out), "a hit was handed out in the same plan"

    def _append(self, step: ScheduledStep, handed_out: list[int]) -> None:
        rows = _ascending(step.appended_rows)
        counts, block_ids = step.appended_counts.tolist(), step.appended_block_ids.tolist()
        assert len(rows) == len(counts)
        assert sum(counts) == len(block_ids)
        held = self._held()
        at = 0
        for row, count in zip(rows, counts, strict=True):
            blocks = block_ids[at : at + count]
            at += count
            assert count > 0
            assert all(0 < block < self.num_blocks for block in blocks)
            assert not [block for block in blocks if held.get(block)], "in use"
            self.host_rows[row].table += blocks
            handed_out += blocks

    def _order(self, step: ScheduledStep, work: _Work) -> None:
        rows, counts = _ascending(step.chunk_rows), step.chunk_num_tokens.tolist()
        assert len(rows) == len(counts)
        chunks = dict(zip(rows, counts, strict=True))
        sampled: list[int] = []
        for row_id, row in sorted(self.host_rows.items()):
            start = row.num_computed
            if row_id in chunks:
                count = chunks.pop(row_id)
                assert 0 < count <= row.num_known - start, "a chunk past the known tokens"
            elif start >= row.num_known and start < row.limit:
                count = 1
            else:
                continue
            row.num_computed = start + count
            samples = row.num_computed >= row.num_known
            if samples:
                sampled.append(row_id)
            assert len(row.table) * self.block_size >= row.num_computed, "table too short"
            assert len(row.table) * self.block_size < max(row.num_computed, row.num_known) + (
                self.block_size
            ), "more blocks than needed"
            work.rows.append((row_id, start, count, list(row.table), samples))
        assert not chunks, f"chunks for rows that cannot prefill: {chunks}"
        num_tokens = sum(count for _, _, count, _, _ in work.rows)
        assert 0 < num_tokens == step.num_tokens <= self.max_num_batched_tokens
        assert sampled == _ascending(step.sampled_rows)
        self._check_writes(work)

    def _check_writes(self, work: _Work) -> None:
        held = self._held()
        for _, start, count, table, _ in work.rows:
            for index in range(start // self.block_size, -(-(start + count) // self.block_size)):
                block = table[index]
                assert held[block] == 1, f"block {block} is shared and written"
                if self.pool.block_hash(block) is not None:
                    # Only the plan that completes a block may have named it already.
                    assert self.pool.is_pending(block), f"named block {block} is written"
                    assert (index + 1) * self.block_size <= start + count
                    assert block in self.pool._pending_of[work.version]

    # Running it.

    def run_step(self) -> None:
        """Run the oldest step that was ordered and has not run."""
        work = self.queue.popleft()
        for row in work.removed:
            del self.device_rows[row]
        for row, sequence, tokens in work.added:
            self.device_rows[row] = _DeviceRow(sequence, tokens)
        for block in work.handed_out:
            self.generations[block] = work.version
        counts: list[int] = []
        token_ids: list[int] = []
        finished: list[tuple[int, int]] = []
        writes: list[tuple[int, int, int]] = []
        for row_id, start, count, table, samples in work.rows:
            row = self.device_rows[row_id]
            if not row.is_active:
                counts += [0] * samples
                continue
            # All rows read what earlier steps wrote, and their own part of this one.
            seen = [
                self.contents[table[p // self.block_size]][p % self.block_size]
                for p in range(start)
            ]
            for position in range(start, start + count):
                previous = seen[-1] if seen else kv_before(row.sequence)
                seen.append(kv_of(previous, row.tokens[position]))
                block = table[position // self.block_size]
                writes.append((block, position % self.block_size, seen[-1]))
            if not samples:
                continue
            request = row.sequence.request
            if is_nan(row.tokens, request.num_prompt_tokens):
                row.is_active = False
                counts.append(0)
                finished.append((row_id, FinishReason.ERROR))
                continue
            token = draw(tuple(seen), request.seed, row.sequence.index)
            row.tokens.append(token)
            counts.append(1)
            token_ids.append(token)
            num_output = len(row.tokens) - request.num_prompt_tokens
            reason = stop_reason(row.sequence, num_output, token)
            if reason is not None:
                row.is_active = False
                finished.append((row_id, reason))
        for block, offset, value in writes:
            self.contents[block][offset] = value
        self.results.append(
            Result(
                work.version,
                np.array(counts, dtype=np.uint8),
                np.array(token_ids, dtype=np.int32),
                np.array([row for row, _ in finished], dtype=np.int32),
                np.array([reason for _, reason in finished], dtype=np.uint8),
            )
        )

    def next_result(self) -> Result:
        if not self.results:
            self.run_step()
        return self.results.popleft()

    def reset(self, version: int) -> None:
        """Drop all rows and what has not run. Bytes and generations stay."""
        assert version > self.applied_version
        self.applied_version = version
        self.host_rows.clear()
        self.device_rows.clear()
        self.queue.clear()
        self.results.clear()
