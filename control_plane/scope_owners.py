"""Whose KV memory each prefix scope is, and which of it is gone for good.

A worker that is lost may have lost its connection only, and bring its memory back. It is gone when
another memory comes under the same name, which is a process that was started anew, or took the name
from one that now has to end; and when its worker has left as announced.

Owns: the last scope of each worker and replica, and that the store hears which are gone. Does not
know: streams, how the store is told, who is attached.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from control_plane.prefix_store import PrefixScope, PrefixStore
    from control_plane.replica import WorkerFacts

# Workers may have a new name at every start; those that attached longest ago are forgotten first.
_MAX_OWNERS = 8192


class ScopeOwners:
    """Scopes by worker id and by replica id. It outlives the engines of those that are lost."""

    def __init__(self, store: PrefixStore) -> None:
        self._store = store
        self._scopes: dict[tuple[str, str], PrefixScope] = {}

    def take(self, scope: PrefixScope, facts: WorkerFacts) -> None:
        """A worker attached with this memory: nobody can bring back another one under its names."""
        gone: set[PrefixScope] = set()
        for owner in (("worker", facts.worker_id), ("replica", facts.replica_id)):
            # To the end: the first is the one that attached longest ago.
            gone.add(self._scopes.pop(owner, scope))
            self._scopes[owner] = scope
        for old in gone - {scope}:
            self._retire(old)
        while len(self._scopes) > _MAX_OWNERS:
            del self._scopes[next(iter(self._scopes))]

    def leave(self, replica_id: str) -> None:
        """The replica's worker ends, and its memory with it."""
        scope = self._scopes.get(("replica", replica_id))
        if scope is not None:
            self._retire(scope)

    def _retire(self, scope: PrefixScope) -> None:
        for owner in [owner for owner, held in self._scopes.items() if held == scope]:
            del self._scopes[owner]
        self._store.retire(scope)
