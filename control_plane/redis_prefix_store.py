"""The prefix store in Redis or Valkey: written behind, never waited for.

Owns: keys, the task that writes, what is still unwritten, the state of the connection. Does not
know: who calls it; a caller never waits for the server except in `load` and `next_term`, which give
up after a limit.

    pagewire:1:blocks:{deployment}:{model fingerprint}:{replica epoch}   hash, with a TTL
        {block id}   format byte, block hash, generation, checksum (`prefix_store.EntryCodec`)
        writer       random id of the process whose unbroken changes the hash holds, or "retired"
    pagewire:1:scopes:{deployment}:{shard}                               set (`scope_register`)
    pagewire:1:term:{deployment}:{shard}                                 number (`term_counter`)

Whether the server lost something is seen from two things: the `writer` field is not ours (expired,
wiped, replaced, written by another process), or the connection is a new one (a server that restarts
may come back with an older state). Either way all live entries are written again. Nothing is
deleted then: an entry nobody vouches for is refused by its generation when it is loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import random
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

from redis import exceptions

from control_plane.prefix_store import MAX_SCOPES, EntryCodec, StoreObserver, StoreTiming
from control_plane.redis_client import FAILURES, describe_error, is_wrong_type, kind_of, new_client
from control_plane.scope_register import RETIRED, WRITER, ScopeRegister, blocks_key
from control_plane.scope_state import ScopeState
from control_plane.term_counter import TermCounters

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from control_plane.prefix_store import PrefixScope, RedisAddress
    from control_plane.request import BlockHash, BlockId, Version

    Live = Callable[[], Mapping[BlockId, tuple[BlockHash, Version]]]

logger = logging.getLogger(__name__)

_BATCH = 1024  # entries per exchange: about 60 KB
_MAX_BLOCK_ID_DIGITS = 10  # int32


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
        self._timing = timing or StoreTiming()
        self._observer = observer or StoreObserver()
        self._register = ScopeRegister(shard, ttl_ms=self._ttl_ms)
        self._writer_id = os.urandom(16)
        self._scopes: dict[PrefixScope, ScopeState] = {}
        # Those to be removed from the server before anything else of them is written; since when.
        self._retired: dict[PrefixScope, float] = {}
        self._terms = TermCounters(deployment)
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

    def retire(self, scope: PrefixScope) -> None:
        self._scopes.pop(scope, None)
        self._retired[scope] = time.monotonic()
        if len(self._retired) > MAX_SCOPES:
            del self._retired[next(iter(self._retired))]
        self._wake.set()

    async def load(self, scope: PrefixScope) -> dict[BlockId, tuple[BlockHash, Version]] | None:
        entries: dict[int, tuple[bytes, int]] = {}
        num_invalid = 0
        codec = EntryCodec(scope)
        key = blocks_key(scope)
        try:
            async with asyncio.timeout(self._timing.load_timeout_s):
                cursor = 0 if scope in self._retired else -1
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
        self,
        deployment: str,
        model_fingerprints: Collection[bytes],
        *,
        within_s: float = math.inf,
    ) -> list[PrefixScope] | None:
        # One that was renewed a moment before it will be is no older than the others.
        within_ms = (within_s + 2 * self._timing.renew_interval_s) * 1000
        try:
            async with asyncio.timeout(self._timing.op_timeout_s):
                scopes = await self._register.read(self._reader, deployment, within_ms=within_ms)
        except FAILURES as error:
            self._observer.on_failure(kind_of(error))
            logger.warning("known replicas not read: error=%s", describe_error(error))
            return None
        return [
            scope
            for scope in scopes
            if scope.model_fingerprint in model_fingerprints and scope not in self._retired
        ]

    async def next_term(self, shard: str, at_least: int) -> int:
        timeout_s = self._timing.op_timeout_s
        term, error = await self._terms.next(self._reader, shard, at_least, timeout_s=timeout_s)
        if error is not None:
            self._observer.on_failure(kind_of(error))
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

    def _touch(self, scope: PrefixScope) -> ScopeState:
        state = self._scopes.get(scope)
        if state is None:
            state = self._scopes[scope] = ScopeState(blocks_key(scope), EntryCodec(scope))
        state.lease_at = time.monotonic()
        return state

    def _set_pending(
        self, state: ScopeState, block_id: int, entry: tuple[BlockHash, Version] | None
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
        for shard in self._terms.unwritten():
            await self._exchange(self._terms.write(self._client, shard))
        refusal = await self._flush_retired(now)
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

    async def _flush_retired(self, now: float) -> exceptions.ResponseError | None:
        """Remove what is gone for good; gives the first refusal."""
        refusal: exceptions.ResponseError | None = None
        for scope, since in list(self._retired.items()):
            # After this time nothing of it is left in the server anyway.
            if now - since <= self._timing.ttl_s:
                try:
                    await self._exchange(self._register.retire(self._client, scope))
                except exceptions.ResponseError as error:
                    refusal = refusal or error
                    continue
            if self._retired.get(scope) == since:
                del self._retired[scope]
        return refusal

    async def _flush_scope(self, scope: PrefixScope, state: ScopeState, now: float) -> None:
        if state.live is not None and now - state.renewed_at >= self._timing.renew_interval_s:
            await self._renew(scope, state, state.live)
            state.renewed_at = now
            state.live = None
        if self._scopes.get(scope) is not state:
            return  # retired meanwhile
        # Bounded, so that a busy scope does not keep the others waiting.
        for _ in range(0, len(state.pending), _BATCH):
            await self._write_batch(state)
        if not state.is_listed:
            # Last: a full server refuses it, but takes removals, and has room afterwards.
            await self._exchange(self._register.add(self._client, scope))
            state.is_listed = True

    async def _replace_key(self, state: ScopeState) -> None:
        """Remove what is not a hash, hence not ours; everything is written at the next lease."""
        logger.warning("prefix key replaced: key=%s error=wrong type", state.key)
        await self._exchange(self._client.delete(state.key))
        state.synced_connection = 0
        state.renewed_at = float("-inf")
        self._wake.set()

    async def _renew(self, scope: PrefixScope, state: ScopeState, live: Live) -> None:
        pipe = self._client.pipeline(transaction=False)
        pipe.hget(state.key, WRITER.decode())
        pipe.pexpire(state.key, self._ttl_ms)
        self._register.ask(pipe, scope)
        # What is wrong with the set is no fault of the hash, nor the other way round.
        answers = await self._exchange(pipe.execute(raise_on_error=False))
        if refused := [a for a in answers[:2] if isinstance(a, Exception)]:
            raise refused[0]
        writer, state.is_listed = answers[0], answers[-1] == 1
        if writer == RETIRED and state.renewed_at > float("-inf"):
            # Somebody else took it over, and it is gone there: this lease is an old one, written
            # late. If not, the next one begins anew.
            if self._scopes.get(scope) is state:
                del self._scopes[scope]
            return
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

    async def _write_batch(self, state: ScopeState) -> None:
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

    async def _set_fields(self, state: ScopeState, values: Mapping[bytes, bytes]) -> None:
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


def _parse_block_id(name: bytes) -> int | None:
    if not name.isdigit() or len(name) > _MAX_BLOCK_ID_DIGITS or name.startswith(b"0"):
        return None
    return int(name)
