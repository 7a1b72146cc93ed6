"""Tables of rows: nothing is shared that differs, nothing named is handed to a writer."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from control_plane.block_hash import BlockHasher
from control_plane.kv_cache_manager import KVCacheConfig, KVCacheManager
from control_plane.request import Request, SamplingParams, Sequence

NUM_ROWS = 4
MAX_TOKENS = 24


class KVCacheManagerMachine(RuleBasedStateMachine):
    """Rows come, compute, grow and go; the content of every named block stays what it was."""

    @initialize(
        block_size=st.sampled_from([1, 2, 4]), num_blocks=st.integers(8, 40), caching=st.booleans()
    )
    def start(self, block_size: int, num_blocks: int, caching: bool) -> None:
        self.block_size = block_size
        self.manager = KVCacheManager(
            KVCacheConfig(
                block_size=block_size,
                num_blocks=num_blocks,
                watermark=0.1,
                enable_prefix_caching=caching,
            ),
            BlockHasher(deployment_seed=b"d", model_fingerprint=b"m", block_size=block_size),
            max_num_seqs=NUM_ROWS,
            max_model_len=MAX_TOKENS,
        )
        self.version = 1
        self.rows: dict[int, Sequence] = {}
        self.num_computed = np.zeros(NUM_ROWS, dtype=np.int32)
        self.contents: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end

    @precondition(lambda self: len(self.rows) < NUM_ROWS)
    @rule(tokens=st.lists(st.integers(1, 2), min_size=1, max_size=MAX_TOKENS - 4), data=st.data())
    def admit(self, tokens: list[int], data: st.DataObject) -> None:
        manager, pool = self.manager, self.manager.pool
        sequence = Request(
            req_id="r",
            prompt_token_ids=tokens,
            sampling=SamplingParams(),
            seed=0,
            max_total_tokens=MAX_TOKENS,
            arrival=0,
        ).sequences[0]
        hits, is_next_being_computed = manager.find_hits(sequence, self.version)
        if not manager.config.enable_prefix_caching:
            assert (hits, is_next_being_computed) == ([], False)
        assert len(hits) * self.block_size < len(tokens)
        for index, block in enumerate(hits):
            assert self.contents[block] == tuple(tokens[: (index + 1) * self.block_size])
        num_blocks = manager.blocks_for(len(tokens))
        fits = manager.can_admit([hits], num_blocks, leave_room=bool(self.rows))
        unheld = sum(pool.ref_cnt(block) == 0 for block in hits)
        spare = int(0.1 * pool.num_usable_blocks) if self.rows else 0
        assert fits == (num_blocks - len(hits) + unheld + spare <= pool.num_free_blocks)
        if not fits:
            return
        row = min(set(range(NUM_ROWS)) - set(self.rows))
        manager.touch(hits)
        table = manager.allocate_row(row, sequence, hits, self.version)
        assert table.tolist()[: len(hits)] == hits
        assert table.size == num_blocks
        self.rows[row] = sequence
        self.num_computed[row] = len(hits) * self.block_size
        self.compute(row, data.draw(st.integers(1, len(tokens) - int(self.num_computed[row]))))

    def compute(self, row: int, count: int) -> None:
        """A chunk of known tokens, in plan `version`."""
        sequence = self.rows[row]
        start = int(self.num_computed[row])
        table = self.manager.block_table[row]
        tokens = tuple(sequence.token_ids().tolist())
        for position in range(start, start + count):
            block = int(table[position // self.block_size])
            assert self.manager.pool.block_hash(block) is None, "a named block is written"
            assert self.manager.pool.ref_cnt(block) == 1
            self.contents[block] = tokens[: position + 1]
        self.num_computed[row] = start + count
        self.manager.register_chunk(row, sequence, start + count, self.version)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def compute_chunk(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows)))
        rest = self.rows[row].num_tokens - int(self.num_computed[row])
        if rest:
            self.compute(row, data.draw(st.integers(1, rest)))

    @rule()
    def decode(self) -> None:
        """One confirmed token for every row that has room, as one step of all of them."""
        manager = self.manager
        rows = np.array(
            [
                row
                for row, sequence in sorted(self.rows.items())
                if self.num_computed[row] == sequence.num_tokens < MAX_TOKENS
            ],
            dtype=np.int32,
        )
        growing = manager.rows_to_grow(rows, self.num_computed)
        if growing.size > manager.pool.num_free_blocks:
            return
        for row in rows.tolist():
            has = int(manager.num_blocks[row]) * self.block_size
            assert (row in growing.tolist()) == (has == self.num_computed[row])
        block_ids = manager.grow(growing, self.version)
        assert block_ids.tolist() == [
            int(manager.block_table[row, manager.num_blocks[row] - 1]) for row in growing
        ]
        for row in rows.tolist():
            sequence, position = self.rows[row], int(self.num_computed[row])
            sequence.output_token_ids.append(1 + position % 2)
            block = int(manager.block_table[row, position // self.block_size])
            assert manager.pool.block_hash(block) is None, "a named block is written"
            self.contents[block] = tuple(sequence.token_ids().tolist())
        self.num_computed[rows] += 1
        filled = manager.rows_to_register(rows, self.num_computed)
        manager.register_decoded(filled, [self.rows[row] for row in filled.tolist()])

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), is_error=st.booleans())
    def free(self, data: st.DataObject, is_error: bool) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows)))
        table = self.manager.block_table[row, : self.manager.num_blocks[row]].tolist()
        num_hits = self.manager._num_hits[row]
        if is_error:
            self.manager.forget(row)
            assert not [b for b in table[num_hits:] if self.manager.pool.block_hash(b)]
        before = self.manager.pool.free_order()
        self.manager.free_row(row)
        after = self.manager.pool.free_order()
        # Its tail is reused first, among blocks with a name and among those without.
        fresh = [block for block in after if block not in before]
        named = [block for block in fresh if self.manager.pool.block_hash(block)]
        unnamed = [block for block in fresh if block not in named]
        for group in (named, unnamed):
            assert [table.index(block) for block in group] == sorted(
                (table.index(block) for block in group), reverse=True
            )
        del self.rows[row]

    @rule()
    def next_plan(self) -> None:
        self.version += 1

    @rule()
    def confirm(self) -> None:
        self.manager.pool.confirm(self.version)
        self.version += 1

    @invariant()
    def names_are_true(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.audit()
        by_name: dict[bytes, tuple[int, ...]] = {}
        for block in range(self.manager.pool.num_blocks):
            name = self.manager.pool.block_hash(block)
            if name is not None:
                assert by_name.setdefault(name, self.contents[block]) == self.contents[block]

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            for row in sorted(self.rows):
                self.manager.free_row(row)
            self.manager.audit()
            assert self.manager.pool.num_free_blocks == self.manager.pool.num_usable_blocks


TestKVCacheManager = KVCacheManagerMachine.TestCase
TestKVCacheManager.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
