"""RowTable: every reason to refuse a plan, and that a refusal changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
from row_table_tools import (
    MAX_NUM_SEQS,
    NUM_BLOCKS,
    assert_refused,
    make_plan,
    snapshot,
    table_with_rows,
)
from scripted_control_plane import added_row, column

from data_plane.plan_refused import PlanRefused, Refusal
from protos.pagewire.v1 import worker_pb2

REFUSALS: list[tuple[str, Refusal, dict[str, Any]]] = [
    ("base version behind", Refusal.BASE_VERSION_MISMATCH, {"base_version": 2}),
    ("base version ahead", Refusal.BASE_VERSION_MISMATCH, {"base_version": 4, "version": 5}),
    ("version skips one", Refusal.BASE_VERSION_MISMATCH, {"version": 5}),
    ("no step", Refusal.BAD_NUM_STEPS, {"num_steps": 0}),
    ("several steps with a row in prefill", Refusal.BAD_NUM_STEPS, {"num_steps": 2}),
    (
        "more steps than any row has left",
        Refusal.BAD_NUM_STEPS,
        {"num_steps": 2**31 - 1, "removed_rows": [1], "resumed_rows": [0]},
    ),
    ("half an element", Refusal.MALFORMED_COLUMN, {"removed_rows": b"\0\0\0\0\0"}),
    ("not ascending", Refusal.MALFORMED_COLUMN, {"removed_rows": [1, 0]}),
    ("same row twice", Refusal.MALFORMED_COLUMN, {"removed_rows": [1, 1]}),
    ("counts without rows", Refusal.MALFORMED_COLUMN, {"appended_counts": [1]}),
    (
        "fewer ids than counts",
        Refusal.MALFORMED_COLUMN,
        {"appended_rows": [0], "appended_counts": [2], "appended_block_ids": [9]},
    ),
    (
        "count of zero",
        Refusal.MALFORMED_COLUMN,
        {"appended_rows": [0], "appended_counts": [0], "appended_block_ids": []},
    ),
    (
        "counts whose sum wraps around",
        Refusal.MALFORMED_COLUMN,
        {
            "appended_rows": [0, 1, 2],
            "appended_counts": [2**31 - 1, 2**31 - 1, 3],
            "appended_block_ids": [9],
        },
    ),
    ("chunk without a count", Refusal.MALFORMED_COLUMN, {"chunk_rows": [1]}),
    (
        "chunk of nothing",
        Refusal.MALFORMED_COLUMN,
        {"chunk_rows": [1], "chunk_num_tokens": [0]},
    ),
    (
        "copies that are not parallel",
        Refusal.MALFORMED_COLUMN,
        {"block_copies": worker_pb2.BlockCopies(src=column(1), dst=column(9))},
    ),
    ("row above range", Refusal.ROW_OUT_OF_RANGE, {"removed_rows": [MAX_NUM_SEQS]}),
    ("row below range", Refusal.ROW_OUT_OF_RANGE, {"paused_rows": [-1]}),
    ("added row out of range", Refusal.ROW_OUT_OF_RANGE, {"added_rows": [added_row(6, [1], [9])]}),
    ("occupied row added", Refusal.ROW_OCCUPIED, {"added_rows": [added_row(0, [1], [9])]}),
    (
        "row added twice",
        Refusal.ROW_OCCUPIED,
        {"added_rows": [added_row(3, [1], [9]), added_row(3, [1], [10])]},
    ),
    ("empty row removed", Refusal.ROW_EMPTY, {"removed_rows": [3]}),
    (
        "empty row extended",
        Refusal.ROW_EMPTY,
        {"appended_rows": [3], "appended_counts": [1], "appended_block_ids": [9]},
    ),
    (
        "removed row extended",
        Refusal.ROW_EMPTY,
        {
            "removed_rows": [0],
            "appended_rows": [0],
            "appended_counts": [1],
            "appended_block_ids": [9],
        },
    ),
    ("empty row computed", Refusal.ROW_EMPTY, {"chunk_rows": [3], "chunk_num_tokens": [1]}),
    ("empty row paused", Refusal.ROW_EMPTY, {"paused_rows": [3]}),
    ("chunk of a decoding row", Refusal.ROW_STATE, {"chunk_rows": [0], "chunk_num_tokens": [1]}),
    ("paused row paused", Refusal.ROW_STATE, {"paused_rows": [2]}),
    ("row in prefill paused", Refusal.ROW_STATE, {"paused_rows": [1]}),
    ("running row resumed", Refusal.ROW_STATE, {"resumed_rows": [1]}),
    (
        "row paused and resumed",
        Refusal.ROW_STATE,
        {"paused_rows": [0], "resumed_rows": [0]},
    ),
    (
        "chunk past the prefill",
        Refusal.VALUE_OUT_OF_RANGE,
        {"chunk_rows": [1], "chunk_num_tokens": [6]},
    ),
    (
        "token id too high",
        Refusal.TOKEN_OUT_OF_VOCABULARY,
        {"added_rows": [added_row(3, [100], [9])]},
    ),
    (
        "negative token id",
        Refusal.TOKEN_OUT_OF_VOCABULARY,
        {"added_rows": [added_row(3, [1, -1], [9])]},
    ),
    (
        "eos token id too high",
        Refusal.TOKEN_OUT_OF_VOCABULARY,
        {"added_rows": [added_row(3, [1], [9], eos_token_ids=column(100))]},
    ),
    (
        "null block handed out",
        Refusal.BLOCK_ID_OUT_OF_RANGE,
        {"added_rows": [added_row(3, [1], [0])]},
    ),
    (
        "block id too high",
        Refusal.BLOCK_ID_OUT_OF_RANGE,
        {"appended_rows": [0], "appended_counts": [1], "appended_block_ids": [NUM_BLOCKS]},
    ),
    (
        "held block handed out",
        Refusal.BLOCK_IN_USE,
        {"appended_rows": [0], "appended_counts": [1], "appended_block_ids": [7]},
    ),
    (
        "block handed out twice",
        Refusal.BLOCK_IN_USE,
        {"appended_rows": [0, 1], "appended_counts": [1, 1], "appended_block_ids": [9, 9]},
    ),
    (
        "block handed out and hit in one plan",
        Refusal.BLOCK_IN_USE,
        {
            "added_rows": [
                added_row(3, [1] * 5, [9, 10]),
                added_row(4, [1] * 5, [9, 11], num_hit_blocks=1, num_computed_tokens=4),
            ]
        },
    ),
    (
        "hit twice in one table",
        Refusal.BLOCK_IN_USE,
        {
            "added_rows": [
                added_row(3, [1] * 9, [20, 20, 21], num_hit_blocks=2, num_computed_tokens=8)
            ]
        },
    ),
    (
        "held block as destination of a copy",
        Refusal.BLOCK_IN_USE,
        {
            "block_copies": worker_pb2.BlockCopies(
                src=column(1), dst=column(7), row=column(0), index=column(0)
            )
        },
    ),
    (
        "prefix hit written",
        Refusal.BLOCK_NOT_WRITABLE,
        {
            "added_rows": [added_row(3, [1] * 4, [20], num_hit_blocks=1, num_computed_tokens=3)],
            "chunk_rows": [3],
            "chunk_num_tokens": [1],
        },
    ),
    (
        "shared block written",
        Refusal.BLOCK_NOT_WRITABLE,
        {
            "resumed_rows": [0],
            "forks": [worker_pb2.Fork(parent_row=0, child_row=3, sequence_index=1, token=-1)],
        },
    ),
    (
        "table does not cover a chunk",
        Refusal.TABLE_TOO_SHORT,
        {
            "added_rows": [added_row(3, [1] * 5, [9])],
            "chunk_rows": [3],
            "chunk_num_tokens": [5],
        },
    ),
    (
        "table longer than a sequence",
        Refusal.TABLE_TOO_LONG,
        {"appended_rows": [0], "appended_counts": [7], "appended_block_ids": list(range(20, 27))},
    ),
    (
        "table longer than a sequence from the start",
        Refusal.TABLE_TOO_LONG,
        {"added_rows": [added_row(3, [1], list(range(20, 29)))]},
    ),
    (
        "more tokens than a step computes",
        Refusal.TOO_MANY_TOKENS,
        {
            "added_rows": [added_row(3, [1] * 17, list(range(20, 25)))],
            "chunk_rows": [3],
            "chunk_num_tokens": [17],
        },
    ),
    (
        "row forked from itself",
        Refusal.ILLEGAL_FORK,
        {"forks": [worker_pb2.Fork(parent_row=0, child_row=0, token=-1)]},
    ),
    (
        "row in prefill forked",
        Refusal.ILLEGAL_FORK,
        {
            "forks": [worker_pb2.Fork(parent_row=1, child_row=3, token=-1)],
            "chunk_rows": [1],
            "chunk_num_tokens": [4],
        },
    ),
    (
        "token given to a child of a prompt's last chunk",
        Refusal.ILLEGAL_FORK,
        {
            "forks": [worker_pb2.Fork(parent_row=1, child_row=3, token=7)],
            "chunk_rows": [1],
            "chunk_num_tokens": [5],
        },
    ),
    (
        "child of a child",
        Refusal.ILLEGAL_FORK,
        {
            "forks": [
                worker_pb2.Fork(parent_row=0, child_row=3, token=-1),
                worker_pb2.Fork(parent_row=3, child_row=4, token=-1),
            ]
        },
    ),
    (
        "fork of an empty row",
        Refusal.ROW_EMPTY,
        {"forks": [worker_pb2.Fork(parent_row=3, child_row=4, token=-1)]},
    ),
    (
        "fork into an occupied row",
        Refusal.ROW_OCCUPIED,
        {"forks": [worker_pb2.Fork(parent_row=0, child_row=1, token=-1)]},
    ),
    (
        "copy of another row's block",
        Refusal.ILLEGAL_COPY,
        {
            "block_copies": worker_pb2.BlockCopies(
                src=column(3), dst=column(9), row=column(0), index=column(0)
            )
        },
    ),
    (
        "copy past the table",
        Refusal.ILLEGAL_COPY,
        {
            "block_copies": worker_pb2.BlockCopies(
                src=column(1), dst=column(9), row=column(0), index=column(2)
            )
        },
    ),
    (
        "copy of a block that holds nothing yet",
        Refusal.ILLEGAL_COPY,
        {
            "block_copies": worker_pb2.BlockCopies(
                src=column(5), dst=column(9), row=column(1), index=column(2)
            )
        },
    ),
    (
        "source and destination in one plan",
        Refusal.ILLEGAL_COPY,
        {
            "block_copies": worker_pb2.BlockCopies(
                src=column(1, 9), dst=column(9, 10), row=column(0, 0), index=column(0, 0)
            )
        },
    ),
    ("token masks", Refusal.UNSUPPORTED, {}),
    ("drafts", Refusal.UNSUPPORTED, {}),
    (
        "adapter",
        Refusal.UNSUPPORTED,
        {"added_rows": [added_row(3, [1], [9], adapter_slot=1)]},
    ),
]


@pytest.mark.parametrize(
    ("name", "reason", "fields"), REFUSALS, ids=[name for name, _, _ in REFUSALS]
)
def test_refused_plan_changes_nothing(name: str, reason: Refusal, fields: dict[str, Any]) -> None:
    plan = make_plan(4, **{field: v for field, v in fields.items() if field != "version"})
    plan.version = fields.get("version", 4)
    if name == "token masks":
        plan.token_masks.rows = column(0)
    if name == "drafts":
        plan.drafts.rows = column(0)
    assert_refused(plan, reason)


def test_every_reason_of_a_plan_is_tested() -> None:
    tested = {reason for _, reason, _ in REFUSALS}
    # The window is the protocol's: see test_stream_protocol.
    assert tested == set(Refusal) - {Refusal.TOO_MANY_UNCONFIRMED}


def test_refusal_behind_every_delta_undoes_all_of_them() -> None:
    table = table_with_rows()
    before = snapshot(table)
    with pytest.raises(PlanRefused) as refused:
        table.apply(
            make_plan(
                4,
                removed_rows=[2],
                added_rows=[
                    added_row(2, [3] * 9, [1, 6, 7], num_hit_blocks=1, num_computed_tokens=4)
                ],
                forks=[worker_pb2.Fork(parent_row=0, child_row=3, sequence_index=1, token=-1)],
                block_copies=worker_pb2.BlockCopies(
                    src=column(2), dst=column(9), row=column(3), index=column(1)
                ),
                appended_rows=[0, 1, 2],
                appended_counts=[1, 1, 2],
                appended_block_ids=[10, 11, 12, 13],
                chunk_rows=[1],
                chunk_num_tokens=[17],
                resumed_rows=[0],
            )
        )
    assert refused.value.reason == Refusal.VALUE_OUT_OF_RANGE
    assert snapshot(table) == before


def test_refusal_names_field_value_and_limit() -> None:
    with pytest.raises(PlanRefused) as refused:
        table_with_rows().apply(make_plan(4, removed_rows=[6]))
    assert refused.value.message == "removed_rows names row 6, rows are in [0, 6)"
    assert refused.value.metadata == {"field": "removed_rows", "value": "6", "limit": "6"}
