from __future__ import annotations

import pytest

from control_plane.block_pool import BlockPool
from control_plane.errors import InvariantError
from control_plane.request import BlockHash

A, B = BlockHash(b"a" * 32), BlockHash(b"b" * 32)


def test_null_block_is_never_handed_out():
    pool = BlockPool(4)
    assert pool.num_usable_blocks == 3
    assert pool.allocate(3, 1) == [1, 2, 3]
    with pytest.raises(InvariantError, match="asked for 1 of 0"):
        pool.allocate(1, 1)
    with pytest.raises(InvariantError):
        pool.release([0])
    with pytest.raises(ValueError, match="at least 2"):
        BlockPool(1)


def test_uncached_blocks_are_reused_before_cached_ones_in_order_of_release():
    pool = BlockPool(6)
    pool.allocate(5, 1)
    pool.register([2, 4], [A, B], None)
    pool.release([4, 5, 2, 1])
    assert pool.free_order() == [5, 1, 4, 2]
    assert pool.allocate(3, 2) == [5, 1, 4]
    assert pool.find(B, 3) is None
    assert pool.find(A, 3) == 2


def test_touching_a_free_block_takes_it_out_of_the_queue():
    pool = BlockPool(4)
    pool.allocate(3, 1)
    pool.register([1, 2], [A, B], None)
    pool.release([1, 2, 3])
    pool.touch([1])
    assert pool.free_order() == [3, 2]
    pool.touch([1])
    pool.release([1])
    assert pool.ref_cnt(1) == 1


def test_pending_content_is_hit_by_later_plans_only():
    pool = BlockPool(4)
    pool.allocate(1, 5)
    pool.register([1], [A], 5)
    assert pool.find_prefix([A, B], 5) == ([], True)
    assert pool.find_prefix([A, B], 6) == ([1], False)
    assert pool.take_changes() == {}
    pool.confirm(5)
    assert pool.take_changes() == {1: (A, 5)}


def test_a_known_prefix_is_counted_wherever_it_ends():
    pool = BlockPool(8)
    hashes = [BlockHash(bytes([i]) * 32) for i in range(7)]
    for known in range(7):
        assert pool.count_prefix(hashes) == known == len(pool.find_prefix(hashes, 100)[0])
        (block_id,) = pool.allocate(1, known)
        pool.register([block_id], [hashes[known]], None)
    assert pool.count_prefix(hashes) == 7
    assert pool.count_prefix([]) == 0


def test_drop_pending_forgets_what_never_ran():
    pool = BlockPool(4)
    pool.allocate(3, 1)
    pool.register([1], [A], None)
    pool.register([2], [B], 1)
    pool.release([3, 2])
    pool.drop_pending()
    assert pool.find(A, 2) == 1
    assert pool.find(B, 2) is None
    pool.confirm(1)
    assert pool.permanent_entries() == {1: (A, 1)}
    assert pool.free_order() == [3, 2]
    pool.audit()


def test_confirmation_does_not_revive_a_block_that_was_handed_out_again():
    pool = BlockPool(2)
    pool.allocate(1, 1)
    pool.register([1], [A], 1)
    pool.release([1])
    pool.allocate(1, 2)
    pool.register([1], [B], 2)
    pool.confirm(1)
    assert pool.is_pending(1)
    assert pool.take_changes() == {}
    pool.confirm(2)
    assert pool.take_changes() == {1: (B, 2)}


def test_duplicates_of_a_hash_are_kept_and_the_permanent_one_is_preferred():
    pool = BlockPool(5)
    pool.allocate(3, 1)
    pool.register([1], [A], 1)
    pool.register([2, 3], [A, A], None)
    assert pool.num_cached_blocks == 3
    assert pool.find(A, 1) == 2
    pool.forget(2)
    pool.forget(3)
    assert pool.find(A, 1) is None
    assert pool.find(A, 2) == 1


def test_changes_are_coalesced():
    pool = BlockPool(2)
    pool.allocate(1, 1)
    pool.register([1], [A], None)
    pool.release([1])
    pool.allocate(1, 2)
    assert pool.take_changes() == {1: None}
    pool.register([1], [B], None)
    assert pool.take_changes() == {1: (B, 2)}
    assert pool.take_changes() == {}


def test_adopt_takes_only_blocks_that_cannot_have_changed():
    pool = BlockPool(5)
    pool.allocate(2, 7)
    pool.release([1])
    assert not pool.adopt(0, A, 3), "null block"
    assert not pool.adopt(5, A, 3), "out of range"
    assert not pool.adopt(2, A, 3), "held"
    assert not pool.adopt(1, A, 3), "handed out since"
    assert not pool.adopt(3, A, 0), "never handed out"
    assert pool.adopt(3, A, 3)
    assert not pool.adopt(3, B, 3), "has a name"
    assert pool.permanent_entries() == {3: (A, 3)}
    assert pool.free_order() == [4, 1, 3]
    pool.audit()


def test_register_refuses_blocks_nobody_holds_and_second_names():
    pool = BlockPool(3)
    with pytest.raises(InvariantError, match="ref_cnt 0"):
        pool.register([1], [A], None)
    pool.allocate(1, 1)
    pool.register([1], [A], None)
    with pytest.raises(InvariantError):
        pool.register([1], [B], None)


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._ref_cnt.__setitem__(2, 1),
        lambda pool: pool._next.__setitem__(2, 0),
        lambda pool: pool._hash.__setitem__(3, A),
        lambda pool: pool._index.pop(A),
        lambda pool: pool._pending.__setitem__(1, 9),
    ],
)
def test_audit_finds_damage(damage: object):
    pool = BlockPool(6)
    pool.allocate(1, 1)
    pool.register([1], [A], None)
    pool.audit()
    damage(pool)  # type: ignore[operator]
    with pytest.raises(InvariantError, match="block pool is inconsistent"):
        pool.audit()


def free_pool() -> BlockPool:
    """Named and unnamed free blocks, one name twice."""
    pool = BlockPool(9)
    held = pool.allocate(6, 1)
    pool.register(held[:4], [A, B, A, bytes(32)], None)
    pool.release(reversed(held))
    return pool


def test_audit_of_free_blocks_finds_nothing_where_there_is_nothing():
    pool = free_pool()
    pool.audit()
    pool.audit_free(range(1, 9))


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._ref_cnt.__setitem__(5, 1),
        lambda pool: pool._next.__setitem__(2, 0),
        lambda pool: pool._prev.__setitem__(6, 7),
        lambda pool: pool._unlink(8),
        lambda pool: pool._hash.__setitem__(7, A),
        lambda pool: pool._index.pop(B),
        lambda pool: pool._index[A].remove(3),
        lambda pool: pool._pending.__setitem__(1, 9),
        lambda pool: (pool._unlink(1), pool._link_last(0, 1)),
    ],
)
def test_audit_of_free_blocks_finds_damage(damage: object):
    pool = free_pool()
    damage(pool)  # type: ignore[operator]
    with pytest.raises(InvariantError, match="is inconsistent"):
        pool.audit_free(range(1, 9))
