"""The prefix index against what a worker's blocks really hold, at the beginning of a stream.

Other plans than ours may have reached the worker: those of an earlier control plane, whose entries
the store remembers, or of another one that had it for a while. Its generations say which. An entry
counts only if the generation of its block is the entry's on every rank: then no later plan handed
the block out, so nothing was written there since, in any rank's part of it.

Owns: the reading of Generations, which entries are taken over or forgotten, and how long plans wait
for that. Does not know: the store, streams, clocks (time is an argument).
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from control_plane.plan import malformed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from control_plane.block_pool import BlockPool
    from control_plane.request import BlockHash, BlockId, Version
    from protos.pagewire.v1 import worker_pb2

    Entries = Mapping[BlockId, tuple[BlockHash, Version]]

_GENERATION = np.dtype("<i8")
# Blocks or entries that are looked at without a pause: a few milliseconds.
PIECE = 1024
# Of a block on which the ranks disagree: the generation of no entry.
_DISAGREED = -1


class _RankGenerations:
    """What one rank says about its blocks, chunk by chunk."""

    def __init__(self, num_blocks: int, applied_version: int) -> None:
        self.values: NDArray[np.int64] = np.zeros(num_blocks, dtype=np.int64)
        self._num_read = 0
        self._applied_version = applied_version

    @property
    def is_complete(self) -> bool:
        return self._num_read == self.values.size

    def take(self, message: worker_pb2.Generations) -> None:
        """Read one chunk.

        Raises:
            ProtocolError: MALFORMED_MESSAGE.
        """
        num_blocks = self.values.size
        if message.first_block_id != self._num_read:
            raise malformed(
                "generations.first_block_id",
                f"is {message.first_block_id}, expected {self._num_read}: chunks ascend without "
                "gap or overlap",
            )
        if len(message.generations) % _GENERATION.itemsize or not message.generations:
            raise malformed(
                "generations.generations",
                f"{len(message.generations)} bytes is not a positive multiple of "
                f"{_GENERATION.itemsize}",
            )
        chunk = np.frombuffer(message.generations, dtype=_GENERATION)
        end = self._num_read + chunk.size
        if end > num_blocks or message.is_last != (end == num_blocks):
            raise malformed(
                "generations.is_last",
                f"is {message.is_last} at block {end} of {num_blocks}",
            )
        low, high = int(chunk.min()), int(chunk.max())
        if low < 0 or high > self._applied_version:
            raise malformed(
                "generations.generations",
                f"values {low}..{high}, limit [0, applied_version {self._applied_version}]",
            )
        if self._num_read == 0 and chunk[0]:
            raise malformed(
                "generations.generations", f"the null block has generation {int(chunk[0])}"
            )
        self.values[self._num_read : end] = chunk
        self._num_read = end


class IndexRecovery:
    """One stream's check of the index. Made before the stream's first plan.

    Plans are held back until all is checked, but no longer than `hold_until`. Entries that come
    later are still taken over where the stream's plans have not handed their block out: the worker
    sent its generations as they were before any of those plans.

    A store can know millions of blocks. So entries are taken over piece by piece, by whoever calls
    `work`, and everybody else has a turn in between.

    Attributes:
        num_adopted: Entries of the store that were taken over.
        num_refused: Entries that were contradicted, or could not be checked in time.
        is_complete: All Generations of all ranks have arrived.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        applied_version: int,
        hold_until: float,
        stored: Entries | None,
        num_ranks: int = 1,
    ) -> None:
        """Begin to wait for Generations.

        Args:
            pool: Empty, or with the permanent entries of an earlier stream.
            applied_version: The highest of any rank's Hello: no generation is above it.
            hold_until: When plans may start whatever is missing.
            stored: What the store has to offer; None: not known yet.
            num_ranks: How many send their Generations.
        """
        self.num_adopted = 0
        self.num_refused = 0
        self.is_complete = False
        self._pool = pool
        self._ranks = [_RankGenerations(pool.num_blocks, applied_version) for _ in range(num_ranks)]
        self._hold_until = hold_until
        self._stored = stored
        self._has_kept = pool.num_cached_blocks > 0
        self._hold_has_ended = False
        # By block; known once it is complete.
        self._generations: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._steps: Iterator[int] | None = None

    @property
    def is_settled(self) -> bool:
        """Whether everything was checked: nothing comes after this."""
        return self.is_complete and self._stored is not None and self._steps is None

    @property
    def hold_until(self) -> float:
        """Until when plans wait; in the past if there is nothing to wait for."""
        is_waiting = (
            self._stored is None
            or self._steps is not None
            or (not self.is_complete and (self._has_kept or bool(self._stored)))
        )
        return self._hold_until if is_waiting else float("-inf")

    @property
    def has_work(self) -> bool:
        """Whether `work` has something to do."""
        return self._steps is not None

    def work(self, num_entries: int) -> None:
        """Look at so many entries, or a few more."""
        while self._steps is not None and num_entries > 0:
            done = next(self._steps, None)
            if done is None:
                self._steps = None
            else:
                num_entries -= done

    def take(self, message: worker_pb2.Generations, rank: int = 0) -> None:
        """Read one chunk; with the last one of all ranks everything known so far is checked.

        Raises:
            ProtocolError: MALFORMED_MESSAGE; the chunk contradicts itself, its predecessors or
                what Hello said.
        """
        self._ranks[rank].take(message)
        if all(one.is_complete for one in self._ranks):
            first, *others = [one.values for one in self._ranks]
            agreed = np.logical_and.reduce([first == other for other in others], initial=True)
            self._generations = np.where(agreed, first, _DISAGREED)
            self.is_complete = True
            self._check_kept()
            self._begin_to_adopt()

    def offer(self, stored: Entries) -> None:
        """The store has answered."""
        self._stored = stored
        if self.is_complete:
            self._begin_to_adopt()

    def end_hold(self) -> None:
        """Plans start now, whatever is missing. Idempotent."""
        if self._hold_has_ended:
            return
        self._hold_has_ended = True
        if not self.is_complete:
            # Nobody knows whether what was kept is still true, and plans would hit it.
            for block_id in self._pool.permanent_entries():
                self._pool.forget(block_id)
                self.num_refused += 1
        elif self._stored is None:
            # What the store may still tell about is handed out last.
            self._pool.reorder_free((1 + np.argsort(self._generations[1:], kind="stable")).tolist())

    def _check_kept(self) -> None:
        if self._hold_has_ended or not self._has_kept:
            # Nothing was kept; what is in the index now was computed by this stream's plans.
            return
        for block_id in self._pool.find_contradicted(self._generations):
            self._pool.forget(block_id)
            self.num_refused += 1

    def _begin_to_adopt(self) -> None:
        if self._stored:
            self._steps = self._adopt(self._stored)

    def _adopt(self, stored: Entries) -> Iterator[int]:
        """Take over what is true. Yields how many entries it has looked at since the last time."""
        pool, generations = self._pool, self._generations
        items = iter(stored.items())
        valid: list[NDArray[np.int64]] = []
        while piece := list(islice(items, PIECE)):
            found = np.array([(block_id, name[1]) for block_id, name in piece], dtype=np.int64)
            found = found[(found[:, 0] > 0) & (found[:, 0] < generations.size)]
            valid.append(found[generations[found[:, 0]] == found[:, 1]])
            yield len(piece)
        block_ids, since = np.concatenate(valid).T
        # The oldest are evicted first; of one plan's, the tail: ids of a prompt mostly ascend.
        order = block_ids[np.lexsort((-block_ids, since))]
        for first in range(0, order.size, PIECE):
            piece_ids: list[BlockId] = order[first : first + PIECE].tolist()
            for block_id in piece_ids:
                self.num_adopted += pool.adopt(block_id, *stored[block_id])
            yield PIECE
        self.num_refused += len(stored) - self.num_adopted
        self._generations = self._generations[:0]
