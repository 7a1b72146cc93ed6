"""Which replicas have entries in the server, so that nobody has to look through all of its keys.

Owns: the set of scopes of a deployment and shard. Does not know: what the entries are, the state of
the connection, when to try again.

    pagewire:1:scopes:{deployment}:{shard}    set of {model fingerprint}:{replica epoch}, with a TTL

The set may name what is gone and may lack what is there. Whoever reads it asks for each scope's
entries and removes those that have none any more; each lease asks whether its scope is listed.

A scope that is retired leaves a mark in place of its entries until the TTL. Otherwise what another
process still wrote for it, or a server that was frozen read from an old connection, would list it
again. The mark yields to whoever takes the scope up anew.
"""

from __future__ import annotations

import contextlib
import math
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from redis import exceptions

from control_plane.prefix_store import MAX_SCOPES, PrefixScope
from control_plane.redis_client import FAILURES, is_wrong_type

if TYPE_CHECKING:
    from redis.asyncio import Redis

KEY_PREFIX = "pagewire:1"
# A field beside the entries: the process whose unbroken changes they are.
WRITER = b"writer"
# In its place: the scope's memory is gone for good. No writer's id has this length.
RETIRED = b"retired"

_MEMBER = re.compile(rb"([0-9a-f]{64}):([0-9a-f]{64})\Z")
_PAGE = 256
# Whatever somebody else puts into the set, it is not read for ever.
_MAX_PAGES = 4 * MAX_SCOPES // _PAGE


def blocks_key(scope: PrefixScope) -> str:
    """The hash that holds a scope's entries."""
    return f"{KEY_PREFIX}:blocks:{scope.key}"


class ScopeRegister:
    """The sets of one shard's control planes. Methods raise what the server or the way to it does.

    Args of all: the client to ask, which decides how long that may take.
    """

    def __init__(self, shard: str, *, ttl_ms: int) -> None:
        """Build it.

        Args:
            shard: Other shards' replicas are never seen.
            ttl_ms: Life of the set without a lease of any of its scopes.
        """
        self._shard = quote(shard, safe="")
        self._ttl_ms = ttl_ms

    def ask(self, pipe: Any, scope: PrefixScope) -> None:
        """Add to a pipeline: keep the set alive; whether the scope is in it (the last answer)."""
        key = self._key(scope.deployment)
        pipe.pexpire(key, self._ttl_ms)
        pipe.sismember(key, _member(scope))

    async def add(self, client: Redis, scope: PrefixScope) -> None:
        """List a scope. Something else under the set's key is replaced."""
        key = self._key(scope.deployment)
        try:
            await self._add(client, key, scope)
        except exceptions.ResponseError as error:
            if not is_wrong_type(error):
                raise
            await client.delete(key)
            await self._add(client, key, scope)

    async def remove(self, client: Redis, scope: PrefixScope) -> None:
        """List a scope no more; harmless if that is refused."""
        with contextlib.suppress(exceptions.ResponseError):
            answer: Any = client.srem(self._key(scope.deployment), _member(scope))
            await answer

    async def retire(self, client: Redis, scope: PrefixScope) -> None:
        """Remove a scope's entries and its place in the set, for good."""
        key = blocks_key(scope)
        # Alone: a full server takes it, and refuses the mark, without which it may come back.
        await client.unlink(key)
        await self.remove(client, scope)
        pipe = client.pipeline(transaction=True)
        pipe.hset(key, WRITER.decode(), RETIRED)  # type: ignore[arg-type]
        pipe.pexpire(key, self._ttl_ms)
        with contextlib.suppress(exceptions.ResponseError):
            await pipe.execute()

    async def read(
        self, client: Redis, deployment: str, *, within_ms: float = math.inf
    ) -> list[PrefixScope]:
        """Scopes that have entries, `MAX_SCOPES` at most. What does not read as one is left out.

        Args:
            client: To ask.
            deployment: Whose.
            within_ms: Leave out those whose last lease came so much longer ago than the newest.
        """
        key = self._key(deployment)
        listed = await self._listed(client, key, deployment)
        pipe = client.pipeline(transaction=False)
        for scope in listed:
            pipe.hlen(blocks_key(scope))
            pipe.hget(blocks_key(scope), WRITER.decode())
            pipe.pttl(blocks_key(scope))
        answers: list[Any] = await pipe.execute(raise_on_error=False) if listed else []
        found: dict[PrefixScope, int] = {}
        gone: list[bytes] = []
        newest_ms = 0
        for scope, num_fields, writer, ttl_ms in zip(
            listed, answers[::3], answers[1::3], answers[2::3], strict=True
        ):
            if any(isinstance(answer, Exception) for answer in (num_fields, writer, ttl_ms)):
                continue  # no hash, hence no entries
            if not num_fields or writer == RETIRED:
                gone.append(_member(scope))
                continue
            # Each lease gives the whole TTL anew, also to a replica without entries.
            newest_ms = max(newest_ms, ttl_ms)
            if num_fields > (writer is not None):
                found[scope] = ttl_ms
        if gone:
            with contextlib.suppress(*FAILURES):
                answer: Any = client.srem(key, *gone)
                await answer
        return [scope for scope, ttl_ms in found.items() if ttl_ms >= newest_ms - within_ms]

    async def _listed(self, client: Redis, key: str, deployment: str) -> list[PrefixScope]:
        listed: dict[bytes, PrefixScope] = {}
        cursor = 0
        for _ in range(_MAX_PAGES):
            question: Any = client.sscan(key, cursor, count=_PAGE)
            try:
                cursor, page = await question
            except exceptions.ResponseError as error:
                if is_wrong_type(error):
                    break
                raise
            for member in page:
                if match := _MEMBER.match(member):
                    fingerprint, epoch = (bytes.fromhex(part.decode()) for part in match.groups())
                    listed[member] = PrefixScope(deployment, fingerprint, epoch)
            if not cursor or len(listed) >= MAX_SCOPES:
                break
        return list(listed.values())[:MAX_SCOPES]

    async def _add(self, client: Redis, key: str, scope: PrefixScope) -> None:
        # One transaction: the set never exists without a TTL.
        pipe = client.pipeline(transaction=True)
        pipe.sadd(key, _member(scope))
        pipe.pexpire(key, self._ttl_ms)
        await pipe.execute()

    def _key(self, deployment: str) -> str:
        return f"{KEY_PREFIX}:scopes:{quote(deployment, safe='')}:{self._shard}"


def _member(scope: PrefixScope) -> bytes:
    return f"{scope.model_fingerprint.hex()}:{scope.replica_epoch.hex()}".encode()
