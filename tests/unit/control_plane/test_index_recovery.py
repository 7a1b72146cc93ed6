"""Entries count only where the worker's generation is theirs; Generations are read strictly."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from control_plane.block_pool import BlockPool
from control_plane.errors import ProtocolError
from control_plane.index_recovery import IndexRecovery
from protos.pagewire.v1 import worker_pb2

A, B, C = (cast("Any", bytes([i]) * 32) for i in range(1, 4))
APPLIED = 20
NUM_BLOCKS = 6


def chunk(first: int, *values: int, is_last: bool = True) -> worker_pb2.Generations:
    return worker_pb2.Generations(
        first_block_id=first,
        generations=np.array(values, "<i8").tobytes(),
        is_last=is_last,
    )


class Checking(IndexRecovery):
    """One whose work is done as soon as there is any."""

    def take(self, message: worker_pb2.Generations, rank: int = 0) -> None:
        super().take(message, rank)
        self.work(1 << 30)

    def offer(self, stored: Any) -> None:
        super().offer(stored)
        self.work(1 << 30)


def recovery(pool: BlockPool, stored: Any) -> IndexRecovery:
    return Checking(pool, applied_version=APPLIED, hold_until=5.0, stored=stored)


def test_entries_are_adopted_where_generations_agree() -> None:
    pool = BlockPool(NUM_BLOCKS)
    stored = {1: (A, 7), 2: (B, 7), 3: (C, 9), 5: (C, 8), 99: (A, 7)}
    checking = recovery(pool, stored)
    assert checking.hold_until == 5.0
    # Block 2 was handed out again, block 3 is behind, block 4 is unknown.
    checking.take(chunk(0, 0, 7, 12, 8, 3, 8))
    assert (checking.num_adopted, checking.num_refused) == (2, 3)
    assert checking.is_settled
    assert checking.hold_until < 0
    assert pool.permanent_entries() == {1: (A, 7), 5: (C, 8)}
    # Nobody is told: the store knows them.
    assert pool.take_changes() == {}
    pool.audit()


def test_oldest_and_last_of_a_plan_are_evicted_first() -> None:
    pool = BlockPool(NUM_BLOCKS)
    checking = recovery(pool, {1: (A, 7), 2: (B, 7), 3: (C, 4)})
    checking.take(chunk(0, 0, 7, 7, 4, 0, 0))
    assert pool.free_order() == [4, 5, 3, 2, 1]


def test_chunks_are_joined() -> None:
    pool = BlockPool(NUM_BLOCKS)
    checking = recovery(pool, {1: (A, 7), 4: (B, 2)})
    checking.take(chunk(0, 0, 7, is_last=False))
    assert not checking.is_complete
    checking.take(chunk(2, 0, 0, 2, 0))
    assert checking.num_adopted == 2


def test_late_entries_are_adopted_but_for_blocks_handed_out_since() -> None:
    pool = BlockPool(NUM_BLOCKS)
    checking = recovery(pool, None)
    checking.take(chunk(0, 0, 7, 7, 0, 7, 3))
    assert not checking.is_settled
    assert checking.hold_until == 5.0
    checking.end_hold()
    # What the store may still speak of is handed out last, the oldest of it first.
    assert pool.allocate(2, APPLIED + 2) == [3, 5]
    held = pool.allocate(1, APPLIED + 3)
    assert held == [1]
    pool.release(held)
    checking.offer({1: (A, 7), 2: (B, 7), 5: (C, 3)})
    assert pool.permanent_entries() == {2: (B, 7)}
    pool.audit()


def test_an_entry_counts_only_if_every_rank_has_its_generation() -> None:
    pool = BlockPool(NUM_BLOCKS)
    stored = {1: (A, 7), 2: (B, 7), 3: (C, 9)}
    checking = Checking(pool, applied_version=APPLIED, hold_until=5.0, stored=stored, num_ranks=2)
    checking.take(chunk(0, 0, 7, 7, 9, 0, 0), rank=1)
    assert not checking.is_complete
    assert checking.hold_until == 5.0
    # The other rank never applied the plan that handed out block 2, and was restarted before that
    # of block 3.
    checking.take(chunk(0, 0, 7, 3, is_last=False), rank=0)
    checking.take(chunk(3, 0, 0, 0), rank=0)
    assert checking.is_settled
    assert pool.permanent_entries() == {1: (A, 7)}
    assert (checking.num_adopted, checking.num_refused) == (1, 2)


def test_what_was_kept_is_dropped_where_the_ranks_disagree() -> None:
    pool = BlockPool(NUM_BLOCKS)
    pool.register(pool.allocate(2, 5), [A, B], None)
    pool.release([2, 1])
    checking = Checking(pool, applied_version=APPLIED, hold_until=5.0, stored={}, num_ranks=2)
    checking.take(chunk(0, 0, 5, 5, 0, 0, 0), rank=0)
    checking.take(chunk(0, 0, 5, 6, 0, 0, 0), rank=1)
    assert pool.permanent_entries() == {1: (A, 5)}


def test_chunks_of_one_rank_do_not_count_for_another() -> None:
    checking = Checking(
        BlockPool(NUM_BLOCKS), applied_version=APPLIED, hold_until=5.0, stored={}, num_ranks=2
    )
    checking.take(chunk(0, 0, 7, is_last=False), rank=0)
    with pytest.raises(ProtocolError):
        checking.take(chunk(2, 0, 0, 0, 0), rank=1)


def test_what_was_kept_is_checked_too() -> None:
    pool = BlockPool(NUM_BLOCKS)
    pool.register(pool.allocate(2, 5), [A, B], None)
    pool.release([2, 1])
    checking = recovery(pool, {})
    assert checking.hold_until == 5.0
    # Another control plane handed block 2 out meanwhile.
    checking.take(chunk(0, 0, 5, 9, 0, 0, 0))
    assert pool.permanent_entries() == {1: (A, 5)}
    assert checking.num_refused == 1


def test_what_was_kept_is_dropped_if_generations_do_not_come_in_time() -> None:
    pool = BlockPool(NUM_BLOCKS)
    pool.register(pool.allocate(1, 5), [A], None)
    pool.release([1])
    checking = recovery(pool, {3: (C, 4)})
    checking.end_hold()
    assert pool.permanent_entries() == {}
    mine = pool.allocate(1, APPLIED + 2)
    pool.register(mine, [B], None)
    # Generations of before the plan do not contradict what the plan computed.
    checking.take(chunk(0, 0, 5, 9, 4, 0, 0))
    assert pool.permanent_entries() == {mine[0]: (B, APPLIED + 2), 3: (C, 4)}


def test_nothing_to_check_holds_nothing() -> None:
    assert recovery(BlockPool(NUM_BLOCKS), {}).hold_until < 0


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([chunk(1, 0, 0, 0, 0, 0)], "first_block_id"),
        ([chunk(-1, 0)], "first_block_id"),
        ([chunk(0, 0, 1, is_last=False), chunk(3, 0, 0, 0)], "first_block_id"),
        ([chunk(0, 0, 1, is_last=False), chunk(1, 0, 0, 0, 0, 0)], "first_block_id"),
        ([chunk(0, 0, 0, 0, 0, 0)], "is_last"),
        ([chunk(0, 0, 0, 0, 0, 0, 0, 0)], "is_last"),
        ([chunk(0, 0, 0, 0, 0, 0, 0, is_last=False)], "is_last"),
        ([chunk(0, is_last=False)], "generations"),
        ([worker_pb2.Generations(generations=b"\0" * 9)], "generations"),
        ([chunk(0, 0, 1, -1, 0, 0, 0)], "generations"),
        ([chunk(0, 0, 1, APPLIED + 1, 0, 0, 0)], "generations"),
        ([chunk(0, 3, 1, 0, 0, 0, 0)], "generations"),
    ],
)
def test_contradictions_are_refused_by_name(
    messages: list[worker_pb2.Generations], field: str
) -> None:
    pool = BlockPool(NUM_BLOCKS)
    checking = recovery(pool, {1: (A, 1)})
    for message in messages[:-1]:
        checking.take(message)
    with pytest.raises(ProtocolError) as error:
        checking.take(messages[-1])
    assert error.value.reason == "MALFORMED_MESSAGE"
    assert error.value.metadata["field"] == f"generations.{field}"
    assert pool.num_cached_blocks == 0


def test_many_entries_are_taken_over_piece_by_piece_while_plans_wait() -> None:
    num_blocks = 5000
    pool = BlockPool(num_blocks)
    generations = [0, *([7] * (num_blocks - 1))]
    stored: Any = {i: (bytes([i % 256, i // 256]) * 16, 7) for i in range(1, num_blocks)}
    checking = IndexRecovery(pool, applied_version=APPLIED, hold_until=5.0, stored=stored)
    checking.take(chunk(0, *generations))
    assert checking.has_work
    assert checking.hold_until == 5.0
    num_pieces = 0
    while checking.has_work:
        assert not checking.is_settled
        before = pool.num_cached_blocks
        checking.work(1)
        assert pool.num_cached_blocks - before <= 1024
        num_pieces += 1
    assert num_pieces > 8
    assert checking.is_settled
    assert checking.hold_until < 0
    assert (checking.num_adopted, checking.num_refused) == (num_blocks - 1, 0)
    pool.audit()


def test_blocks_that_plans_take_between_two_pieces_are_left_alone() -> None:
    num_blocks = 5000
    pool = BlockPool(num_blocks)
    stored: Any = {i: (bytes([i % 256, i // 256]) * 16, 7) for i in range(1, num_blocks)}
    checking = IndexRecovery(pool, applied_version=APPLIED, hold_until=5.0, stored=stored)
    checking.take(chunk(0, 0, *([7] * (num_blocks - 1))))
    held: list[int] = []
    while checking.has_work:
        held += pool.allocate(10, APPLIED + 1)
        checking.work(1)
    entries = pool.permanent_entries()
    assert not set(held) & set(entries)
    assert len(held) + len(entries) == num_blocks - 1
    assert checking.num_adopted + checking.num_refused == num_blocks - 1
    assert 0 < checking.num_refused < len(held)
    pool.audit()
