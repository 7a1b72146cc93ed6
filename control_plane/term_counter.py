"""The counters of terms in the server, and those that it has not taken yet.

Owns: their keys, how two who count at once get different numbers. Does not know: when to try again,
what a term is for.

    pagewire:1:term:{deployment}:{shard}    number, no TTL
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from urllib.parse import quote

from redis import exceptions

from control_plane.redis_client import FAILURES, is_wrong_type
from control_plane.scope_register import KEY_PREFIX

if TYPE_CHECKING:
    from redis.asyncio import Redis


class TermCounters:
    """One deployment's, by shard."""

    def __init__(self, deployment: str) -> None:
        self._deployment = quote(deployment, safe="")
        # Terms in use that the server does not know.
        self._unwritten: dict[str, int] = {}

    async def next(
        self, client: Redis, shard: str, at_least: int, *, timeout_s: float
    ) -> tuple[int, Exception | None]:
        """Count one up, from no less than `at_least`.

        Returns:
            The term, and why the server does not know it; None if it does.
        """
        key, at_least = self._key(shard), max(at_least, self._unwritten.get(shard, 0))
        term = at_least + 1
        try:
            async with asyncio.timeout(timeout_s):
                counter = await _read(client, key)
                term = max(counter or 0, at_least) + 1
                term = await _raise(client, key, counter, term)
                self._unwritten.pop(shard, None)
        except FAILURES as error:
            self._unwritten[shard] = term
            return term, error
        return term, None

    def unwritten(self) -> list[str]:
        """Shards of which the server has to be told."""
        return list(self._unwritten)

    async def write(self, client: Redis, shard: str) -> None:
        """Tell the server; raises what it, or the way to it, does."""
        key, term = self._key(shard), self._unwritten[shard]
        counter = await _read(client, key)
        if counter is None or counter < term:
            await _raise(client, key, counter, term)
        if self._unwritten.get(shard) == term:
            del self._unwritten[shard]

    def _key(self, shard: str) -> str:
        return f"{KEY_PREFIX}:term:{self._deployment}:{quote(shard, safe='')}"


async def _read(client: Redis, key: str) -> int | None:
    """Read a counter; None if it is missing or something else than a number."""
    try:
        value = await client.get(key)
        return int(value) if value is not None else None
    except ValueError:
        return None
    except exceptions.ResponseError as error:
        if is_wrong_type(error):
            return None
        raise


async def _raise(client: Redis, key: str, counter: int | None, term: int) -> int:
    """Lift a counter to `term`; gives what it is then, which is more if others lift it too."""
    if counter is None:
        # What was there, if anything, was no number.
        await client.set(key, term)
        return term
    # An increment, so that two who read the same counter still end with different terms.
    return int(await client.incrby(key, term - counter))
