"""RowTable: what accepted plans, Resets and finished rows make of it."""

from __future__ import annotations

import numpy as np
import pytest
from row_table_tools import NUM_BLOCKS, apply, make_plan, make_table, table_with_rows
from scripted_control_plane import added_row, column

from data_plane.plan_refused import PlanRefused, Refusal
from protos.pagewire.v1 import worker_pb2


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
