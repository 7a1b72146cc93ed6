"""Comparing the whole state of a RowTable."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from data_plane.row_table import RowTable


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
