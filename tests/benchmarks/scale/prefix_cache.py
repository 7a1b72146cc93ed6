"""One replica's KV blocks, by pieces of prompts instead of by blocks: fast enough for a thousand.

Prompts of the simulated workload are chains of *segments* (a system prompt, a turn of a
conversation), each a whole number of blocks. Then the state of a `BlockPool` is, per segment, how
many of its leading blocks are cached: a sequence frees its tail first, so what is evicted of a
segment is its end, and what follows it is gone before.

A test drives the real `BlockPool` with the same requests and compares every hit and every count.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class Segment:
    """A piece of a prompt that is always used from its start.

    Attributes:
        num_blocks: Full length; for a turn of a conversation, question and answer.
        holders: Replicas that have some of it; kept for first segments, to find them fast.
    """

    __slots__ = ("holders", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.holders: dict[int, None] = {}


class _Entry:
    __slots__ = ("num_cached", "ref_cnt")

    def __init__(self) -> None:
        self.num_cached = 0
        self.ref_cnt = 0


class PrefixCache:
    """Blocks of one replica: held, free and cached, free.

    Attributes:
        num_free: Free blocks that cache nothing.
        num_evictable: Free blocks that cache something, least recently used first.
        num_registered: Blocks that got a name so far: each is one change for the prefix store.
        num_evicted: Cached blocks that were handed out again so far.
    """

    def __init__(self, replica: int, num_blocks: int) -> None:
        self._replica = replica
        self.num_free = num_blocks - 1  # the null block
        self.num_evictable = 0
        self.num_registered = 0
        self.num_evicted = 0
        self._entries: dict[Segment, _Entry] = {}
        self._lru: OrderedDict[Segment, None] = OrderedDict()

    @property
    def num_cached(self) -> int:
        """Blocks with a name, held or free."""
        return sum(entry.num_cached for entry in self._entries.values())

    def count_hits(self, chain: Sequence[Segment], num_prompt_blocks: int) -> int:
        """Leading blocks of a prompt that are cached; its last token is always computed."""
        entries, num_hits = self._entries, 0
        for segment in chain:
            entry = entries.get(segment)
            if entry is None:
                break
            num_hits += entry.num_cached
            if entry.num_cached < segment.num_blocks:
                break
        return min(num_hits, num_prompt_blocks - 1)

    def admit(
        self, chain: Sequence[Segment], num_prompt_blocks: int, num_output_blocks: int
    ) -> int | None:
        """Take the blocks of a request, those of its whole output at once.

        Returns:
            How many of them were hits, or None, and nothing changed, if there is no room.
        """
        num_hits = self.count_hits(chain, num_prompt_blocks)
        num_new = num_prompt_blocks + num_output_blocks - num_hits
        entries, hit_and_free = self._entries, 0
        for segment in chain:
            entry = entries.get(segment)
            if entry is not None and entry.ref_cnt == 0:
                hit_and_free += entry.num_cached
        if num_new > self.num_free + self.num_evictable - hit_and_free:
            return None
        num_left = num_prompt_blocks
        for segment in chain:
            entry = entries.get(segment)
            if entry is None:
                entry = entries[segment] = _Entry()
                if segment is chain[0]:
                    segment.holders[self._replica] = None
            elif entry.ref_cnt == 0:
                del self._lru[segment]
                self.num_evictable -= entry.num_cached
            entry.ref_cnt += 1
            num_wanted = min(segment.num_blocks, num_left)
            num_left -= num_wanted
            if entry.num_cached < num_wanted:
                self.num_registered += num_wanted - entry.num_cached
                entry.num_cached = num_wanted
        self._evict(num_new - self.num_free)
        self.num_free -= num_new
        return num_hits

    def release(
        self, chain: Sequence[Segment], num_output_blocks: int, num_computed_blocks: int
    ) -> None:
        """Let go of a request's blocks, its tail first; what it computed stays cached.

        Args:
            chain: As at `admit`; the last segment is the one that the output belongs to.
            num_output_blocks: As at `admit`.
            num_computed_blocks: How many of these it filled.
        """
        entries = self._entries
        self.num_registered += num_computed_blocks
        self.num_free += num_output_blocks - num_computed_blocks
        entries[chain[-1]].num_cached += num_computed_blocks
        for segment in reversed(chain):
            entry = entries[segment]
            entry.ref_cnt -= 1
            if entry.ref_cnt == 0:
                self._lru[segment] = None
                self.num_evictable += entry.num_cached

    def clear(self) -> None:
        """Forget what is cached and free, as after a restart without a prefix store."""
        self._evict(self.num_evictable)

    def _evict(self, num_blocks: int) -> None:
        while num_blocks > 0:
            segment = next(iter(self._lru))
            entry = self._entries[segment]
            num_taken = min(entry.num_cached, num_blocks)
            entry.num_cached -= num_taken
            if not entry.num_cached:
                del self._lru[segment], self._entries[segment]
                segment.holders.pop(self._replica, None)
            num_blocks -= num_taken
            self.num_evictable -= num_taken
            self.num_free += num_taken
            self.num_evicted += num_taken
