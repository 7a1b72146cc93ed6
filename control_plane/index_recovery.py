"""The prefix index against what a worker's blocks really hold, at the beginning of a stream.

Other plans than ours may have reached the worker: those of an earlier control plane, whose entries
the store remembers, or of another one that had it for a while. Its generations say which. An entry
counts only if the generation of its block is the entry's on every rank: then no later plan handed
the block out, so nothing was written there since, in any rank's part of it.

Owns: the reading of Generations, which entries are taken over or forgotten, and how long plans wait
for that. Does not know: the store, streams, clocks (time is an argument).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from control_plane.plan import malformed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from control_plane.block_pool import BlockPool
    from control_plane.request import BlockHash, BlockId, Version
    from protos.pagewire.v1 import worker_pb2

    Entries = Mapping[BlockId, tuple[BlockHash, Version]]

_GENERATION = np.dtype("<i8")
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
        self._generations: list[int] = []

    @property
    def is_settled(self) -> bool:
        """Whether everything was checked: nothing comes after this."""
        return self.is_complete and self._stored is not None

    @property
    def hold_until(self) -> float:
        """Until when plans wait; in the past if there is nothing to wait for."""
        is_waiting = self._stored is None or (
            not self.is_complete and (self._has_kept or bool(self._stored))
        )
        return self._hold_until if is_waiting else float("-inf")

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
            self._generations = np.where(agreed, first, _DISAGREED).tolist()
            self.is_complete = True
            self._check_kept()
            self._adopt()

    def offer(self, stored: Entries) -> None:
        """The store has answered."""
        self._stored = stored
        if self.is_complete:
            self._adopt()

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
            self._pool.reorder_free(
                sorted(range(1, self._pool.num_blocks), key=self._generations.__getitem__)
            )

    def _check_kept(self) -> None:
        if self._hold_has_ended:
            # Nothing was kept; what is in the index now was computed by this stream's plans.
            return
        for block_id, (_, generation) in self._pool.permanent_entries().items():
            if self._generations[block_id] != generation:
                self._pool.forget(block_id)
                self.num_refused += 1

    def _adopt(self) -> None:
        if self._stored is None:
            return
        pool, generations = self._pool, self._generations
        valid = [
            (int(generation), -int(block_id))
            for block_id, (_, generation) in self._stored.items()
            if block_id < len(generations) and generations[block_id] == generation
        ]
        hashes: dict[int, BlockHash] = {i: name for i, (name, _) in self._stored.items()}
        # The oldest are evicted first; of one plan's, the tail: ids of a prompt mostly ascend.
        for generation, negative_id in sorted(valid):
            self.num_adopted += pool.adopt(-negative_id, hashes[-negative_id], generation)
        self.num_refused += len(self._stored) - self.num_adopted
        self._stored = {}
        self._generations = []
