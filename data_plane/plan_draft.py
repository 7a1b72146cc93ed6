"""The state that a plan would lead to: its deltas, checked against the present state.

Owns: the rules for removing, adding, forking, copying, appending and pausing. Does not know: which
rows a step computes; `plan_work` derives that from the draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from data_plane.plan_refused import PlanRefused, Refusal
from data_plane.step_work import (
    BlockCopies,
    BoolArray,
    Forks,
    Int32Array,
    Int64Array,
    NewRow,
)

if TYPE_CHECKING:
    from data_plane.host_rows import HostRows
    from data_plane.plan_reader import ForkOrder, PlanColumns

_NO_IDS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deltas:
    """What `apply_deltas` found out for the runner, beside the plan's own columns."""

    forks: Forks
    handed_out: Int32Array


class PlanDraft:
    """The state a plan would lead to.

    Per-row arrays are copies, changed tables are kept aside, and only `holders` is changed in
    place (it has one entry per block of the cache) with a record of how to undo it.
    """

    def __init__(self, state: HostRows, columns: PlanColumns) -> None:
        self.state = state
        self.limits = state.limits
        self.columns = columns
        self.rows = state.rows.copy()
        self.holders = state.holders
        self._held: list[tuple[Int32Array, int]] = []
        # Tables of rows that start or have an entry replaced in this plan.
        self.new_tables: dict[int, Int32Array] = {}
        # Known tokens of rows that start in this plan.
        self.new_tokens: dict[int, Int32Array] = {}
        # Children that sample from their parent's logits in the first step.
        self.sampling_children: list[int] = []
        self._shared_after_step: list[Int32Array] = []
        # Row, table index and id of what is appended to rows that are not in new_tables.
        self._append_rows: Int32Array = _NO_IDS
        self._append_indices: Int64Array = np.empty(0, np.int64)
        self._append_ids: Int32Array = _NO_IDS

    def apply_deltas(self, version: int) -> Deltas:
        """Check and draft the plan's deltas, in the order in which they apply."""
        columns = self.columns
        self._remove(columns.removed_rows)
        for new_row in columns.added:
            self._add(new_row, version)
        handed_out = self._hand_out()
        forks = self._fork(columns.forks, version) if columns.forks else Forks()
        if columns.copies.src.size:
            self._copy(columns.copies)
        if columns.appended_rows.size:
            self._append()
        self._pause(columns.paused_rows, columns.resumed_rows)
        return Deltas(forks=forks, handed_out=handed_out)

    def share_after_step(self) -> None:
        """Count the holds of children whose parent has now ended its prefill."""
        for table in self._shared_after_step:
            self._hold(table, 1)
        self._shared_after_step.clear()

    def roll_back(self) -> None:
        """Undo what `apply_deltas` and `share_after_step` changed in place."""
        for ids, sign in reversed(self._held):
            np.subtract.at(self.holders, ids, sign)

    def commit(self, version: int) -> None:
        """Make the draft the state. Cannot fail."""
        state, columns = self.state, self.columns
        for row in columns.removed_rows.tolist():
            state.table[row] = 0
            state.known_tokens.pop(row, None)
        state.live[columns.removed_rows] = False
        for row, table in self.new_tables.items():
            state.table[row] = 0
            state.table[row, : table.size] = table
        if self._append_ids.size:
            state.table[self._append_rows, self._append_indices] = self._append_ids
        state.known_tokens.update(self.new_tokens)
        for row in columns.chunk_rows.tolist():
            if self.rows.num_computed[row] >= self.rows.num_known[row]:
                del state.known_tokens[row]
        started = self.rows.since == version
        if columns.added or columns.forks:
            state.live[started & self.rows.occupied] = True
        state.rows = self.rows

    def _remove(self, rows: Int32Array) -> None:
        if not rows.size:
            return
        self.require_occupied("removed_rows", rows)
        for row in rows.tolist():
            self._hold(self.table_of(row), -1)
        self.rows.clear(rows)

    def _add(self, new_row: NewRow, version: int) -> None:
        row = new_row.row
        self._require_free("added_rows.row", row)
        ids = new_row.block_ids
        if len(set(ids.tolist())) != ids.size:
            raise PlanRefused(
                Refusal.BLOCK_IN_USE,
                f"row {row} starts with the same block twice in its table",
                field="added_rows.block_ids",
                row=row,
            )
        self.new_tables[row] = ids
        self.new_tokens[row] = new_row.token_ids
        self._hold(ids, 1)
        rows = self.rows
        rows.occupied[row] = True
        rows.num_known[row] = new_row.token_ids.size
        rows.num_computed[row] = new_row.num_computed_tokens
        rows.max_total[row] = new_row.max_total_tokens
        rows.num_blocks[row] = ids.size
        rows.first_writable[row] = new_row.num_hit_blocks
        rows.since[row] = version

    def _hand_out(self) -> Int32Array:
        """Count the holds of copies and appends, and check that nobody else holds what is new."""
        columns = self.columns
        handed_out = columns.appended_block_ids
        if columns.added or columns.copies.dst.size:
            handed_out = np.concatenate(
                [new_row.block_ids[new_row.num_hit_blocks :] for new_row in columns.added]
                + [columns.copies.dst, columns.appended_block_ids]
            )
            self._hold(columns.copies.dst, 1)
        if not handed_out.size:
            return handed_out
        self._hold(columns.appended_block_ids, 1)
        # Also finds an id that is handed out twice, or handed out and hit, in this plan.
        in_use = self.holders[handed_out] != 1
        if in_use.any():
            block_id = int(handed_out[in_use.argmax()])
            raise PlanRefused(
                Refusal.BLOCK_IN_USE,
                f"block {block_id} is handed out but held by a row or named twice in this plan",
                field="block_ids",
                value=block_id,
            )
        return handed_out

    def _fork(self, orders: tuple[ForkOrder, ...], version: int) -> Forks:
        rows = self.rows
        chunk_tokens = dict(
            zip(
                self.columns.chunk_rows.tolist(),
                self.columns.chunk_num_tokens.tolist(),
                strict=True,
            )
        )
        children: set[int] = set()
        shares_logits: list[bool] = []
        for order in orders:
            parent, child = order.parent_row, order.child_row
            self.require_occupied("forks.parent_row", np.array([parent], np.int32))
            self._require_free("forks.child_row", child)
            num_computed, num_known = int(rows.num_computed[parent]), int(rows.num_known[parent])
            is_prefill = num_computed < num_known
            ends_prefill = is_prefill and num_computed + chunk_tokens.get(parent, 0) == num_known
            if (
                parent in children
                or (is_prefill and not ends_prefill)
                or (ends_prefill and order.token != -1)
            ):
                raise PlanRefused(
                    Refusal.ILLEGAL_FORK,
                    f"row {child} is forked from row {parent}, which has {num_computed} of "
                    f"{num_known} known tokens computed and may not be forked here with token "
                    f"{order.token}",
                    field="forks",
                    parent_row=parent,
                    child_row=child,
                )
            children.add(child)
            shares_logits.append(ends_prefill)
            if ends_prefill:
                self.sampling_children.append(child)
            table = self.table_of(parent)
            self.new_tables[child] = table
            if ends_prefill:
                # The parent may still fill the blocks that the child will share with it.
                self._shared_after_step.append(table)
            else:
                self._hold(table, 1)
            rows.occupied[child] = True
            rows.num_known[child] = num_known
            rows.num_computed[child] = num_computed
            rows.max_total[child] = rows.max_total[parent]
            rows.num_blocks[child] = table.size
            rows.first_writable[child] = rows.first_writable[parent]
            rows.since[child] = version
        return Forks(
            parent_rows=np.array([order.parent_row for order in orders], np.int32),
            child_rows=np.array([order.child_row for order in orders], np.int32),
            sequence_indices=np.array([order.sequence_index for order in orders], np.int32),
            token_ids=np.array([order.token for order in orders], np.int32),
            shares_logits=np.array(shares_logits, np.bool_),
        )

    def _copy(self, copies: BlockCopies) -> None:
        rows = self.rows
        self.require_occupied("block_copies.row", copies.rows)
        for src, dst, row, index in zip(
            copies.src.tolist(),
            copies.dst.tolist(),
            copies.rows.tolist(),
            copies.indices.tolist(),
            strict=True,
        ):
            table = self.table_of(row)
            # An entry at or past num_computed holds nothing yet when the copy runs.
            holds_data = 0 <= index * self.limits.block_size < rows.num_computed[row]
            if not (0 <= index < table.size and table[index] == src and holds_data):
                raise PlanRefused(
                    Refusal.ILLEGAL_COPY,
                    f"block {src} is not entry {index} of row {row}'s table, or holds nothing "
                    f"yet: the row has {table.size} blocks and {int(rows.num_computed[row])} "
                    f"computed tokens",
                    field="block_copies.src",
                    value=src,
                    row=row,
                    index=index,
                )
            table[index] = dst
            self.new_tables[row] = table
            self._hold(np.array([src], np.int32), -1)
            # A private copy of the last prefix hit may be written, as of a full hit.
            if index == rows.first_writable[row] - 1:
                rows.first_writable[row] = index

    def _append(self) -> None:
        columns, lengths = self.columns, self.rows.num_blocks
        rows, counts, ids = (
            columns.appended_rows,
            columns.appended_counts,
            columns.appended_block_ids,
        )
        self.require_occupied("appended_rows", rows)
        too_long = lengths[rows] + counts > self.limits.max_blocks_per_seq
        if too_long.any():
            row = int(rows[too_long.argmax()])
            raise PlanRefused(
                Refusal.TABLE_TOO_LONG,
                f"row {row} would have more than {self.limits.max_blocks_per_seq} blocks",
                field="appended_counts",
                row=row,
                limit=self.limits.max_blocks_per_seq,
            )
        id_rows = np.repeat(rows, counts)
        # Position of each id within its row's run, then behind the row's present end.
        within = np.arange(ids.size) - np.repeat(np.cumsum(counts) - counts, counts)
        indices = lengths[id_rows] + within
        lengths[rows] += counts
        if self.new_tables:
            is_new = np.isin(id_rows, np.fromiter(self.new_tables, np.int32))
            for row in np.unique(id_rows[is_new]).tolist():
                self.new_tables[row] = np.concatenate([self.new_tables[row], ids[id_rows == row]])
            id_rows, indices, ids = id_rows[~is_new], indices[~is_new], ids[~is_new]
        self._append_rows, self._append_indices, self._append_ids = id_rows, indices, ids

    def _pause(self, paused: Int32Array, resumed: Int32Array) -> None:
        rows = self.rows
        if resumed.size:
            self.require_occupied("resumed_rows", resumed)
            self.require_state("resumed_rows", resumed, rows.paused[resumed], "not paused")
        if paused.size:
            self.require_occupied("paused_rows", paused)
            is_running = ~rows.paused[paused]
            is_running &= rows.num_computed[paused] >= rows.num_known[paused]
            self.require_state("paused_rows", paused, is_running, "paused or in prefill")
        rows.paused[resumed] = False
        rows.paused[paused] = True

    # Helpers.

    def table_of(self, row: int) -> Int32Array:
        """Return a copy of a row's table without what this plan appends to an old row."""
        table = self.new_tables.get(row)
        if table is None:
            return self.state.block_table(row)
        return table.copy()

    def _hold(self, ids: Int32Array, sign: int) -> None:
        np.add.at(self.holders, ids, sign)
        self._held.append((ids, sign))

    def require_occupied(self, field: str, rows: Int32Array) -> None:
        occupied = self.rows.occupied[rows]
        if not occupied.all():
            row = int(rows[occupied.argmin()])
            raise PlanRefused(
                Refusal.ROW_EMPTY, f"{field} names row {row}, which is empty", field=field, row=row
            )

    def _require_free(self, field: str, row: int) -> None:
        if self.rows.occupied[row]:
            raise PlanRefused(
                Refusal.ROW_OCCUPIED,
                f"{field} names row {row}, which is occupied",
                field=field,
                row=row,
            )

    def require_state(self, field: str, rows: Int32Array, holds: BoolArray, state: str) -> None:
        if not holds.all():
            row = int(rows[holds.argmin()])
            raise PlanRefused(
                Refusal.ROW_STATE,
                f"{field} names row {row}, which is {state}",
                field=field,
                row=row,
            )
