"""Any order of allocations, hits and resets keeps every block in exactly one place."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from control_plane.block_pool import BlockPool
from control_plane.errors import InvariantError
from control_plane.request import BlockHash

NAMES = st.sampled_from([BlockHash(bytes([i]) * 32) for i in range(6)])


class BlockPoolMachine(RuleBasedStateMachine):
    """Checked against a model with two plain lists as the free queue."""

    @initialize(num_blocks=st.integers(2, 12))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.uncached = list(range(1, num_blocks))
        self.cached: list[int] = []
        self.held: dict[int, int] = {}
        self.names: dict[int, bytes] = {}
        self.pending: dict[int, int] = {}
        self.generations: dict[int, int] = {}
        self.version = 1
        self.store: dict[int, tuple[bytes, int]] = {}

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        free = self.uncached + self.cached
        count = data.draw(st.integers(0, len(free)))
        block_ids = self.pool.allocate(count, self.version)
        assert block_ids == free[:count]
        for block_id in block_ids:
            self.names.pop(block_id, None)
            self.pending.pop(block_id, None)
            self.held[block_id] = 1
            self.generations[block_id] = self.version
        self.uncached = [block for block in self.uncached if block not in self.held]
        self.cached = [block for block in self.cached if block not in self.held]

    @rule()
    def allocate_too_many(self) -> None:
        with pytest.raises(InvariantError):
            self.pool.allocate(self.pool.num_free_blocks + 1, self.version)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block_ids = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True))
        self.pool.release(block_ids)
        for block_id in block_ids:
            self.held[block_id] -= 1
            if not self.held[block_id]:
                del self.held[block_id]
                (self.cached if block_id in self.names else self.uncached).append(block_id)

    @rule(block_id=st.integers(0, 11))
    def release_what_nobody_holds(self, block_id: int) -> None:
        if block_id < self.pool.num_blocks and block_id not in self.held:
            with pytest.raises(InvariantError):
                self.pool.release([block_id])

    @rule(name=NAMES, is_confirmed=st.booleans())
    def register(self, name: BlockHash, is_confirmed: bool) -> None:
        for block_id in self.held:
            if block_id not in self.names:
                self.pool.register([block_id], [name], None if is_confirmed else self.version)
                self.names[block_id] = name
                if not is_confirmed:
                    self.pending[block_id] = self.version
                return

    @rule()
    def next_plan(self) -> None:
        self.version += 1

    @rule(back=st.integers(0, 3))
    def confirm(self, back: int) -> None:
        version = self.version - back
        self.pool.confirm(version)
        self.pending = {block: at for block, at in self.pending.items() if at != version}

    @rule()
    def drop_pending(self) -> None:
        # In the order in which they became pending, those of the oldest plan first.
        before = self.cached
        self.pool.drop_pending()
        for block_id in self.pending:
            del self.names[block_id]
        dropped = [block for block in before if block in self.pending]
        self.cached = [block for block in before if block not in self.pending]
        order = self.pool.free_order()[: len(self.uncached) + len(dropped)]
        assert order[: len(self.uncached)] == self.uncached
        assert sorted(order[len(self.uncached) :]) == sorted(dropped)
        self.uncached = order
        self.pending = {}

    @rule(name=NAMES)
    def hit(self, name: BlockHash) -> None:
        usable = {
            block
            for block, known in self.names.items()
            if known == name and self.pending.get(block) != self.version
        }
        found = self.pool.find(name, self.version)
        hits, is_next_being_computed = self.pool.find_prefix([name], self.version)
        if not usable:
            assert found is None
            assert not hits
            assert is_next_being_computed == (name in self.names.values())
            return
        assert found in usable
        assert hits[0] in usable
        if usable - set(self.pending):
            assert found not in self.pending
        self.pool.touch([found])
        self.held[found] = self.held.get(found, 0) + 1
        if found in self.cached:
            self.cached.remove(found)

    @rule(block_id=st.integers(0, 12), name=NAMES, generation=st.integers(0, 3))
    def adopt(self, block_id: int, name: BlockHash, generation: int) -> None:
        may = (
            block_id in self.uncached
            and generation > 0
            and self.generations.get(block_id, generation) == generation
        )
        assert self.pool.adopt(block_id, name, generation) == may
        if may:
            self.uncached.remove(block_id)
            self.cached.append(block_id)
            self.names[block_id] = name
            self.generations[block_id] = generation
            self.store[block_id] = (name, generation)  # where it came from

    @invariant()
    def every_block_is_free_or_held(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.audit()
        assert self.pool.free_order() == self.uncached + self.cached
        for block_id in range(self.pool.num_blocks):
            assert self.pool.ref_cnt(block_id) == self.held.get(block_id, 0)
            assert self.pool.block_hash(block_id) == self.names.get(block_id)
            assert self.pool.is_pending(block_id) == (block_id in self.pending)
            assert self.pool.generation(block_id) == self.generations.get(block_id, 0)
        assert self.pool.num_cached_blocks == len(self.names)
        assert self.pool.pending_versions() == set(self.pending.values())

    @rule()
    def save_changes(self) -> None:
        for block_id, entry in self.pool.take_changes().items():
            if entry is None:
                self.store.pop(block_id, None)
            else:
                self.store[block_id] = entry
        assert self.pool.take_changes() == {}
        assert self.store == self.pool.permanent_entries()
        assert self.store == {
            block: (name, self.generations[block])
            for block, name in self.names.items()
            if block not in self.pending
        }


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
