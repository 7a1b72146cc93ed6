"""Comparing the whole state of a RowTable."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

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
