"""A prefix store over a server of the test's own, which fails in every way that a real one can.

The stores write when the test says so, hence late, and what is unwritten dies with its process.
What the server holds is what a real one would: bytes by key, with nobody's word for them.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from control_plane.prefix_store import EntryCodec, PrefixScope

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from control_plane.request import BlockHash, BlockId, Version

    Entry = tuple[BlockHash, Version]
    Live = Callable[[], Mapping[BlockId, Entry]]


@dataclass(eq=False)
class FakeServer:
    """What stands behind all stores.

    Attributes:
        blocks: Per scope: block id -> stored bytes.
        writers: Per scope: the store whose unbroken changes it holds.
        terms: Counters.
        is_away: Answers nobody.
        is_read_only: Refuses writes.
        delay_s: Time until an answer.
        connection: Changes when everybody's connection broke.
    """

    blocks: dict[PrefixScope, dict[int, bytes]] = field(default_factory=dict)
    writers: dict[PrefixScope, object] = field(default_factory=dict)
    terms: dict[str, int] = field(default_factory=dict)
    is_away: bool = False
    is_read_only: bool = False
    delay_s: float = 0.0
    connection: int = 0

    def heal(self) -> None:
        self.is_away = self.is_read_only = False
        self.delay_s = 0.0

    def wipe(self) -> None:
        """As FLUSHALL, or a restart of a server that keeps nothing."""
        self.blocks.clear()
        self.writers.clear()
        self.terms.clear()
        self.connection += 1

    def copy(self) -> FakeServer:
        """What a snapshot of it would bring back."""
        blocks = {scope: dict(values) for scope, values in self.blocks.items()}
        return FakeServer(blocks, dict(self.writers), dict(self.terms))

    def restore(self, saved: FakeServer) -> None:
        """Restart from a snapshot: older entries, older terms, new connections."""
        copied = saved.copy()
        self.blocks, self.writers, self.terms = copied.blocks, copied.writers, copied.terms
        self.connection += 1

    def damage(self, kind: str, which: int, other: int) -> None:
        """Do something to one value of every scope."""
        for scope, values in self.blocks.items():
            if not values:
                continue
            ids = sorted(values)
            first, second = ids[which % len(ids)], ids[other % len(ids)]
            value = values[first] or b"\0"
            if kind == "evicted":
                del values[first]
            elif kind == "flipped":
                at = other % len(value)
                values[first] = value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]
            elif kind == "cut":
                values[first] = value[: other % len(value)]
            elif kind == "swapped":
                values[first], values[second] = values[second], value
            elif kind == "moved":
                values[other] = value
            elif kind == "foreign":
                found = EntryCodec(scope).decode(first, value)
                foreign = PrefixScope("other", scope.model_fingerprint, scope.replica_epoch)
                generation = found[1] if found else 1
                values[first] = EntryCodec(foreign).encode(first, bytes(32), generation)
            else:
                raise ValueError(kind)


class FakeStore:
    """One process's store. Writes only in `flush`."""

    def __init__(self, server: FakeServer) -> None:
        self._server = server
        self._pending: dict[PrefixScope, dict[int, bytes | None]] = {}
        self._live: dict[PrefixScope, Live] = {}
        self._connections: dict[PrefixScope, int] = {}
        self._retired: set[PrefixScope] = set()
        self._unwritten_terms: dict[str, int] = {}

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        self._live.clear()

    def record(self, scope: PrefixScope, changes: Mapping[BlockId, Entry | None]) -> None:
        self._retired.discard(scope)
        pending, codec = self._pending.setdefault(scope, {}), EntryCodec(scope)
        for block_id, entry in changes.items():
            pending[block_id] = None if entry is None else codec.encode(block_id, *entry)

    def renew(self, scope: PrefixScope, live: Live) -> None:
        self._retired.discard(scope)
        self._live[scope] = live

    def retire(self, scope: PrefixScope) -> None:
        for kept in (self._pending, self._live, self._connections):
            kept.pop(scope, None)
        self._retired.add(scope)

    async def load(self, scope: PrefixScope) -> dict[BlockId, Entry] | None:
        server = self._server
        if server.is_away:
            return None
        values = dict(server.blocks.get(scope, {}))
        if server.delay_s:
            # The answer tells how it was when it was asked for.
            await asyncio.sleep(server.delay_s)
        for block_id, value in self._pending.get(scope, {}).items():
            if value is None:
                values.pop(block_id, None)
            else:
                values[block_id] = value
        codec = EntryCodec(scope)
        entries = {i: codec.decode(i, value) for i, value in values.items()}
        return {i: entry for i, entry in entries.items() if entry is not None}  # type: ignore[misc]

    async def known_scopes(
        self,
        deployment: str,
        model_fingerprints: Collection[bytes],
        *,
        within_s: float = math.inf,
    ) -> list[PrefixScope] | None:
        server = self._server
        if server.delay_s:
            await asyncio.sleep(server.delay_s)
        if server.is_away:
            return None
        return [
            scope
            for scope, values in server.blocks.items()
            if values
            and scope.deployment == deployment
            and scope.model_fingerprint in model_fingerprints
        ]

    async def next_term(self, shard: str, at_least: int) -> int:
        server = self._server
        if server.delay_s:
            await asyncio.sleep(server.delay_s)
        known = 0 if server.is_away else server.terms.get(shard, 0)
        term = max(known, at_least, self._unwritten_terms.get(shard, 0)) + 1
        if server.is_away or server.is_read_only:
            self._unwritten_terms[shard] = term
        else:
            server.terms[shard] = term
        return term

    def describe(self) -> str:
        return "fake"

    def flush(self, count: int = 1_000_000, *, loses: bool = False) -> None:
        """Write the oldest `count` changes; or they are lost on their way, unnoticed."""
        server = self._server
        if server.is_away or server.is_read_only:
            return
        for shard, term in self._unwritten_terms.items():
            server.terms[shard] = max(server.terms.get(shard, 0), term)
        self._unwritten_terms.clear()
        while self._retired:
            scope = self._retired.pop()
            server.blocks.pop(scope, None)
            server.writers.pop(scope, None)
        for scope, live in self._live.items():
            is_synced = self._connections.get(scope) == server.connection
            if server.writers.get(scope) is not self or not is_synced:
                self.record(scope, live())
                server.writers[scope] = self
                self._connections[scope] = server.connection
        for scope, pending in self._pending.items():
            values = server.blocks.setdefault(scope, {})
            for block_id in list(pending)[:count]:
                value = pending.pop(block_id)
                if loses:
                    continue
                if value is None:
                    values.pop(block_id, None)
                else:
                    values[block_id] = value
