"""RowTable: every reason to refuse a plan, and that a refusal changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from row_table_tools import snapshot
from scripted_control_plane import added_row, column
from scripted_control_plane import plan as plan_message

from data_plane.plan_refused import PlanRefused, Refusal
from data_plane.row_table import RowTable
from protos.pagewire.v1 import inference_pb2, worker_pb2

if TYPE_CHECKING:
    from data_plane.step_work import StepWork

NUM_BLOCKS, BLOCK_SIZE, MAX_NUM_SEQS = 40, 4, 6


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


# Accepted plans.


def test_chunks_sample_only_when_they_end_the_prefill() -> None:
    table = make_table()
    work = apply(
        table,
        1,
        added_rows=[added_row(3, [5, 6, 7, 8, 9], [1, 2]), added_row(1, [7, 8, 9], [3])],
        chunk_rows=[1, 3],
        chunk_num_tokens=[3, 2],
    )
    assert work.rows.tolist() == [1, 3]
    assert work.num_new_tokens.tolist() == [3, 2]
    assert work.start_positions.tolist() == [0, 0]
    assert work.samples.tolist() == [True, False]
    assert work.is_decode.tolist() == [False, False]
    assert work.chunk_token_ids.tolist() == [7, 8, 9, 5, 6]
    assert sorted(work.handed_out.tolist()) == [1, 2, 3]
    work = apply(table, 2, chunk_rows=[3], chunk_num_tokens=[3])
    assert work.rows.tolist() == [1, 3]
    assert work.start_positions.tolist() == [3, 2]
    assert work.samples.tolist() == [True, True]
    assert work.is_decode.tolist() == [True, False]
    assert work.chunk_token_ids.tolist() == [7, 8, 9]


def test_row_decodes_without_being_listed_until_its_length_limit() -> None:
    table = make_table()
    apply(
        table,
        1,
        added_rows=[added_row(0, [5, 6], [1, 2], max_total_tokens=5)],
        chunk_rows=[0],
        chunk_num_tokens=[2],
    )
    positions = [apply(table, version).start_positions.tolist() for version in range(2, 6)]
    # Token 4 is the last one: it is sampled behind position 3 and never fed.
    assert positions == [[2], [3], [], []]
    assert table.num_rows == 1


def test_paused_row_computes_nothing_until_it_is_resumed() -> None:
    table = table_with_rows()
    assert apply(table, 4).rows.tolist() == []
    assert apply(table, 5, resumed_rows=[0]).rows.tolist() == [0]
    assert apply(table, 6).rows.tolist() == [0]


def test_row_can_be_removed_and_assigned_again_in_one_plan_with_the_same_blocks() -> None:
    table = table_with_rows()
    work = apply(
        table,
        4,
        removed_rows=[0],
        added_rows=[added_row(0, [1, 2, 3], [2, 1])],
        chunk_rows=[0],
        chunk_num_tokens=[3],
    )
    assert work.removed_rows.tolist() == [0]
    assert table.block_table(0).tolist() == [2, 1]


def test_prefix_hit_may_be_held_by_several_rows() -> None:
    table = table_with_rows()
    work = apply(
        table,
        4,
        added_rows=[added_row(3, [5, 6, 7, 8, 9], [1, 8], num_hit_blocks=1, num_computed_tokens=4)],
        chunk_rows=[3],
        chunk_num_tokens=[1],
    )
    assert work.start_positions.tolist() == [4]
    assert work.handed_out.tolist() == [8]
    # The hit outlives the row that filled it.
    apply(table, 5, removed_rows=[0])
    with pytest.raises(PlanRefused, match="block 1 is handed out"):
        table.apply(make_plan(6, appended_rows=[3], appended_counts=[1], appended_block_ids=[1]))


def test_full_hit_is_recomputed_in_a_copy_of_its_last_block() -> None:
    table = table_with_rows()
    work = apply(
        table,
        4,
        added_rows=[added_row(3, [5, 6, 7, 8], [1], num_hit_blocks=1, num_computed_tokens=3)],
        block_copies=worker_pb2.BlockCopies(
            src=column(1), dst=column(8), row=column(3), index=column(0)
        ),
        chunk_rows=[3],
        chunk_num_tokens=[1],
    )
    assert work.handed_out.tolist() == [8]
    assert table.block_table(3).tolist() == [8]
    assert table.block_table(0).tolist() == [1, 2]


def test_several_steps_advance_every_decoding_row() -> None:
    table = make_table()
    apply(
        table,
        1,
        added_rows=[
            added_row(0, [5, 6], [1, 2], max_total_tokens=20),
            added_row(1, [5, 6], [3, 4], max_total_tokens=5),
        ],
        chunk_rows=[0, 1],
        chunk_num_tokens=[2, 2],
    )
    works = table.apply(
        make_plan(2, num_steps=4, appended_rows=[0], appended_counts=[1], appended_block_ids=[5])
    )
    assert [work.rows.tolist() for work in works] == [[0, 1], [0, 1], [0], [0]]
    assert [work.start_positions[0] for work in works] == [2, 3, 4, 5]
    assert [work.is_last_step for work in works] == [False, False, False, True]
    assert [work.appended_block_ids.tolist() for work in works] == [[5], [], [], []]


def test_child_forked_while_its_parent_ends_its_prefill_samples_from_the_parents_logits() -> None:
    table = make_table()
    work = apply(
        table,
        1,
        added_rows=[added_row(0, [5, 6, 7, 8, 9], [1, 2])],
        forks=[worker_pb2.Fork(parent_row=0, child_row=2, sequence_index=1, token=-1)],
        chunk_rows=[0],
        chunk_num_tokens=[5],
    )
    assert work.forks.shares_logits.tolist() == [True]
    assert work.rows.tolist() == [0, 2]
    assert work.num_new_tokens.tolist() == [5, 0]
    assert work.samples.tolist() == [True, True]
    # Its last block is shared and half full: the first to write it copies it.
    with pytest.raises(PlanRefused) as refused:
        table.apply(make_plan(2))
    assert refused.value.reason == Refusal.BLOCK_NOT_WRITABLE
    work = apply(
        table,
        2,
        block_copies=worker_pb2.BlockCopies(
            src=column(2), dst=column(3), row=column(2), index=column(1)
        ),
    )
    assert work.rows.tolist() == [0, 2]
    assert work.is_decode.tolist() == [True, True]
    assert table.block_table(2).tolist() == [1, 3]


def test_child_of_a_decoding_row_decodes_in_the_same_step() -> None:
    table = table_with_rows()
    work = apply(
        table,
        4,
        resumed_rows=[0],
        forks=[worker_pb2.Fork(parent_row=0, child_row=5, sequence_index=1, token=17)],
        block_copies=worker_pb2.BlockCopies(
            src=column(2), dst=column(9), row=column(5), index=column(1)
        ),
    )
    assert work.forks.shares_logits.tolist() == [False]
    assert work.forks.token_ids.tolist() == [17]
    assert work.rows.tolist() == [0, 5]
    assert work.start_positions.tolist() == [5, 5]


def test_ids_appended_to_a_row_that_starts_in_the_same_plan_come_behind_its_own() -> None:
    table = make_table()
    apply(
        table,
        1,
        added_rows=[added_row(2, [1] * 9, [1, 2])],
        appended_rows=[2],
        appended_counts=[2],
        appended_block_ids=[7, 3],
        chunk_rows=[2],
        chunk_num_tokens=[9],
    )
    assert table.block_table(2).tolist() == [1, 2, 7, 3]


def test_reset_drops_rows_and_bounds_block_ids_by_the_replicas_smallest() -> None:
    table = table_with_rows()
    table.reset(17, num_blocks=10)
    assert (table.num_rows, table.applied_version, table.num_blocks) == (0, 17, 10)
    with pytest.raises(PlanRefused) as refused:
        table.apply(make_plan(18, added_rows=[added_row(0, [1], [10])]))
    assert refused.value.reason == Refusal.BLOCK_ID_OUT_OF_RANGE
    apply(table, 18, added_rows=[added_row(0, [1], [9])])


def test_reset_refuses_more_blocks_than_there_are() -> None:
    with pytest.raises(ValueError, match="num_blocks must be in"):
        make_table().reset(1, num_blocks=NUM_BLOCKS + 1)


def test_finished_rows_stay_occupied_but_are_not_live() -> None:
    table = table_with_rows()
    table.mark_finished(3, np.array([0, 2], np.int32))
    assert (table.num_rows, table.num_live_rows) == (3, 1)
    with pytest.raises(PlanRefused, match="row 0, which is occupied"):
        table.apply(make_plan(4, added_rows=[added_row(0, [1], [20])]))


def test_late_result_does_not_end_the_rows_next_sequence() -> None:
    table = table_with_rows()
    apply(table, 4, removed_rows=[0], added_rows=[added_row(0, [1], [20])])
    table.mark_finished(3, np.array([0], np.int32))
    assert table.num_live_rows == 3


# Refused plans.

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

ADDED_ROW_REFUSALS: list[tuple[str, Refusal, dict[str, Any]]] = [
    ("no tokens", Refusal.VALUE_OUT_OF_RANGE, {"token_ids": b""}),
    ("no prompt", Refusal.VALUE_OUT_OF_RANGE, {"num_prompt_tokens": 0}),
    ("prompt beyond its tokens", Refusal.VALUE_OUT_OF_RANGE, {"num_prompt_tokens": 6}),
    ("everything computed", Refusal.VALUE_OUT_OF_RANGE, {"num_computed_tokens": 5}),
    ("computed beyond the hits", Refusal.VALUE_OUT_OF_RANGE, {"num_computed_tokens": 1}),
    ("negative num_computed_tokens", Refusal.VALUE_OUT_OF_RANGE, {"num_computed_tokens": -1}),
    ("more hits than blocks", Refusal.VALUE_OUT_OF_RANGE, {"num_hit_blocks": 3}),
    ("longer than the model allows", Refusal.VALUE_OUT_OF_RANGE, {"max_total_tokens": 33}),
    ("nothing left to generate", Refusal.VALUE_OUT_OF_RANGE, {"max_total_tokens": 5}),
    ("negative sequence index", Refusal.VALUE_OUT_OF_RANGE, {"sequence_index": -1}),
]

SAMPLING_REFUSALS: list[tuple[Refusal, dict[str, Any]]] = [
    (Refusal.VALUE_OUT_OF_RANGE, {"temperature": -0.5}),
    (Refusal.VALUE_OUT_OF_RANGE, {"temperature": 101.0}),
    (Refusal.VALUE_OUT_OF_RANGE, {"temperature": float("nan")}),
    (Refusal.VALUE_OUT_OF_RANGE, {"top_p": 0.0}),
    (Refusal.VALUE_OUT_OF_RANGE, {"top_p": 1.5}),
    (Refusal.VALUE_OUT_OF_RANGE, {"min_p": -0.1}),
    (Refusal.VALUE_OUT_OF_RANGE, {"top_k": -1}),
    (Refusal.VALUE_OUT_OF_RANGE, {"min_tokens": -1}),
    (Refusal.TOKEN_OUT_OF_VOCABULARY, {"stop_token_ids": [100]}),
    (Refusal.UNSUPPORTED, {"presence_penalty": 0.5}),
    (Refusal.UNSUPPORTED, {"frequency_penalty": -0.5}),
    (Refusal.UNSUPPORTED, {"repetition_penalty": 1.1}),
    (Refusal.UNSUPPORTED, {"logprobs": 0}),
    (Refusal.UNSUPPORTED, {"prompt_logprobs": 1}),
    (Refusal.UNSUPPORTED, {"logit_bias": {3: 1.0}}),
    (Refusal.UNSUPPORTED, {"allowed_token_ids": [3]}),
    (Refusal.UNSUPPORTED, {"bad_words": ["x"]}),
    (Refusal.UNSUPPORTED, {"structured_output": inference_pb2.StructuredOutput()}),
    (Refusal.UNSUPPORTED, {"beam_search": inference_pb2.BeamSearch()}),
]


def assert_refused(plan: worker_pb2.Plan, reason: Refusal) -> None:
    """The plan is refused for that reason, nothing changes, and the next plan still applies."""
    table = table_with_rows()
    before = snapshot(table)
    with pytest.raises(PlanRefused) as refused:
        table.apply(plan)
    assert refused.value.reason == reason
    assert snapshot(table) == before
    table.apply(make_plan(4, chunk_rows=[1], chunk_num_tokens=[5]))


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


@pytest.mark.parametrize(
    ("name", "reason", "fields"),
    ADDED_ROW_REFUSALS,
    ids=[name for name, _, _ in ADDED_ROW_REFUSALS],
)
def test_added_row_out_of_limits_is_refused(
    name: str, reason: Refusal, fields: dict[str, Any]
) -> None:
    row = added_row(3, [1] * 5, [9, 10])
    for field, value in fields.items():
        setattr(row, field, value)
    assert_refused(make_plan(4, added_rows=[row]), reason)


@pytest.mark.parametrize(
    ("reason", "sampling"), SAMPLING_REFUSALS, ids=[str(fields) for _, fields in SAMPLING_REFUSALS]
)
def test_sampling_parameter_that_cannot_be_honoured_is_refused(
    reason: Refusal, sampling: dict[str, Any]
) -> None:
    row = added_row(3, [1], [9], sampling=inference_pb2.SamplingParams(**sampling))
    assert_refused(make_plan(4, added_rows=[row]), reason)


def test_every_reason_of_a_plan_is_tested() -> None:
    tested = {reason for _, reason, _ in REFUSALS + ADDED_ROW_REFUSALS}
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
