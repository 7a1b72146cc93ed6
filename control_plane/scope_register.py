"""Which replicas have entries in the server, so that nobody has to look through all of its keys.

Owns: the set of scopes of a deployment and shard. Does not know: what the entries are, the state of
the connection, when to try again.

    pagewire:1:scopes:{deployment}:{shard}    set of {model fingerprint}:{replica epoch}, with a TTL

The set may name what is gone and may lack what is there. Whoever reads it asks for each scope's
entries and removes those that have none any more; each lease asks whether its scope is listed.
"""

from __future__ import annotations

import contextlib
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

    async def read(self, client: Redis, deployment: str) -> list[PrefixScope]:
        """Scopes that have entries, `MAX_SCOPES` at most. What does not read as one is left out."""
        key = self._key(deployment)
        listed = await self._listed(client, key, deployment)
        pipe = client.pipeline(transaction=False)
        for scope in listed:
            pipe.hlen(blocks_key(scope))
            pipe.hexists(blocks_key(scope), WRITER.decode())
        answers: list[Any] = await pipe.execute(raise_on_error=False) if listed else []
        found: list[PrefixScope] = []
        gone: list[bytes] = []
        for scope, num_fields, has_writer in zip(listed, answers[::2], answers[1::2], strict=True):
            if isinstance(num_fields, Exception) or isinstance(has_writer, Exception):
                continue  # no hash, hence no entries
            if not num_fields:
                gone.append(_member(scope))
            elif num_fields > has_writer:
                found.append(scope)
        if gone:
            with contextlib.suppress(*FAILURES):
                answer: Any = client.srem(key, *gone)
                await answer
        return found

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
