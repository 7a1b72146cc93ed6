from __future__ import annotations

import numpy as np
import pytest

from control_plane.block_hash import BlockHasher
from control_plane.errors import InvariantError
from control_plane.kv_cache_manager import KVCacheConfig, KVCacheManager
from control_plane.request import Request, SamplingParams, Sequence


def new_manager(num_blocks: int = 10, **config: object) -> KVCacheManager:
    return KVCacheManager(
        KVCacheConfig(block_size=4, num_blocks=num_blocks, **config),  # type: ignore[arg-type]
        BlockHasher(deployment_seed=b"d", model_fingerprint=b"m", block_size=4),
        max_num_seqs=4,
        max_model_len=32,
    )


def new_sequence(tokens: list[int]) -> Sequence:
    return Request(
        req_id="r",
        prompt_token_ids=tokens,
        sampling=SamplingParams(),
        seed=0,
        max_total_tokens=32,
        arrival=0,
    ).sequences[0]


def compute(manager: KVCacheManager, row: int, sequence: Sequence, version: int) -> list[int]:
    hits, _ = manager.find_hits(sequence, version)
    manager.touch(hits)
    table = manager.allocate_row(row, sequence, hits, version)
    manager.register_chunk(row, sequence, sequence.num_tokens, version)
    manager.pool.confirm(version)
    return table.tolist()


@pytest.mark.parametrize(
    "wrong", [{"block_size": 3}, {"block_size": 0}, {"num_blocks": 1}, {"watermark": 1.0}]
)
def test_config_refuses_what_makes_no_pool(wrong: dict[str, float]):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        KVCacheConfig(**{"block_size": 16, "num_blocks": 8, **wrong})  # type: ignore[arg-type]


def test_hasher_and_pool_must_agree_on_the_block_size():
    with pytest.raises(ValueError, match="blocks of 8 tokens"):
        KVCacheManager(
            KVCacheConfig(block_size=4, num_blocks=8),
            BlockHasher(deployment_seed=b"", model_fingerprint=b"", block_size=8),
            max_num_seqs=1,
            max_model_len=8,
        )


def test_full_prompt_hit_still_computes_last_token():
    manager = new_manager()
    first = compute(manager, 0, new_sequence(list(range(8))), 1)
    hits, is_next_being_computed = manager.find_hits(new_sequence(list(range(8))), 2)
    assert hits == first[:1]
    assert not is_next_being_computed
    hits, _ = manager.find_hits(new_sequence([*range(8), 8]), 2)
    assert hits == first


def test_partly_filled_block_is_never_a_hit():
    manager = new_manager()
    compute(manager, 0, new_sequence(list(range(7))), 1)
    hits, _ = manager.find_hits(new_sequence(list(range(8))), 2)
    assert len(hits) == 1


def test_shared_prefix_is_freed_last():
    manager = new_manager()
    table = compute(manager, 0, new_sequence(list(range(12))), 1)
    manager.free_row(0)
    assert manager.pool.free_order()[-3:] == table[::-1]


def test_without_prefix_caching_nothing_is_named():
    manager = new_manager(enable_prefix_caching=False)
    compute(manager, 0, new_sequence(list(range(12))), 1)
    assert manager.pool.num_cached_blocks == 0
    assert manager.find_hits(new_sequence(list(range(12))), 2) == ([], False)


def test_fits_counts_no_slot_for_the_last_token_and_no_null_block():
    manager = new_manager(num_blocks=5)
    assert manager.fits(17)
    assert not manager.fits(18)


def test_admission_leaves_the_watermark_to_those_who_run():
    manager = new_manager(num_blocks=11, watermark=0.2)
    assert manager.can_admit([[]], 8, leave_room=True)
    assert not manager.can_admit([[]], 9, leave_room=True)
    assert manager.can_admit([[]], 10, leave_room=False)


def test_free_hits_count_as_needed_and_once_per_group():
    manager = new_manager(num_blocks=5)
    table = compute(manager, 0, new_sequence(list(range(8))), 1)
    manager.free_row(0)
    # Two blocks hit and two new ones are all four; each sequence of a group may share the hits.
    assert manager.can_admit([table], 4, leave_room=False)
    assert not manager.can_admit([table], 5, leave_room=False)
    assert manager.can_admit([table, table], 6, leave_room=False)
    assert not manager.can_admit([table, table], 7, leave_room=False)


def test_forget_takes_the_names_of_what_the_row_computed_itself():
    manager = new_manager()
    shared = compute(manager, 0, new_sequence(list(range(8))), 1)
    sequence = new_sequence([*range(8), 8, 9, 10, 11, 12])
    table = compute(manager, 1, sequence, 2)
    assert table[:2] == shared
    manager.forget(1)
    assert [manager.pool.block_hash(block) is not None for block in table] == [
        True, True, False, False,
    ]  # fmt: skip
    manager.free_row(1)
    manager.audit()


def test_grow_appends_one_block_to_rows_at_a_block_boundary():
    manager = new_manager()
    compute(manager, 0, new_sequence(list(range(4))), 1)
    compute(manager, 2, new_sequence(list(range(50, 56))), 2)
    num_computed = np.array([4, 0, 6, 0], dtype=np.int32)
    rows = manager.rows_to_grow(np.array([0, 2], dtype=np.int32), num_computed)
    assert rows.tolist() == [0]
    block_ids = manager.grow(rows, 3)
    assert manager.block_table[0, :2].tolist()[1:] == block_ids.tolist()
    assert manager.pool.generation(int(block_ids[0])) == 3


def test_audit_finds_a_block_that_no_table_holds():
    manager = new_manager()
    manager.pool.allocate(1, 1)
    with pytest.raises(InvariantError, match=r"\(1, 0, 1\)"):
        manager.audit()


def test_row_that_holds_blocks_is_not_given_others():
    manager = new_manager()
    compute(manager, 0, new_sequence([1]), 1)
    with pytest.raises(InvariantError, match="row 0 holds 1 blocks"):
        manager.allocate_row(0, new_sequence([1]), [], 2)
