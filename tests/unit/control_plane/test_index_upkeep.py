from __future__ import annotations

import pytest

from control_plane.block_hash import BlockHasher
from control_plane.engine_config import EngineConfig, EngineCounters
from control_plane.errors import InvariantError
from control_plane.index_upkeep import IndexUpkeep
from control_plane.kv_cache_manager import KVCacheConfig, KVCacheManager
from control_plane.scheduler import Scheduler
from control_plane.scheduler_config import SchedulerConfig


def new_scheduler(num_blocks: int) -> Scheduler:
    hasher = BlockHasher(deployment_seed=b"", model_fingerprint=bytes(32), block_size=4)
    manager = KVCacheManager(
        KVCacheConfig(block_size=4, num_blocks=num_blocks),
        hasher,
        max_num_seqs=2,
        max_model_len=64,
    )
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64)
    return Scheduler(config, manager)


@pytest.mark.parametrize(("num_blocks", "num_pieces"), [(100, 1), (7000, 7)])
def test_a_large_pool_is_audited_in_pieces_once_in_a_while(
    num_blocks: int, num_pieces: int
) -> None:
    scheduler = new_scheduler(num_blocks)
    upkeep = IndexUpkeep(scheduler, EngineConfig(audit_interval_s=60.0), EngineCounters())
    for _ in range(num_pieces - 1):
        upkeep.audit_idle(0.0)
        assert upkeep.is_auditing
    upkeep.audit_idle(0.0)
    assert not upkeep.is_auditing
    # Damage in the last block: found by the next audit, when that has come so far.
    scheduler.kv_cache_manager.pool._pending[num_blocks - 1] = 9
    upkeep.audit_idle(59.0)
    for _ in range(num_pieces - 1):
        upkeep.audit_idle(60.0)
    with pytest.raises(InvariantError, match="inconsistent"):
        upkeep.audit_idle(60.0)


def test_a_leak_is_found_by_the_number_of_free_blocks_every_time() -> None:
    scheduler = new_scheduler(7000)
    upkeep = IndexUpkeep(scheduler, EngineConfig(audit_interval_s=60.0), EngineCounters())
    upkeep.audit_idle(0.0)
    scheduler.kv_cache_manager.pool.allocate(1, 1)
    with pytest.raises(InvariantError, match="6998 of 6999 blocks are free"):
        upkeep.audit_idle(0.0)
