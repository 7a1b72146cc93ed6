"""The simulation's cache against the real block pool: the same hits, the same counts."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from control_plane.block_hash import BlockHasher
from control_plane.kv_cache_manager import KVCacheConfig, KVCacheManager
from control_plane.request import Request, SamplingParams
from tests.benchmarks.scale.prefix_cache import PrefixCache, Segment
from tests.benchmarks.scale.workload import BLOCK_SIZE, Session, Workload, WorkloadConfig

ROWS = 8


class RealCache:
    """A `KVCacheManager` used as the simulation uses its cache: output blocks taken at once."""

    def __init__(self, num_blocks: int) -> None:
        hasher = BlockHasher(
            deployment_seed=b"", model_fingerprint=bytes(32), block_size=BLOCK_SIZE
        )
        self._hasher = hasher
        self.manager = KVCacheManager(
            KVCacheConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks),
            hasher,
            max_num_seqs=ROWS,
            max_model_len=1 << 15,
        )
        self._version = 0

    def admit(self, row: int, tokens: np.ndarray, num_output_blocks: int) -> int | None:
        request = Request(
            req_id="r",
            prompt_token_ids=tokens,
            sampling=SamplingParams(),
            seed=0,
            max_total_tokens=1 << 15,
            arrival=0,
        )
        sequence = request.sequences[0]
        self._version += 1
        manager, pool = self.manager, self.manager.pool
        hits, is_next_computed = manager.find_hits(sequence, self._version)
        assert not is_next_computed
        needed = tokens.size // BLOCK_SIZE + num_output_blocks
        if not manager.can_admit([hits], needed, leave_room=False):
            return None
        manager.touch(hits)
        manager.allocate_row(row, sequence, hits, self._version)
        extra = pool.allocate(num_output_blocks, self._version)
        count = manager.num_blocks[row]
        manager.block_table[row, count : count + num_output_blocks] = extra
        manager.num_blocks[row] += num_output_blocks
        manager.register_chunk(row, sequence, tokens.size, self._version)
        pool.confirm(self._version)
        return len(hits)

    def release(self, row: int, tokens: np.ndarray) -> None:
        """End a row whose known tokens, prompt and output, are these."""
        request = Request(
            req_id="r",
            prompt_token_ids=tokens,
            sampling=SamplingParams(),
            seed=0,
            max_total_tokens=1 << 15,
            arrival=0,
        )
        # All but the last token, which was never fed, have their KV in a block.
        self.manager.register_chunk(row, request.sequences[0], tokens.size - 1, self._version)
        self.manager.pool.confirm(self._version)
        self.manager.free_row(row)


@dataclass
class Running:
    session: Session
    chain: tuple[Segment, ...]
    num_output_blocks: int
    tokens: np.ndarray
    num_done: int = field(default=0)


class Tokens:
    """Token ids of segments, and of the conversations made of them."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(1)
        self._of: dict[Segment, np.ndarray] = {}

    def of(self, segment: Segment) -> np.ndarray:
        if segment not in self._of:
            # One more: the last token of an answer, which opens the next question.
            size = segment.num_blocks * BLOCK_SIZE
            self._of[segment] = self._rng.integers(0, 1 << 30, size, dtype=np.int32)
        return self._of[segment]

    def of_chain(self, chain: tuple[Segment, ...]) -> np.ndarray:
        return np.concatenate([self.of(segment) for segment in chain])


@pytest.mark.parametrize("seed", range(3))
def test_hits_and_counts_are_those_of_the_real_pool(seed: int) -> None:
    rng = random.Random(seed)
    num_blocks = 1500  # small enough that every kind of segment is evicted, in part too
    simulated, real, tokens = PrefixCache(0, num_blocks), RealCache(num_blocks), Tokens()
    workload = Workload(WorkloadConfig(num_system_prompts=6, num_agent_prefixes=3, seed=seed))
    sessions = [workload.new_session() for _ in range(12)]
    running: dict[int, Running] = {}
    num_hits = num_refused = num_partial = 0
    for _ in range(700):
        free_rows = [row for row in range(ROWS) if row not in running]
        if running and (not free_rows or rng.random() < 0.5):
            row = rng.choice(sorted(running))
            run = running.pop(row)
            simulated.release(run.chain, run.num_output_blocks, run.num_output_blocks)
            real.release(row, np.append(tokens.of_chain(run.chain), 7))
            if run.session.turns_left:
                sessions.append(run.session)
        else:
            session = sessions.pop(rng.randrange(len(sessions)))
            turn = workload.next_turn(session)
            prompt = tokens.of_chain(turn.chain)[: turn.num_tokens]
            expected = real.admit(free_rows[0], prompt, turn.num_output_blocks)
            hits = simulated.admit(turn.chain, turn.num_prompt_blocks, turn.num_output_blocks)
            assert hits == expected
            if hits is None:
                num_refused += 1
            else:
                num_hits += hits
                ends = np.cumsum([segment.num_blocks for segment in turn.chain])
                num_partial += hits > 0 and hits not in ends
                running[free_rows[0]] = Running(session, turn.chain, turn.num_output_blocks, prompt)
            if len(sessions) < 12:
                sessions.append(workload.new_session())
        pool = real.manager.pool
        assert simulated.num_free + simulated.num_evictable == pool.num_free_blocks
        assert simulated.num_cached == pool.num_cached_blocks
    real.manager.audit()
    # The comparison is worth something only if all of this happened.
    assert num_hits > 5_000
    assert num_refused > 0
    assert num_partial > 0
    assert simulated.num_evicted > 5_000


def test_the_whole_prompt_is_never_a_hit() -> None:
    cache, prompt = PrefixCache(0, 100), Segment(10)
    assert cache.admit((prompt,), 10, 0) == 0
    cache.release((prompt,), 0, 0)
    assert cache.count_hits((prompt,), 10) == 9


def test_what_is_held_is_not_evicted_and_no_room_changes_nothing() -> None:
    cache, held, other = PrefixCache(3, 21), Segment(15), Segment(6)
    assert cache.admit((held,), 15, 0) == 0
    assert cache.admit((other,), 6, 0) is None
    assert (cache.num_free, cache.num_evictable, other.holders) == (5, 0, {})
    cache.release((held,), 0, 0)
    assert cache.admit((other,), 6, 0) == 0
    # The tail went, the start is still there.
    assert cache.count_hits((held,), 16) == 14
    assert list(held.holders) == [3]


def test_cleared_it_remembers_nothing() -> None:
    cache, prompt = PrefixCache(0, 50), Segment(10)
    cache.admit((prompt,), 10, 2)
    cache.release((prompt,), 2, 0)
    cache.clear()
    assert (cache.num_free, cache.num_cached, prompt.holders) == (49, 0, {})
