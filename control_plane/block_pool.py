"""Reference counts, free queue and prefix index of one replica's KV blocks.

Owns: which blocks are free and in which order they are handed out, how many share them, which block
holds which hash, and since which plan.
Does not know: sequences, tokens, how hashes are made, workers, time.

The free queue is two doubly linked lists in one pair of index arrays: blocks without a hash in the
order of their release, then blocks with one, least recently used first. Plain lists of next and
previous ids measured 2.5 times faster than an OrderedDict for taking and returning 32 blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, cast

import numpy as np

from control_plane.errors import InvariantError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from control_plane.request import BlockHash, BlockId, Version

_PERMANENT = 0
_UNCACHED = 0  # head of the list of free blocks without a hash: the null block is never in a list


class BlockPool:
    """The blocks [1, num_blocks) of a replica. Block 0 is the null block: never handed out.

    A hash enters the index as *pending* under the version of the plan that computes its block.
    Only later plans may hit it. `confirm` makes it permanent; `drop_pending` forgets it.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (one is the null block): {num_blocks}")
        self.num_blocks = num_blocks
        self._ref_cnt = [0] * num_blocks
        self._generation: list[int] = [0] * num_blocks
        self._hash: list[BlockHash | None] = [None] * num_blocks
        # Version that computes the block's content while that is unconfirmed, else _PERMANENT.
        self._pending: list[int] = [_PERMANENT] * num_blocks
        self._pending_of: dict[int, list[int]] = {}
        # Blocks with equal content are not merged (tables only grow), so a hash can have several.
        self._index: dict[BlockHash, int | list[int]] = {}
        self._changes: dict[int, tuple[BlockHash, int] | None] = {}
        self._cached = num_blocks  # head of the list of free blocks with a hash
        self._next = [*range(1, num_blocks), _UNCACHED, self._cached]
        self._prev = [num_blocks - 1, *range(num_blocks - 1), self._cached]
        self._num_free_uncached = num_blocks - 1
        self._num_free_cached = 0
        self._num_cached = 0

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks nobody holds, those with a hash included."""
        return self._num_free_uncached + self._num_free_cached

    @property
    def num_cached_blocks(self) -> int:
        """Blocks with a hash, pending ones included, held or free."""
        return self._num_cached

    def ref_cnt(self, block_id: int) -> int:
        return self._ref_cnt[block_id]

    def generation(self, block_id: int) -> Version:
        """Version of the plan that last handed the block out; 0: never."""
        return cast("Version", self._generation[block_id])

    def block_hash(self, block_id: int) -> BlockHash | None:
        return self._hash[block_id]

    def is_pending(self, block_id: int) -> bool:
        return self._pending[block_id] != _PERMANENT

    # Holding blocks.

    def allocate(self, num_blocks: int, version: int) -> list[int]:
        """Hand out free blocks with ref_cnt 1: uncached ones first, then the least recently used.

        Raises:
            InvariantError: fewer are free; the caller has to ask first.
        """
        if num_blocks > self.num_free_blocks:
            raise InvariantError(f"asked for {num_blocks} of {self.num_free_blocks} free blocks")
        from_uncached = min(num_blocks, self._num_free_uncached)
        block_ids = self._take(_UNCACHED, from_uncached)
        self._num_free_uncached -= from_uncached
        from_cached = num_blocks - from_uncached
        if from_cached:
            evicted = self._take(self._cached, from_cached)
            self._num_free_cached -= from_cached
            for block_id in evicted:
                self._drop_hash(block_id)
            block_ids += evicted
        ref_cnt, generation = self._ref_cnt, self._generation
        for block_id in block_ids:
            ref_cnt[block_id] = 1
            generation[block_id] = version
        return block_ids

    def touch(self, block_ids: Iterable[int]) -> None:
        """Hold blocks that were found in the index."""
        ref_cnt = self._ref_cnt
        for block_id in block_ids:
            if ref_cnt[block_id] == 0:
                # It must leave the free queue first, or it would be handed out to somebody else.
                self._unlink(block_id)
                self._num_free_cached -= 1
            ref_cnt[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Let go of blocks, in the order in which they may be reused: a sequence's tail first."""
        ref_cnt, hashes, nxt, prev = self._ref_cnt, self._hash, self._next, self._prev
        for block_id in block_ids:
            count = ref_cnt[block_id] - 1
            if count < 0 or block_id == 0:
                raise InvariantError(f"released block {block_id} with ref_cnt {count + 1}")
            ref_cnt[block_id] = count
            if count:
                continue
            if hashes[block_id] is None:
                head = _UNCACHED
                self._num_free_uncached += 1
            else:
                head = self._cached
                self._num_free_cached += 1
            last = prev[head]
            nxt[last] = block_id
            prev[block_id] = last
            nxt[block_id] = head
            prev[head] = block_id

    def count_free(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks nobody holds."""
        ref_cnt = self._ref_cnt
        return sum(1 for block_id in block_ids if ref_cnt[block_id] == 0)

    # The prefix index.

    def find(self, block_hash: BlockHash, version: int) -> int | None:
        """A block that plan `version` may hit, a permanent one if there is."""
        found = self._index.get(block_hash)
        if found is None:
            return None
        pending = self._pending
        if isinstance(found, int):
            return None if pending[found] == version else found
        usable = [block_id for block_id in found if pending[block_id] != version]
        return min(usable, key=lambda block_id: pending[block_id], default=None)

    def find_prefix(self, hashes: Sequence[BlockHash], version: int) -> tuple[list[int], bool]:
        """The longest run of leading hashes that plan `version` may hit.

        Returns:
            Their blocks, and whether the next hash is being computed by that same plan.
        """
        index, pending = self._index, self._pending
        block_ids: list[int] = []
        for block_hash in hashes:
            found = index.get(block_hash)
            if found is None:
                return block_ids, False
            if not isinstance(found, int) or pending[found] == version:
                found = self.find(block_hash, version)
                if found is None:
                    return block_ids, True
            block_ids.append(found)
        return block_ids, False

    def count_prefix(self, hashes: Sequence[BlockHash]) -> int:
        """About how many leading hashes are known, for whoever compares many pools.

        By bisection, since a block's successors are given up before it. Where that did not hold,
        the number is wrong and nothing depends on it.
        """
        index = self._index
        return bisect_left(hashes, True, key=lambda block_hash: block_hash not in index)

    def register(
        self, block_ids: Sequence[int], hashes: Sequence[BlockHash], version: int | None
    ) -> None:
        """Enter the content of held blocks into the index.

        Args:
            block_ids: Held, without a hash.
            hashes: Parallel: names of what they contain, or will once plan `version` ran.
            version: The plan that computes them; None if that is confirmed already.
        """
        held, names, index = self._ref_cnt, self._hash, self._index
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            if names[block_id] is not None or held[block_id] == 0:
                raise InvariantError(
                    f"registered block {block_id} with ref_cnt {held[block_id]} and "
                    f"hash {names[block_id]!r}"
                )
            names[block_id] = block_hash
            found = index.setdefault(block_hash, block_id)
            if found != block_id:
                self._add_duplicate(block_hash, block_id)
        self._num_cached += len(block_ids)
        if version is None:
            generation, changes = self._generation, self._changes
            for block_id, block_hash in zip(block_ids, hashes, strict=True):
                changes[block_id] = (block_hash, generation[block_id])
        else:
            pending = self._pending
            for block_id in block_ids:
                pending[block_id] = version
            self._pending_of.setdefault(version, []).extend(block_ids)

    def confirm(self, version: int) -> None:
        """Make what plan `version` computed permanent."""
        pending, names, generation = self._pending, self._hash, self._generation
        for block_id in self._pending_of.pop(version, ()):
            # It may have been evicted since, and even be pending again under a later plan.
            if pending[block_id] == version:
                pending[block_id] = _PERMANENT
                block_hash = names[block_id]
                if block_hash is None:
                    raise InvariantError(f"block {block_id} is pending without a hash")
                self._changes[block_id] = (block_hash, generation[block_id])

    def drop_pending(self) -> None:
        """Forget everything that is not confirmed: those plans count as never run."""
        for version, block_ids in self._pending_of.items():
            for block_id in block_ids:
                if self._pending[block_id] == version:
                    self.forget(block_id)
        self._pending_of.clear()

    def forget(self, block_id: int) -> None:
        """Remove the block's hash, held or free; a no-op if it has none."""
        if self._hash[block_id] is None:
            return
        self._drop_hash(block_id)
        if self._ref_cnt[block_id] == 0:
            self._unlink(block_id)
            self._num_free_cached -= 1
            self._link_last(_UNCACHED, block_id)
            self._num_free_uncached += 1

    def adopt(self, block_id: int, block_hash: BlockHash, generation: int) -> bool:
        """Take over what an earlier control plane knew of a block.

        Returns:
            False, and nothing changed, if the block is held, has a hash, or was handed out by this
            control plane, so that its content may be another one by now.
        """
        if not 0 < block_id < self.num_blocks or generation <= 0:
            return False
        if self._ref_cnt[block_id] or self._hash[block_id] is not None:
            return False
        if self._generation[block_id] not in (0, generation):
            return False
        self._generation[block_id] = generation
        self._unlink(block_id)
        self._num_free_uncached -= 1
        self._hash[block_id] = block_hash
        self._num_cached += 1
        if self._index.setdefault(block_hash, block_id) != block_id:
            self._add_duplicate(block_hash, block_id)
        self._link_last(self._cached, block_id)
        self._num_free_cached += 1
        return True

    def reorder_free(self, block_ids: Iterable[int]) -> None:
        """Hand out the free blocks without a hash in this order, behind all others of them.

        Args:
            block_ids: Each once; what is held or has a hash is skipped.
        """
        for block_id in block_ids:
            if self._ref_cnt[block_id] == 0 and self._hash[block_id] is None:
                self._unlink(block_id)
                self._link_last(_UNCACHED, block_id)

    def take_changes(self) -> dict[BlockId, tuple[BlockHash, Version] | None]:
        """Permanent entries that came (hash, generation) or went (None) since the last call.

        What went may have come since that call too: the taker need not know it.
        """
        changes, self._changes = self._changes, {}
        return cast("dict[BlockId, tuple[BlockHash, Version] | None]", changes)

    def permanent_entries(self) -> dict[BlockId, tuple[BlockHash, Version]]:
        """Everything that a store should hold now."""
        entries = {
            block_id: (block_hash, self._generation[block_id])
            for block_id, block_hash in enumerate(self._hash)
            if block_hash is not None and self._pending[block_id] == _PERMANENT
        }
        return cast("dict[BlockId, tuple[BlockHash, Version]]", entries)

    def find_contradicted(self, generations: NDArray[np.int64]) -> list[int]:
        """Blocks with a permanent entry that was made under another generation than this.

        Args:
            generations: [num_blocks] int64.
        """
        own = np.array(self._generation, dtype=np.int64)
        is_named = np.fromiter((name is not None for name in self._hash), np.bool_, self.num_blocks)
        is_permanent = is_named & (np.array(self._pending, dtype=np.int64) == _PERMANENT)
        found: list[int] = np.flatnonzero(is_permanent & (own != generations)).tolist()
        return found

    def pending_versions(self) -> set[int]:
        """Plans whose confirmation is awaited by some block's content."""
        return {version for version in self._pending if version != _PERMANENT}

    def free_order(self) -> list[int]:
        """Free blocks in the order in which they will be handed out."""
        return [*self._walk(_UNCACHED), *self._walk(self._cached)]

    def audit(self) -> None:
        """Check every invariant that needs no knowledge of the holders; O(num_blocks).

        Raises:
            InvariantError: one does not hold.
        """
        uncached, cached = self._walk(_UNCACHED), self._walk(self._cached)
        problems: list[str] = []
        if (len(uncached), len(cached)) != (self._num_free_uncached, self._num_free_cached):
            problems.append(
                f"lists have {len(uncached)}+{len(cached)} blocks, counters say "
                f"{self._num_free_uncached}+{self._num_free_cached}"
            )
        free = {*uncached, *cached}
        expected = {i for i in range(1, self.num_blocks) if self._ref_cnt[i] == 0}
        if free != expected or len(free) != len(uncached) + len(cached) or self._ref_cnt[0]:
            problems.append(f"free queue differs from ref_cnt 0 in {sorted(free ^ expected)}")
        if any(self._hash[i] is not None for i in uncached):
            problems.append("a block with a hash is in the list of those without")
        if any(self._hash[i] is None for i in cached):
            problems.append("a block without a hash is in the list of those with one")
        named = {i: name for i, name in enumerate(self._hash) if name is not None}
        indexed: dict[int, BlockHash] = {}
        for name, found in self._index.items():
            indexed.update((i, name) for i in ([found] if isinstance(found, int) else found))
        if named != indexed or len(named) != self._num_cached:
            problems.append(f"index has {len(indexed)} blocks, {len(named)} have a hash")
        for block_id, version in enumerate(self._pending):
            if version != _PERMANENT and block_id not in self._pending_of.get(version, ()):
                problems.append(f"block {block_id} waits for plan {version}, which forgot it")
        if problems:
            raise InvariantError("block pool is inconsistent: " + "; ".join(problems))

    def audit_free(self, block_ids: range) -> None:
        """Check blocks of a pool that nobody holds any block of, each by what is next to it.

        Pieces of one audit may come at different times: what is checked holds at any time.

        Raises:
            InvariantError: an invariant does not hold.
        """
        for block_id in block_ids:
            name = self._hash[block_id]
            entry = block_id if name is None else self._index.get(name)
            is_indexed = entry == block_id or (isinstance(entry, list) and block_id in entry)
            is_linked = self._is_linked(block_id)
            if self._ref_cnt[block_id] or self._pending[block_id] or not (is_indexed and is_linked):
                raise InvariantError(
                    f"free block {block_id} is inconsistent: ref_cnt {self._ref_cnt[block_id]}, "
                    f"pending {self._pending[block_id]}, indexed {is_indexed}, linked {is_linked}"
                )

    def _is_linked(self, block_id: int) -> bool:
        """Whether both neighbours in the free queue know a block, and are of its kind."""
        has_name = self._hash[block_id] is not None
        head = self._cached if has_name else _UNCACHED
        for there, back in ((self._next, self._prev), (self._prev, self._next)):
            neighbour = there[block_id]
            if neighbour != head and (
                neighbour in (_UNCACHED, self._cached)
                or (self._hash[neighbour] is not None) != has_name
            ):
                return False
            if back[neighbour] != block_id:
                return False
        return True

    # The free queue's lists.

    def _take(self, head: int, count: int) -> list[int]:
        nxt = self._next
        block_ids: list[int] = []
        block_id = nxt[head]
        for _ in range(count):
            block_ids.append(block_id)
            block_id = nxt[block_id]
        nxt[head] = block_id
        self._prev[block_id] = head
        return block_ids

    def _unlink(self, block_id: int) -> None:
        before, after = self._prev[block_id], self._next[block_id]
        self._next[before] = after
        self._prev[after] = before

    def _link_last(self, head: int, block_id: int) -> None:
        last = self._prev[head]
        self._next[last] = block_id
        self._prev[block_id] = last
        self._next[block_id] = head
        self._prev[head] = block_id

    def _walk(self, head: int) -> list[int]:
        block_ids: list[int] = []
        block_id = self._next[head]
        while block_id != head and len(block_ids) < self.num_blocks:
            block_ids.append(block_id)
            block_id = self._next[block_id]
        return block_ids

    # The index's entries.

    def _add_duplicate(self, block_hash: BlockHash, block_id: int) -> None:
        found = self._index[block_hash]
        if isinstance(found, int):
            self._index[block_hash] = [found, block_id]
        else:
            found.append(block_id)

    def _drop_hash(self, block_id: int) -> None:
        block_hash = self._hash[block_id]
        if block_hash is None:
            raise InvariantError(f"block {block_id} has no hash to drop")
        self._hash[block_id] = None
        self._num_cached -= 1
        found = self._index[block_hash]
        if isinstance(found, int):
            del self._index[block_hash]
        else:
            found.remove(block_id)
            if len(found) == 1:
                self._index[block_hash] = found[0]
        if self._pending[block_id] == _PERMANENT:
            self._changes[block_id] = None
        else:
            self._pending[block_id] = _PERMANENT
