"""The prefix store in Redis or Valkey: written behind, never waited for.

Owns: keys, the task that writes, what is still unwritten, the state of the connection. Does not
know: who calls it; a caller never waits for the server except in `load` and `next_term`, which give
up after a limit.

    pagewire:1:blocks:{deployment}:{model fingerprint}:{replica epoch}   hash, with a TTL
        {block id}   format byte, block hash, generation, checksum (`prefix_store.EntryCodec`)
        writer       random id of the process whose unbroken changes the hash holds
    pagewire:1:scopes:{deployment}:{shard}                               set (`scope_register`)
    pagewire:1:term:{deployment}:{shard}                                 counter, no TTL

Whether the server lost something is seen from two things: the `writer` field is not ours (expired,
wiped, replaced, written by another process), or the connection is a new one (a server that restarts
may come back with an older state). Either way all live entries are written again. Nothing is
deleted then: an entry nobody vouches for is refused by its generation when it is loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

from redis import exceptions

from control_plane.prefix_store import EntryCodec, StoreObserver, StoreTiming
from control_plane.redis_client import FAILURES, describe_error, is_wrong_type, kind_of, new_client
from control_plane.scope_register import KEY_PREFIX, WRITER, ScopeRegister, blocks_key

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from redis.asyncio import Redis

    from control_plane.prefix_store import PrefixScope, RedisAddress
    from control_plane.request import BlockHash, BlockId, Version

    Live = Callable[[], Mapping[BlockId, tuple[BlockHash, Version]]]

logger = logging.getLogger(__name__)

_BATCH = 1024  # entries per exchange: about 60 KB
_MAX_BLOCK_ID_DIGITS = 10  # int32


class _Scope:
    """What one scope still has to tell the server.

    Attributes:
        key: Its hash.
        codec: Of its values.
        pending: Newest unwritten value per block; None: to be removed. At most one per block of the
            replica, however long the server is away.
        in_flight: The part of it that an exchange under way carries.
        live: Set by a lease that came in and was not passed on yet.
        lease_at: Monotonic time of the last sign of life.
        renewed_at: Monotonic time at which the server last got a new TTL.
        synced_connection: The connection on which everything was written; 0: none.
        is_listed: Whether those who ask for known scopes hear of it.
    """

    __slots__ = (
        "codec",
        "in_flight",
        "is_listed",
        "key",
        "lease_at",
        "live",
        "pending",
        "renewed_at",
        "synced_connection",
    )

    def __init__(self, key: str, codec: EntryCodec) -> None:
        self.key = key
        self.codec = codec
        self.pending: dict[int, bytes | None] = {}
        self.in_flight: dict[int, bytes | None] = {}
        self.live: Live | None = None
        self.lease_at = 0.0
        self.renewed_at = float("-inf")
        self.synced_connection = 0
        self.is_listed = False


class RedisPrefixStore:
    """Keeps hash metadata in a server; see `PrefixStore` for what each method promises."""

    def __init__(
        self,
        address: RedisAddress,
        *,
        deployment: str,
        shard: str = "0",
        timing: StoreTiming | None = None,
        observer: StoreObserver | None = None,
    ) -> None:
        self._address = address
        self._deployment = deployment
        self._timing = timing or StoreTiming()
        self._observer = observer or StoreObserver()
        self._register = ScopeRegister(shard, ttl_ms=self._ttl_ms)
        self._writer_id = os.urandom(16)
        self._scopes: dict[PrefixScope, _Scope] = {}
        self._unwritten_terms: dict[str, int] = {}
        # "ok", "connecting" at first, or the kind of failure.
        self._state = "connecting"
        self._state_since = datetime.now(UTC)
        self._connections = 0
        # Clients of their own: an exchange of the task never waits for a reader, only the task's
        # connection counts as a sign of a restarted server, and a load may wait longer than others.
        timeout_s = self._timing.op_timeout_s
        self._client = new_client(address, timeout_s=timeout_s, on_connect=self._count_connection)
        self._reader = new_client(address, timeout_s=timeout_s)
        self._loader = new_client(address, timeout_s=self._timing.load_timeout_s)
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="prefix-store")

    async def close(self) -> None:
        if self._task is not None:
            # More than once if need be: Python 3.11's `wait_for`, which the client uses, drops a
            # cancellation that coincides with its result.
            while not self._task.done():
                self._task.cancel()
                await asyncio.wait([self._task], timeout=0.05)
            self._task = None
            for state in self._scopes.values():
                state.live = None  # whoever answers may be gone by now
            if self._state in ("ok", "connecting"):
                with contextlib.suppress(*FAILURES):
                    async with asyncio.timeout(self._timing.close_timeout_s):
                        await self._flush()
        for client in (self._client, self._reader, self._loader):
            with contextlib.suppress(*FAILURES):
                await client.aclose()

    def record(
        self, scope: PrefixScope, changes: Mapping[BlockId, tuple[BlockHash, Version] | None]
    ) -> None:
        state = self._touch(scope)
        for block_id, entry in changes.items():
            self._set_pending(state, block_id, entry)
        if state.pending:
            self._wake.set()

    def renew(self, scope: PrefixScope, live: Live) -> None:
        state = self._touch(scope)
        state.live = live
        if state.lease_at - state.renewed_at >= self._timing.renew_interval_s:
            self._wake.set()

    async def load(self, scope: PrefixScope) -> dict[BlockId, tuple[BlockHash, Version]] | None:
        entries: dict[int, tuple[bytes, int]] = {}
        num_invalid = 0
        codec = EntryCodec(scope)
        key = blocks_key(scope)
        try:
            async with asyncio.timeout(self._timing.load_timeout_s):
                cursor = -1
                while cursor:
                    # HSCAN, not HGETALL: the server answers others between two pages.
                    answer: Any = self._loader.hscan(key, max(cursor, 0), count=_BATCH)
                    cursor, page = await answer
                    for name, value in page.items():
                        block_id = _parse_block_id(name)
                        entry = None if block_id is None else codec.decode(block_id, value)
                        if block_id is not None and entry is not None:
                            entries[block_id] = entry
                        elif name != WRITER:
                            num_invalid += 1
        except FAILURES as error:
            self._observer.on_failure(kind_of(error))
            logger.warning("prefix entries not loaded: key=%s error=%s", key, describe_error(error))
            return None
        if num_invalid:
            logger.warning("prefix entries left out: key=%s invalid=%d", key, num_invalid)
        # What this process has not written yet is newer than what the server knows.
        if state := self._scopes.get(scope):
            for block_id, value in (*state.in_flight.items(), *state.pending.items()):
                entry = codec.decode(block_id, value) if value is not None else None
                if entry is None:
                    entries.pop(block_id, None)
                else:
                    entries[block_id] = entry
        self._observer.on_loaded(len(entries), num_invalid)
        return cast("dict[BlockId, tuple[BlockHash, Version]]", entries)

    async def known_scopes(
        self, deployment: str, model_fingerprints: Collection[bytes]
    ) -> list[PrefixScope] | None:
        try:
            async with asyncio.timeout(self._timing.op_timeout_s):
                scopes = await self._register.read(self._reader, deployment)
        except FAILURES as error:
            self._observer.on_failure(kind_of(error))
            logger.warning("known replicas not read: error=%s", describe_error(error))
            return None
        return [scope for scope in scopes if scope.model_fingerprint in model_fingerprints]

    async def next_term(self, shard: str, at_least: int) -> int:
        key = f"{KEY_PREFIX}:term:{quote(self._deployment, safe='')}:{quote(shard, safe='')}"
        at_least = max(at_least, self._unwritten_terms.get(key, 0))
        term = at_least + 1
        try:
            async with asyncio.timeout(self._timing.op_timeout_s):
                counter = await _read_counter(self._reader, key)
                term = max(counter or 0, at_least) + 1
                term = await _raise_counter(self._reader, key, counter, term)
                self._unwritten_terms.pop(key, None)
        except FAILURES as error:
            self._observer.on_failure(kind_of(error))
            self._unwritten_terms[key] = term
            self._wake.set()
            logger.warning("term not stored yet: term=%d error=%s", term, describe_error(error))
        return term

    def describe(self) -> str:
        if self._state in ("ok", "connecting"):
            return f"redis: {self._state}"
        return f"redis: {self._state} since {self._state_since:%Y-%m-%dT%H:%M:%SZ}"

    @property
    def num_pending(self) -> int:
        """Changes that the server has not confirmed."""
        return sum(len(s.pending) + len(s.in_flight) for s in self._scopes.values())

    # What callers leave behind.

    def _touch(self, scope: PrefixScope) -> _Scope:
        state = self._scopes.get(scope)
        if state is None:
            state = self._scopes[scope] = _Scope(blocks_key(scope), EntryCodec(scope))
        state.lease_at = time.monotonic()
        return state

    def _set_pending(
        self, state: _Scope, block_id: int, entry: tuple[BlockHash, Version] | None
    ) -> None:
        try:
            state.pending[block_id] = (
                state.codec.encode(block_id, *entry) if entry is not None else None
            )
        except ValueError as error:
            self._observer.on_failure("invalid")
            logger.error("prefix entry refused: block_id=%d error=%s", block_id, error)

    # The one task that writes.

    async def _run(self) -> None:
        timing = self._timing
        backoff_s = timing.backoff_min_s
        while True:
            try:
                await self._flush()
            except Exception as error:
                # Any fault, even one of ours: serving goes on without this task's help.
                self._on_failure(error)
                # A late answer must not be taken for the answer to a later question, and after a
                # failover the name may lead to another server.
                with contextlib.suppress(*FAILURES):
                    await self._client.connection_pool.disconnect()
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(backoff_s * 2, timing.backoff_max_s)
                continue
            self._on_success()
            backoff_s = timing.backoff_min_s
            await asyncio.sleep(timing.coalesce_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timing.probe_interval_s):
                    await self._wake.wait()

    async def _flush(self) -> None:
        """Pass on everything that is due; raises at the first thing that fails."""
        self._wake.clear()
        now = time.monotonic()
        ttl_s = self._timing.ttl_s
        expired = [s for s, state in self._scopes.items() if now - state.lease_at > ttl_s]
        for scope in expired:
            del self._scopes[scope]
        # Also the question whether the server is there at all.
        await self._exchange(self._client.ping())
        for scope in expired:
            await self._exchange(self._register.remove(self._client, scope))
        for key, term in list(self._unwritten_terms.items()):
            counter = await self._exchange(_read_counter(self._client, key))
            if counter is None or counter < term:
                await self._exchange(_raise_counter(self._client, key, counter, term))
            if self._unwritten_terms.get(key) == term:
                del self._unwritten_terms[key]
        refusal: exceptions.ResponseError | None = None
        for scope, state in list(self._scopes.items()):
            try:
                await self._flush_scope(scope, state, now)
            except exceptions.ResponseError as error:
                if is_wrong_type(error):
                    await self._replace_key(state)
                else:
                    # The server answers, so the others' leases can still be renewed.
                    refusal = refusal or error
        if refusal is not None:
            raise refusal

    async def _flush_scope(self, scope: PrefixScope, state: _Scope, now: float) -> None:
        if state.live is not None and now - state.renewed_at >= self._timing.renew_interval_s:
            await self._renew(scope, state, state.live)
            state.renewed_at = now
            state.live = None
        # Bounded, so that a busy scope does not keep the others waiting.
        for _ in range(0, len(state.pending), _BATCH):
            await self._write_batch(state)
        if not state.is_listed:
            # Last: a full server refuses it, but takes removals, and has room afterwards.
            await self._exchange(self._register.add(self._client, scope))
            state.is_listed = True

    async def _replace_key(self, state: _Scope) -> None:
        """Remove what is not a hash, hence not ours; everything is written at the next lease."""
        logger.warning("prefix key replaced: key=%s error=wrong type", state.key)
        await self._exchange(self._client.delete(state.key))
        state.synced_connection = 0
        state.renewed_at = float("-inf")
        self._wake.set()

    async def _renew(self, scope: PrefixScope, state: _Scope, live: Live) -> None:
        pipe = self._client.pipeline(transaction=False)
        pipe.hget(state.key, WRITER.decode())
        pipe.pexpire(state.key, self._ttl_ms)
        self._register.ask(pipe, scope)
        # What is wrong with the set is no fault of the hash, nor the other way round.
        answers = await self._exchange(pipe.execute(raise_on_error=False))
        if refused := [a for a in answers[:2] if isinstance(a, Exception)]:
            raise refused[0]
        writer, state.is_listed = answers[0], answers[-1] == 1
        if writer == self._writer_id and state.synced_connection == self._connections:
            return
        # Read before the exchange: a connection that is replaced meanwhile counts as unsynced.
        connection = self._connections
        entries = live()
        for block_id, entry in entries.items():
            self._set_pending(state, block_id, entry)
        await self._set_fields(state, {WRITER: self._writer_id})
        state.synced_connection = connection
        self._observer.on_resync(len(entries))

    async def _write_batch(self, state: _Scope) -> None:
        block_ids = [block_id for block_id, _ in zip(state.pending, range(_BATCH), strict=False)]
        batch = state.in_flight = {block_id: state.pending.pop(block_id) for block_id in block_ids}
        try:
            removed = [block_id for block_id, value in batch.items() if value is None]
            if removed:
                # First and alone: a full server still takes it, and has room afterwards.
                await self._exchange(self._client.hdel(state.key, *map(str, removed)))
            values = {str(i).encode(): value for i, value in batch.items() if value is not None}
            if values:
                await self._set_fields(state, values)
        except BaseException:
            # Whether it arrived is unknown; writing it twice is harmless. Newer values win.
            state.pending = batch | state.pending
            raise
        finally:
            state.in_flight = {}
        self._observer.on_written(len(batch))

    async def _set_fields(self, state: _Scope, values: Mapping[bytes, bytes]) -> None:
        # One transaction: a hash never exists without a TTL, not even if we die in between.
        pipe = self._client.pipeline(transaction=True)
        pipe.hset(state.key, mapping=cast("Any", values))
        pipe.pexpire(state.key, self._ttl_ms)
        await self._exchange(pipe.execute())

    @property
    def _ttl_ms(self) -> int:
        return max(1, int(self._timing.ttl_s * 1000))

    async def _exchange(self, answer: Any) -> Any:
        # The sockets have limits too, but a server that drips bytes would stretch those.
        async with asyncio.timeout(self._timing.op_timeout_s):
            return await answer

    # State.

    def _on_success(self) -> None:
        if self._state != "ok":
            self._set_state("ok")
            logger.info("prefix store ready: url=%s", self._address)

    def _on_failure(self, error: Exception) -> None:
        kind = kind_of(error)
        self._observer.on_failure(kind)
        if self._state == kind:
            return
        self._set_state(kind)
        if kind == "failing":
            logger.error("prefix store failing: url=%s", self._address, exc_info=error)
        else:
            logger.warning(
                "prefix store %s: url=%s error=%s", kind, self._address, describe_error(error)
            )

    def _set_state(self, state: str) -> None:
        self._state = state
        self._state_since = datetime.now(UTC)
        self._observer.on_state(available=state == "ok")

    async def _count_connection(self, connection: Any) -> None:
        await connection.on_connect()
        self._connections += 1


async def _read_counter(client: Redis, key: str) -> int | None:
    """Read a term counter; None if it is missing or something else than a number."""
    try:
        value = await client.get(key)
        return int(value) if value is not None else None
    except ValueError:
        return None
    except exceptions.ResponseError as error:
        if is_wrong_type(error):
            return None
        raise


async def _raise_counter(client: Redis, key: str, counter: int | None, term: int) -> int:
    """Lift a counter to `term`; gives what it is then, which is more if others lift it too."""
    if counter is None:
        # What was there, if anything, was no number.
        await client.set(key, term)
        return term
    # An increment, so that two who read the same counter still end with different terms.
    return int(await client.incrby(key, term - counter))


def _parse_block_id(name: bytes) -> int | None:
    if not name.isdigit() or len(name) > _MAX_BLOCK_ID_DIGITS or name.startswith(b"0"):
        return None
    return int(name)
