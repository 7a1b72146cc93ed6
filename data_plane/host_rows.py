"""What a worker's host knows about its rows: plain arrays, changed by `row_table` only."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from data_plane.plan_reader import Limits
    from data_plane.step_work import BoolArray, Int32Array, Int64Array


@dataclass(slots=True, kw_only=True)
class Rows:
    """State of every row, as arrays indexed by row."""

    occupied: BoolArray
    paused: BoolArray
    num_known: Int64Array  # tokens that came with the row (all others come from the device)
    num_computed: Int64Array  # tokens whose KV is written once all ordered steps ran
    max_total: Int64Array  # length limit
    num_blocks: Int64Array  # table length
    first_writable: Int64Array  # table index before which entries are prefix hits
    since: Int64Array  # version that added the row

    @classmethod
    def empty(cls, num_rows: int) -> Rows:
        return cls(
            occupied=np.zeros(num_rows, np.bool_),
            paused=np.zeros(num_rows, np.bool_),
            num_known=np.zeros(num_rows, np.int64),
            num_computed=np.zeros(num_rows, np.int64),
            max_total=np.zeros(num_rows, np.int64),
            num_blocks=np.zeros(num_rows, np.int64),
            first_writable=np.zeros(num_rows, np.int64),
            since=np.zeros(num_rows, np.int64),
        )

    def copy(self) -> Rows:
        return Rows(
            occupied=self.occupied.copy(),
            paused=self.paused.copy(),
            num_known=self.num_known.copy(),
            num_computed=self.num_computed.copy(),
            max_total=self.max_total.copy(),
            num_blocks=self.num_blocks.copy(),
            first_writable=self.first_writable.copy(),
            since=self.since.copy(),
        )

    def clear(self, rows: Int32Array) -> None:
        for field in fields(self):
            getattr(self, field.name)[rows] = 0


class HostRows:
    """All rows, their tables, and who holds which block.

    Attributes:
        limits: What bounds the numbers of plans.
        rows: Per-row arrays.
        table: [max_num_seqs, max_blocks_per_seq] int32 block ids; past a row's length the null
            block 0.
        holders: [num_blocks] int32, per block the entries of all tables that name it.
        known_tokens: Tokens of rows whose prefill is not over.
        live: [max_num_seqs], occupied and not reported as finished by a result.
    """

    def __init__(self, limits: Limits, num_blocks_owned: int) -> None:
        num_rows = limits.max_num_seqs
        self.limits = limits
        self.rows = Rows.empty(num_rows)
        self.table: Int32Array = np.zeros((num_rows, limits.max_blocks_per_seq), np.int32)
        self.holders: Int32Array = np.zeros(num_blocks_owned, np.int32)
        self.known_tokens: dict[int, Int32Array] = {}
        self.live: BoolArray = np.zeros(num_rows, np.bool_)

    def block_table(self, row: int) -> Int32Array:
        """Return a copy of a row's block ids."""
        return self.table[row, : self.rows.num_blocks[row]].copy()
