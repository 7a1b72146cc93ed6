"""The prefix store of a control plane without Redis: it lives and dies with the process.

Owns: a dictionary per scope and its expiry. It still serves: a worker that reconnects with the same
epoch to a control plane that kept running finds its entries.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from control_plane.prefix_store import MAX_SCOPES, EntryCodec, StoreObserver, StoreTiming

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from control_plane.prefix_store import PrefixScope
    from control_plane.request import BlockHash, BlockId, Version


class _Scope:
    """Entries of one scope and the time at which they expire."""

    __slots__ = ("codec", "entries", "expires_at", "is_renewed")

    def __init__(self, scope: PrefixScope) -> None:
        self.codec = EntryCodec(scope)
        self.entries: dict[BlockId, tuple[BlockHash, Version]] = {}
        self.expires_at = 0.0
        self.is_renewed = False


class MemoryPrefixStore:
    """Keeps everything in this process; see `PrefixStore` for what each method promises."""

    def __init__(
        self,
        *,
        timing: StoreTiming | None = None,
        observer: StoreObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timing = timing or StoreTiming()
        self._observer = observer or StoreObserver()
        self._clock = clock
        self._scopes: dict[PrefixScope, _Scope] = {}
        self._terms: dict[str, int] = {}

    async def start(self) -> None:
        self._observer.on_state(available=True)

    async def close(self) -> None:
        self._scopes.clear()

    def record(
        self, scope: PrefixScope, changes: Mapping[BlockId, tuple[BlockHash, Version] | None]
    ) -> None:
        state = self._touch(scope)
        entries = state.entries
        for block_id, entry in changes.items():
            if entry is None:
                entries.pop(block_id, None)
                continue
            try:
                # Refuses exactly what the Redis store refuses, so that tests without it find it.
                state.codec.encode(block_id, *entry)
            except ValueError:
                self._observer.on_failure("invalid")
                continue
            entries[block_id] = entry
        self._observer.on_written(len(changes))

    def renew(
        self,
        scope: PrefixScope,
        live: Callable[[], Mapping[BlockId, tuple[BlockHash, Version]]],
    ) -> None:
        state = self._touch(scope)
        if state.is_renewed:
            return
        state.is_renewed = True
        entries = dict(live())
        state.entries.update(entries)
        self._observer.on_resync(len(entries))

    def retire(self, scope: PrefixScope) -> None:
        self._scopes.pop(scope, None)

    async def load(self, scope: PrefixScope) -> dict[BlockId, tuple[BlockHash, Version]]:
        self._expire()
        state = self._scopes.get(scope)
        entries = dict(state.entries) if state else {}
        self._observer.on_loaded(len(entries), 0)
        return entries

    async def known_scopes(
        self,
        deployment: str,
        model_fingerprints: Collection[bytes],
        *,
        within_s: float = math.inf,
    ) -> list[PrefixScope]:
        self._expire()
        newest = max((state.expires_at for state in self._scopes.values()), default=0.0)
        return [
            scope
            for scope, state in self._scopes.items()
            if state.entries
            and state.expires_at >= newest - within_s
            and scope.deployment == deployment
            and scope.model_fingerprint in model_fingerprints
        ][:MAX_SCOPES]

    async def next_term(self, shard: str, at_least: int) -> int:
        term = max(self._terms.get(shard, 0), at_least) + 1
        self._terms[shard] = term
        return term

    def describe(self) -> str:
        return "memory"

    def _touch(self, scope: PrefixScope) -> _Scope:
        self._expire()
        state = self._scopes.get(scope)
        if state is None:
            state = self._scopes[scope] = _Scope(scope)
        state.expires_at = self._clock() + self._timing.ttl_s
        return state

    def _expire(self) -> None:
        now = self._clock()
        for scope in [s for s, state in self._scopes.items() if state.expires_at <= now]:
            del self._scopes[scope]
