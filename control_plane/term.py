"""The fencing number of this control plane.

Owns: when it is settled, and that it never changes afterwards. Does not know who is attached.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from control_plane.prefix_store import PrefixStore


class Term:
    """Settled with the first Hellos: above the store's counter and every term they have seen.

    It gates only becoming active. A running control plane never raises its own: it would fence off
    a successor that has every right to be there.
    """

    def __init__(self, shard: str, store: PrefixStore, *, gather_s: float) -> None:
        """Nothing is asked of the store before the first `settle`."""
        self.value = 0
        self._shard = shard
        self._store = store
        self._gather_s = gather_s
        self._highest_seen = 0
        self._settling: asyncio.Task[None] | None = None

    async def settle(self, highest_seen: int) -> int:
        """The term; the first call waits a moment for other workers' Hellos.

        Args:
            highest_seen: What a worker's Hello reports. Counts only while the term is open.
        """
        self._highest_seen = max(self._highest_seen, highest_seen)
        if self._settling is None:
            self._settling = asyncio.create_task(self._settle(), name="term")
        # One worker's stream may end meanwhile; the others still wait for the same answer.
        await asyncio.shield(self._settling)
        return self.value

    async def remember(self, seen: int) -> None:
        """Let whatever starts after this process have a higher term than a worker has seen.

        A store that was wiped counts from 1 again. If the first Hello comes from a new worker, the
        next one makes this process step back from a successor that is none, and without this the
        one that is started instead could go the same way.
        """
        await self._store.next_term(self._shard, seen - 1)

    async def close(self) -> None:
        """Let go of a term that is still being settled."""
        if self._settling is not None and not self._settling.done():
            self._settling.cancel()
            await asyncio.wait([self._settling])

    async def _settle(self) -> None:
        if self._gather_s:
            await asyncio.sleep(self._gather_s)
        self.value = await self._store.next_term(self._shard, self._highest_seen)
