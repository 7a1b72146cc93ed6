"""The rows of the worker's persistent batch, as arrays: what happens to every row in every step.

Owns: which sequence has which row, how far each row was ordered and confirmed, which rows decode.
Does not know: blocks, policy, results.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

from control_plane.errors import InvariantError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from control_plane.request import Sequence, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlightStep:
    """A step that was ordered, and the row to sequence map its result is resolved through.

    Attributes:
        version: Its plan.
        rows: int32, ascending, the rows that will report.
        sequences: Parallel to rows. Shared between steps, never written.
        incarnations: int64, parallel to rows: whether a row still is the one that was ordered.
        num_releases: Of the batch, at that time: if it is the same still, so are all rows.
        ending: Rows that reach their length limit with this step.
        chunked: Sequences of which this step computes a prefill chunk.
    """

    version: Version
    rows: NDArray[np.int32]
    sequences: list[Sequence]
    incarnations: NDArray[np.int64]
    num_releases: int
    ending: list[int]
    chunked: list[Sequence]

    def involves(self, sequence: Sequence) -> bool:
        return sequence in self.sequences or sequence in self.chunked


class RunningBatch:
    """Rows [0, max_num_seqs), the lowest free one given out first.

    Attributes:
        num_computed: int32, tokens whose computation was ordered.
        num_confirmed: int32, tokens known to be computed, from the end of the prefill on.
        num_known: int32, tokens that were known when the row was given: the prefill's end.
        limit: int32, num_computed at which the row has sampled its last possible token.
        incarnation: int64, +1 whenever a row is taken away.
        is_decoding: bool, past the prefill and below the limit.
        num_releases: Rows taken away so far.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.num_computed: NDArray[np.int32] = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_confirmed: NDArray[np.int32] = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_known: NDArray[np.int32] = np.zeros(max_num_seqs, dtype=np.int32)
        self.limit: NDArray[np.int32] = np.zeros(max_num_seqs, dtype=np.int32)
        self.incarnation: NDArray[np.int64] = np.zeros(max_num_seqs, dtype=np.int64)
        self.is_decoding: NDArray[np.bool_] = np.zeros(max_num_seqs, dtype=np.bool_)
        self.num_releases = 0
        self._sequences: list[Sequence | None] = [None] * max_num_seqs
        self._rows: dict[Sequence, int] = {}
        self._free_rows = list(range(max_num_seqs))
        self._vacated: set[int] = set()  # the worker still has a sequence there
        self._decode_rows: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        self._decode_sequences: list[Sequence] = []
        self._decode_is_stale = False

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def sequences(self) -> list[Sequence]:
        """Sequences that have a row, in the order in which they got it."""
        return list(self._rows)

    def row_of(self, sequence: Sequence) -> int | None:
        return self._rows.get(sequence)

    def sequence_at(self, row: int) -> Sequence:
        """The sequence that has this row.

        Raises:
            InvariantError: nobody has it.
        """
        sequence = self._sequences[row]
        if sequence is None:
            raise InvariantError(f"row {row} is free")
        return sequence

    def add(self, sequence: Sequence, *, num_computed: int, num_known: int) -> int:
        """Give the sequence the lowest free row."""
        row = heappop(self._free_rows)
        self._sequences[row] = sequence
        self._rows[sequence] = row
        self.num_computed[row] = num_computed
        self.num_known[row] = num_known
        # The first result to come, that of the last known token, makes it num_known.
        self.num_confirmed[row] = num_known - 1
        # Feeding position p samples token p + 1: the last token is never fed.
        self.limit[row] = sequence.request.max_total_tokens - 1
        return row

    def start_decoding(self, row: int) -> None:
        self.is_decoding[row] = True
        self._decode_is_stale = True

    def stop_decoding(self, rows: NDArray[np.int32]) -> None:
        self.is_decoding[rows] = False
        self._decode_is_stale = True

    def release(self, sequence: Sequence) -> int:
        """Take the sequence's row away; the next plan removes it on the worker."""
        row = self._rows.pop(sequence)
        self._sequences[row] = None
        self.incarnation[row] += 1
        self.num_releases += 1
        if self.is_decoding[row]:
            self.is_decoding[row] = False
            self._decode_is_stale = True
        heappush(self._free_rows, row)
        self._vacated.add(row)
        return row

    def take_vacated(self) -> NDArray[np.int32]:
        """Rows to remove on the worker with the next plan, ascending."""
        rows = np.array(sorted(self._vacated), dtype=np.int32)
        self._vacated.clear()
        return rows

    def clear(self) -> None:
        """All rows are free on both sides: the worker dropped them."""
        for sequence in list(self._rows):
            self.release(sequence)
        self._vacated.clear()

    def decoding(self) -> tuple[NDArray[np.int32], list[Sequence]]:
        """Rows that decode, ascending, and their sequences. Shared until the next change."""
        if self._decode_is_stale:
            self._decode_rows = np.flatnonzero(self.is_decoding).astype(np.int32)
            self._decode_sequences = self.sequences_at(self._decode_rows)
            self._decode_is_stale = False
        return self._decode_rows, self._decode_sequences

    def sequences_at(self, rows: NDArray[np.int32]) -> list[Sequence]:
        sequences = self._sequences
        return [sequences[row] for row in rows.tolist()]  # type: ignore[misc]  # rows are taken

    def audit(self) -> None:
        """Check that rows are held once.

        Raises:
            InvariantError: they are not.
        """
        held = {row: sequence for sequence, row in self._rows.items()}
        for row, sequence in enumerate(self._sequences):
            if held.get(row) is not sequence or (sequence is None) != (row in self._free_rows):
                raise InvariantError(f"row {row} has {sequence}, map says {held.get(row)}")
            if self.is_decoding[row] and not (
                sequence is not None
                and self.num_known[row] <= self.num_computed[row] < self.limit[row]
            ):
                raise InvariantError(
                    f"row {row} decodes {sequence} at {self.num_computed[row]} of "
                    f"[{self.num_known[row]}, {self.limit[row]})"
                )
        if len(self._free_rows) + len(held) != self.max_num_seqs:
            raise InvariantError(f"{len(held)} rows held, free: {sorted(self._free_rows)}")
