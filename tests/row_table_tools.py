"""A small RowTable, plans for it, and comparing all that it knows."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from scripted_control_plane import added_row
from scripted_control_plane import plan as plan_message

from data_plane.plan_refused import PlanRefused
from data_plane.row_table import RowTable

if TYPE_CHECKING:
    from data_plane.plan_refused import Refusal
    from data_plane.step_work import StepWork
    from protos.pagewire.v1 import worker_pb2

NUM_BLOCKS, BLOCK_SIZE, MAX_NUM_SEQS = 40, 4, 6


def snapshot(table: RowTable) -> dict[str, Any]:
    """Copy everything that `table` knows, in a form that compares with ==."""
    state = table._state
    return {
        "applied_version": table.applied_version,
        "limits": dataclasses.asdict(state.limits),
        "rows": {
            field.name: getattr(state.rows, field.name).tolist()
            for field in dataclasses.fields(state.rows)
        },
        "table": state.table.tolist(),
        "holders": state.holders.tolist(),
        "known_tokens": {row: ids.tolist() for row, ids in state.known_tokens.items()},
        "live": state.live.tolist(),
    }


def check_invariants(table: RowTable) -> None:
    """What must be true of a RowTable whatever plans it has seen."""
    state = table._state
    rows = state.rows
    held = np.zeros_like(state.holders)
    for row in range(state.limits.max_num_seqs):
        if not rows.occupied[row]:
            assert rows.num_blocks[row] == 0
            assert row not in state.known_tokens
        np.add.at(held, table.block_table(row), 1)
        assert not state.table[row, rows.num_blocks[row] :].any()
    assert held.tolist() == state.holders.tolist()
    assert held[0] == 0
    assert (rows.num_computed <= rows.num_blocks * state.limits.block_size).all()
    in_prefill = rows.occupied & (rows.num_computed < rows.num_known)
    assert sorted(state.known_tokens) == np.flatnonzero(in_prefill).tolist()


def make_table() -> RowTable:
    return RowTable(
        max_num_seqs=MAX_NUM_SEQS,
        num_blocks=NUM_BLOCKS,
        max_model_len=32,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=16,
        vocab_size=100,
    )


def make_plan(version: int, **fields: Any) -> worker_pb2.Plan:
    return plan_message(version, **fields).plan


def table_with_rows() -> RowTable:
    """Version 3. Row 0 decodes at position 5, row 1 is in the middle of its prefill, 2 is paused.

    Blocks 1-2 belong to row 0, 3-5 to row 1, 6-7 to row 2; rows 3-5 are empty.
    """
    table = make_table()
    table.apply(
        make_plan(
            1,
            added_rows=[
                added_row(0, [5, 6, 7, 8], [1, 2]),
                added_row(1, [5] * 10, [3, 4, 5]),
                added_row(2, [9] * 4, [6, 7]),
            ],
            chunk_rows=[0, 1, 2],
            chunk_num_tokens=[4, 5, 4],
        )
    )
    table.apply(make_plan(2))
    table.apply(make_plan(3, paused_rows=[0, 2]))
    return table


def apply(table: RowTable, version: int, **fields: Any) -> StepWork:
    [work] = table.apply(make_plan(version, **fields))
    return work


def assert_refused(plan: worker_pb2.Plan, reason: Refusal) -> None:
    """The plan is refused for that reason, nothing changes, and the next plan still applies."""
    table = table_with_rows()
    before = snapshot(table)
    with pytest.raises(PlanRefused) as refused:
        table.apply(plan)
    assert refused.value.reason == reason
    assert snapshot(table) == before
    table.apply(make_plan(4, chunk_rows=[1], chunk_num_tokens=[5]))
