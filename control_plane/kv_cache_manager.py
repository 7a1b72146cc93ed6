"""Block tables of a replica's rows: what they hold, what they may share, when content gets a name.

Owns: the block ids of every row, and the rules by which blocks enter the prefix index.
Does not know: which sequence should run, plans, results, workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from control_plane.block_pool import BlockPool
from control_plane.errors import InvariantError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from control_plane.block_hash import BlockHasher
    from control_plane.request import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheConfig:
    """Size of the KV cache of one replica and how it is used.

    Attributes:
        block_size: Tokens per block; a power of two.
        num_blocks: Blocks in the pool, including the null block 0.
        watermark: Fraction of the usable blocks, in [0, 1), that admission leaves free so that
            running sequences can still grow.
        enable_prefix_caching: Whether blocks are found again by their content.
    """

    block_size: int
    num_blocks: int
    watermark: float = 0.01
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        if self.block_size <= 0 or self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size must be a power of two, got {self.block_size}")
        if self.num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2, got {self.num_blocks}")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark must be in [0, 1), got {self.watermark}")


class KVCacheManager:
    """Allocates the blocks of rows. Rows are those of the worker's persistent batch.

    Attributes:
        pool: The blocks, shared by all rows.
        block_table: int32 [max_num_seqs, max_blocks_per_seq]; row i has num_blocks[i] entries.
        num_blocks: int32 [max_num_seqs].
        num_registered: int32 [max_num_seqs], leading blocks of a row whose content has a name.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        hasher: BlockHasher,
        *,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        if hasher.block_size != config.block_size:
            raise ValueError(
                f"hasher is for blocks of {hasher.block_size} tokens, pool of {config.block_size}"
            )
        self.config = config
        self.block_size = config.block_size
        self.pool = BlockPool(config.num_blocks)
        self.watermark_blocks = int(config.watermark * self.pool.num_usable_blocks)
        self.block_table: NDArray[np.int32] = np.zeros(
            (max_num_seqs, self.blocks_for(max_model_len)), dtype=np.int32
        )
        self.num_blocks: NDArray[np.int32] = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_registered: NDArray[np.int32] = np.zeros(max_num_seqs, dtype=np.int32)
        self._num_hits = [0] * max_num_seqs
        self._hasher = hasher

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def fits(self, num_total_tokens: int, num_sequences: int = 1) -> bool:
        """Whether the pool can ever hold so many sequences of this length, prompt and output."""
        # The last token is sampled, never fed: it needs no slot.
        num_slots = num_total_tokens - 1 if num_total_tokens > 1 else 1
        num_blocks = -(-num_slots // self.block_size)
        return num_blocks * num_sequences <= self.pool.num_usable_blocks

    def find_hits(self, sequence: Sequence, version: int) -> tuple[list[int], bool]:
        """Cached blocks that plan `version` may share for the sequence's known tokens.

        The last known token is always computed: its logits are needed.

        Returns:
            Block ids of the hits, and whether the next block is being computed by that same plan.
        """
        if not self.config.enable_prefix_caching:
            return [], False
        num_tokens = sequence.num_tokens
        hashes = self._hasher.extend(sequence, num_tokens)
        limit = (num_tokens - 1) // self.block_size
        return self.pool.find_prefix(hashes if len(hashes) == limit else hashes[:limit], version)

    def count_hits(self, sequence: Sequence) -> int:
        """About how many blocks `find_hits` would find; what a plan in flight computes counts."""
        if not self.config.enable_prefix_caching:
            return 0
        num_tokens = sequence.num_tokens
        hashes = self._hasher.extend(sequence, num_tokens)
        return min(self.pool.count_prefix(hashes), (num_tokens - 1) // self.block_size)

    def can_admit(self, hits: list[list[int]], num_blocks: int, *, leave_room: bool) -> bool:
        """Whether sequences with these hits and `num_blocks` blocks in all can start together.

        Args:
            hits: Hit block ids, per sequence.
            num_blocks: Length of all their tables together.
            leave_room: Whether the watermark applies: others run and must be able to grow.
        """
        distinct = hits[0] if len(hits) == 1 else {block for found in hits for block in found}
        num_new = num_blocks - sum(len(found) for found in hits)
        # A hit that nobody holds counts as free until it is touched.
        needed = num_new + self.pool.count_free(distinct)
        spare = self.watermark_blocks if leave_room else 0
        return needed + spare <= self.pool.num_free_blocks

    def touch(self, hits: Iterable[int]) -> None:
        """Hold hit blocks. All hits of a group first: allocation could evict them."""
        self.pool.touch(hits)

    def allocate_row(
        self, row: int, sequence: Sequence, hits: list[int], version: int
    ) -> NDArray[np.int32]:
        """Give a row its table: the touched hits, then new blocks for all its known tokens.

        Returns:
            The table, int32.
        """
        if self.num_blocks[row]:
            raise InvariantError(f"row {row} holds {self.num_blocks[row]} blocks already")
        num_new = self.blocks_for(sequence.num_tokens) - len(hits)
        table = np.array(hits + self.pool.allocate(num_new, version), dtype=np.int32)
        self.block_table[row, : table.size] = table
        self.num_blocks[row] = table.size
        self.num_registered[row] = self._num_hits[row] = len(hits)
        return table

    def rows_to_grow(
        self, rows: NDArray[np.int32], num_computed: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        """Those rows whose next token needs a block that they do not have.

        Args:
            rows: int32, ascending.
            num_computed: int32 [max_num_seqs], position of every row's next token.
        """
        return rows[num_computed[rows] >= self.num_blocks[rows] * self.block_size]

    def grow(self, rows: NDArray[np.int32], version: int) -> NDArray[np.int32]:
        """Append one new block to each row's table.

        Returns:
            Their ids, int32, parallel to rows.
        """
        block_ids = np.array(self.pool.allocate(rows.size, version), dtype=np.int32)
        self.block_table[rows, self.num_blocks[rows]] = block_ids
        self.num_blocks[rows] += 1
        return block_ids

    def register_chunk(self, row: int, sequence: Sequence, num_tokens: int, version: int) -> None:
        """Name the full blocks of the row's first `num_tokens` tokens, all of them known.

        Args:
            row: Whose table it is.
            sequence: Whose tokens they are.
            num_tokens: Tokens that are computed once plan `version` ran.
            version: The plan that computes them.
        """
        if not self.config.enable_prefix_caching:
            return
        first, last = int(self.num_registered[row]), num_tokens // self.block_size
        if first >= last:
            return
        hashes = self._hasher.extend(sequence, num_tokens)
        self.pool.register(self.block_table[row, first:last].tolist(), hashes[first:last], version)
        self.num_registered[row] = last

    def rows_to_register(
        self, rows: NDArray[np.int32], num_confirmed: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        """Those rows that have a full block of confirmed tokens without a name.

        Args:
            rows: int32, ascending.
            num_confirmed: int32 [max_num_seqs], confirmed tokens of every row.
        """
        if not self.config.enable_prefix_caching:
            return rows[:0]
        return rows[num_confirmed[rows] // self.block_size > self.num_registered[rows]]

    def register_decoded(self, rows: NDArray[np.int32], sequences: list[Sequence]) -> None:
        """Name the next block of rows whose decoding has filled it, as results have confirmed.

        Args:
            rows: int32, from `rows_to_register` after every result, so that it is one block each.
            sequences: Parallel to rows.
        """
        indices = self.num_registered[rows]
        self.num_registered[rows] += 1
        block_size, extend = self.block_size, self._hasher.extend
        hashes = [
            extend(sequence, (index + 1) * block_size)[index]
            for sequence, index in zip(sequences, indices.tolist(), strict=True)
        ]
        self.pool.register(self.block_table[rows, indices].tolist(), hashes, None)

    def forget(self, row: int) -> None:
        """Take the names of all blocks that the row has computed: its values are not to be trusted.

        Blocks that it only shares keep theirs.
        """
        first, last = self._num_hits[row], int(self.num_registered[row])
        for block_id in self.block_table[row, first:last].tolist():
            self.pool.forget(block_id)
        self.num_registered[row] = first

    def free_row(self, row: int) -> None:
        """Let go of a row's blocks, its tail first: a shared prefix stays cached longest."""
        block_ids: list[int] = self.block_table[row, : self.num_blocks[row]].tolist()
        block_ids.reverse()
        self.pool.release(block_ids)
        self.num_blocks[row] = self.num_registered[row] = self._num_hits[row] = 0

    def audit(self) -> None:
        """Check the pool, and that ref counts are exactly what the tables hold.

        Raises:
            InvariantError: they are not.
        """
        self.pool.audit()
        held = np.zeros(self.pool.num_blocks, dtype=np.int64)
        for row in np.flatnonzero(self.num_blocks):
            np.add.at(held, self.block_table[row, : self.num_blocks[row]], 1)
        wrong = [
            (block_id, count, self.pool.ref_cnt(block_id))
            for block_id, count in enumerate(held.tolist())
            if count != self.pool.ref_cnt(block_id)
        ]
        if wrong:
            raise InvariantError(f"(block, times in tables, ref_cnt) differ: {wrong[:16]}")
