"""The rows of a worker as plans and results tell of them, without the worker.

A recording starts its files with them, so that each can be replayed on its own; a replay uses them
to say whose token differs. The rules are those of `protos/README.md`: which rows run in a step
follows from the plans alone.

Owns: rows, their tokens and tables, up to the last confirmed step. Does not know: files, streams,
what is in a block. Plain Python: what reads a recording need not have numpy.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from protos.pagewire.v1 import recording_pb2, worker_pb2
from protos.recording_file import RecordingError

if TYPE_CHECKING:
    from collections.abc import Iterator

_MAX_ROWS = 1 << 14


def read_column(data: bytes, field: str) -> array[int]:
    """A column of little-endian int32.

    Raises:
        RecordingError: Its length is no multiple of 4.
    """
    if len(data) % 4:
        raise RecordingError(f"{field} has {len(data)} bytes, not a multiple of 4")
    values = array("i", data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def write_column(values: array[int]) -> bytes:
    """The column as it travels."""
    if sys.byteorder == "little":
        return values.tobytes()
    values = values[:]
    values.byteswap()
    return values.tobytes()


@dataclass(slots=True, kw_only=True)
class RecordedSequence:
    """A sequence in its row.

    Attributes:
        parameters: The AddedRow it came with, without its columns of tokens and blocks.
        since: Version of the plan that added it.
        tokens: All known so far.
        blocks: Its table.
        num_known: Tokens that came with the row.
        num_computed: As the plans order it; a row that stopped on the device goes on counting.
        finish_reason: Why it stopped on the device; 0: it has not.
    """

    parameters: worker_pb2.AddedRow
    since: int
    tokens: array[int]
    blocks: array[int]
    num_known: int
    num_computed: int
    is_paused: bool = False
    finish_reason: int = 0

    @property
    def row(self) -> int:
        return self.parameters.row

    @property
    def is_in_prefill(self) -> bool:
        return self.num_computed < self.num_known

    @property
    def num_outputs(self) -> int:
        """Output tokens so far, those of before a replay included."""
        return len(self.tokens) - self.parameters.num_prompt_tokens


@dataclass(slots=True)
class RowOutcome:
    """What a step gave one row.

    Attributes:
        sequence: Which, as it is after the step.
        tokens: Mostly one; none if it had stopped before.
        finish_reason: 0: it goes on.
    """

    sequence: RecordedSequence
    tokens: list[int]
    finish_reason: int


class RecordedRows:
    """The rows at the last confirmed step, and the plans behind it that are not confirmed."""

    def __init__(self) -> None:
        self.version = 0
        self.unconfirmed: deque[worker_pb2.Plan] = deque()
        # In the order in which they were added.
        self._rows: dict[int, RecordedSequence] = {}
        self._ascending: list[RecordedSequence] | None = []
        # Steps of the plan `version` that are still to come.
        self._steps_left = 0
        self._next_step = 0

    def __iter__(self) -> Iterator[RecordedSequence]:
        """In the order in which they were added."""
        return iter(self._rows.values())

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, row: int) -> RecordedSequence | None:
        """What is in a row."""
        return self._rows.get(row)

    @property
    def is_between_plans(self) -> bool:
        """Every step of the last confirmed plan is confirmed."""
        return not self._steps_left

    @property
    def next_result(self) -> tuple[int, int] | None:
        """Version and step of the result that is due; None: nothing is."""
        if self._steps_left:
            return self.version, self._next_step
        return (self.unconfirmed[0].version, 0) if self.unconfirmed else None

    def reset(self, version: int) -> None:
        """A Reset was sent: nothing is occupied, nothing unconfirmed."""
        self.version = version
        self.unconfirmed.clear()
        self._rows.clear()
        self._ascending = []
        self._steps_left = 0

    def restore(self, version: int, rows: list[recording_pb2.RecordedRow]) -> None:
        """Start with what a segment says of its beginning."""
        self.reset(version)
        for recorded in rows:
            added = recorded.added
            sequence = _sequence(added, since=version)
            sequence.num_known = recorded.num_known_tokens
            sequence.num_computed = recorded.num_computed_tokens
            sequence.is_paused = recorded.paused
            sequence.finish_reason = recorded.finish_reason
            num_tokens, num_known = len(sequence.tokens), sequence.num_known
            is_possible = (
                num_tokens == num_known and sequence.num_computed >= 0
                if sequence.is_in_prefill
                else num_tokens >= num_known
            )
            if not (is_possible and 1 <= added.num_prompt_tokens <= num_known):
                raise RecordingError(f"row {added.row} at the start contradicts itself")
            self._put(sequence)

    def snapshot(self) -> Iterator[recording_pb2.RecordedRow]:
        """The rows, as `restore` takes them. Only between plans."""
        for sequence in self._rows.values():
            added = worker_pb2.AddedRow()
            added.CopyFrom(sequence.parameters)
            added.token_ids = write_column(sequence.tokens)
            added.block_ids = write_column(sequence.blocks)
            yield recording_pb2.RecordedRow(
                added=added,
                num_known_tokens=sequence.num_known,
                num_computed_tokens=sequence.num_computed,
                paused=sequence.is_paused,
                finish_reason=sequence.finish_reason,
            )

    def order(self, plan: worker_pb2.Plan) -> None:
        """A plan was sent. It counts once its first result is in.

        Raises:
            RecordingError: It does not follow the one before, or has parts unknown here.
        """
        last = self.unconfirmed[-1].version if self.unconfirmed else self.version
        if plan.base_version != last or plan.version != last + 1:
            raise RecordingError(
                f"plan {plan.version} builds on version {plan.base_version}, the one before is "
                f"{last}"
            )
        for field in ("forks", "block_copies", "token_masks", "drafts"):
            value = getattr(plan, field)
            if len(value) if field == "forks" else plan.HasField(field):
                raise RecordingError(f"plan {plan.version} has {field}, which are not known here")
        self.unconfirmed.append(plan)

    def take(self, result: worker_pb2.StepResult) -> list[RowOutcome]:
        """Confirm the step that is due.

        Returns:
            What it gave each row that ran, ascending.

        Raises:
            RecordingError: Result and plans contradict each other. The state is lost then.
        """
        sampled = self._confirm_step(result)
        tokens, finished = _read_result(result, sampled)
        outcomes: list[RowOutcome] = []
        at = 0
        for sequence, count in zip(sampled, result.counts, strict=True):
            new = tokens[at : at + count]
            at += count
            sequence.tokens.extend(new)
            reason = finished.get(sequence.row, 0)
            if reason:
                sequence.finish_reason = reason
            outcomes.append(RowOutcome(sequence, list(new), reason))
        return outcomes

    def confirm(self, result: worker_pb2.StepResult) -> None:
        """Do what `take` does, for those who do not ask what the step gave: faster.

        Raises:
            RecordingError: Likewise.
        """
        if self.next_result is None or any(count != 1 for count in set(result.counts)):
            self.take(result)
            return
        sampled = self._confirm_step(result)
        tokens, finished = _read_result(result, sampled)
        for sequence, token in zip(sampled, tokens, strict=True):
            sequence.tokens.append(token)
        for row, reason in finished.items():
            self._rows[row].finish_reason = reason

    def _confirm_step(self, result: worker_pb2.StepResult) -> list[RecordedSequence]:
        """Move to behind the step of a result; gives the rows that it is about."""
        due = self.next_result
        if due != (result.version, result.step):
            raise RecordingError(
                f"result of plan {result.version} step {result.step}, expected "
                + ("none" if due is None else f"plan {due[0]} step {due[1]}")
            )
        plan = None
        if result.step == 0:
            plan = self.unconfirmed.popleft()
            self._apply(plan)
            self._steps_left = max(1, plan.num_steps)
        sampled = self._advance(plan)
        self._steps_left -= 1
        self._next_step = result.step + 1
        return sampled

    # The rules.

    def _apply(self, plan: worker_pb2.Plan) -> None:
        self.version = plan.version
        for row in read_column(plan.removed_rows, "removed_rows"):
            self._require(row, plan, "removes")
            del self._rows[row]
            self._ascending = None
        for added in plan.added_rows:
            if added.row in self._rows:
                raise RecordingError(f"plan {plan.version} adds row {added.row}, which is occupied")
            sequence = _sequence(added, since=plan.version)
            if not 1 <= added.num_prompt_tokens <= sequence.num_known:
                raise RecordingError(
                    f"plan {plan.version} adds row {added.row} with {sequence.num_known} tokens, "
                    f"{added.num_prompt_tokens} of them prompt"
                )
            self._put(sequence)
        ids = read_column(plan.appended_block_ids, "appended_block_ids")
        at = 0
        for row, count in _pairs(plan.appended_rows, plan.appended_counts, "appended_counts"):
            self._require(row, plan, "appends to").blocks.extend(ids[at : at + count])
            at += count
        if at != len(ids):
            raise RecordingError(f"plan {plan.version} appends {len(ids)} blocks, counts say {at}")
        for row in read_column(plan.resumed_rows, "resumed_rows"):
            self._require(row, plan, "resumes").is_paused = False
        for row in read_column(plan.paused_rows, "paused_rows"):
            self._require(row, plan, "pauses").is_paused = True

    def _advance(self, plan: worker_pb2.Plan | None) -> list[RecordedSequence]:
        """Move the rows on by one step; gives those that sample, ascending."""
        if self._ascending is None:
            self._ascending = [self._rows[row] for row in sorted(self._rows)]
        sampled: list[RecordedSequence] = []
        for sequence in self._ascending:
            if (
                sequence.num_computed >= sequence.num_known
                and sequence.num_computed < sequence.parameters.max_total_tokens - 1
                and not sequence.is_paused
            ):
                sequence.num_computed += 1
                sampled.append(sequence)
        if plan is None or not plan.chunk_rows:
            return sampled
        for row, count in _pairs(plan.chunk_rows, plan.chunk_num_tokens, "chunk_num_tokens"):
            sequence = self._require(row, plan, "computes a chunk of")
            left = sequence.num_known - sequence.num_computed
            if not 1 <= count <= left:
                raise RecordingError(
                    f"plan {plan.version} computes {count} tokens of row {row}, which has {left} "
                    "left"
                )
            sequence.num_computed += count
            if count == left:
                sampled.append(sequence)
        sampled.sort(key=lambda sequence: sequence.row)
        return sampled

    def _put(self, sequence: RecordedSequence) -> None:
        if not 0 <= sequence.row < _MAX_ROWS or sequence.row in self._rows:
            raise RecordingError(f"row {sequence.row} is out of range or occupied")
        self._rows[sequence.row] = sequence
        self._ascending = None

    def _require(self, row: int, plan: worker_pb2.Plan, does: str) -> RecordedSequence:
        sequence = self._rows.get(row)
        if sequence is None:
            raise RecordingError(f"plan {plan.version} {does} row {row}, which is empty")
        return sequence


def _sequence(added: worker_pb2.AddedRow, *, since: int) -> RecordedSequence:
    tokens = read_column(added.token_ids, "token_ids")
    blocks = read_column(added.block_ids, "block_ids")
    parameters = worker_pb2.AddedRow()
    parameters.CopyFrom(added)
    for field in ("token_ids", "block_ids", "num_hit_blocks", "num_computed_tokens"):
        parameters.ClearField(field)
    return RecordedSequence(
        parameters=parameters,
        since=since,
        tokens=tokens,
        blocks=blocks,
        num_known=len(tokens),
        num_computed=added.num_computed_tokens,
    )


def _pairs(rows: bytes, values: bytes, field: str) -> Iterator[tuple[int, int]]:
    columns = read_column(rows, "rows"), read_column(values, field)
    if len(columns[0]) != len(columns[1]):
        raise RecordingError(f"{field} has {len(columns[1])} values for {len(columns[0])} rows")
    return zip(*columns, strict=True)


def _read_result(
    result: worker_pb2.StepResult, sampled: list[RecordedSequence]
) -> tuple[array[int], dict[int, int]]:
    """Tokens of a result, and the rows that finished with why; checked against who ran."""
    name = f"result of plan {result.version} step {result.step}"
    counts = result.counts
    if len(counts) != len(sampled):
        raise RecordingError(f"{name}: {len(counts)} counts, {len(sampled)} rows ran")
    tokens = read_column(result.token_ids, "token_ids")
    if sum(counts) != len(tokens):
        raise RecordingError(f"{name}: {len(tokens)} tokens, counts add up to {sum(counts)}")
    rows = read_column(result.finished_rows, "finished_rows")
    if len(rows) != len(result.finish_reasons):
        raise RecordingError(
            f"{name}: {len(result.finish_reasons)} finish reasons for {len(rows)} rows"
        )
    finished = dict(zip(rows, result.finish_reasons, strict=True))
    if finished and not finished.keys() <= {sequence.row for sequence in sampled}:
        raise RecordingError(f"{name}: rows {list(finished)[:16]} finished, not all of them ran")
    return tokens, finished
