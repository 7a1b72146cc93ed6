"""One suite for every prefix store: in memory, and in a real Valkey server."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

import pytest
from conditions import until
from prefix_store_helpers import (
    OTHER_DEPLOYMENT,
    OTHER_EPOCH,
    SCOPE,
    TIMING,
    Recorder,
    entries,
    entry,
    opened_store,
    until_loaded,
)
from valkey_process import ValkeyProcess

from control_plane.memory_prefix_store import MemoryPrefixStore
from control_plane.prefix_store import (
    EntryCodec,
    StoreObserver,
    StoreTiming,
    open_prefix_store,
    parse_store_url,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from control_plane.prefix_store import PrefixScope, PrefixStore


class Stores:
    """Opens stores of one kind; those of the Redis kind share `server`."""

    def __init__(self, stack: contextlib.AsyncExitStack, server: ValkeyProcess | None) -> None:
        self._stack = stack
        self._server = server
        self._passed_s = 0.0

    async def __call__(
        self, timing: StoreTiming = TIMING, observer: StoreObserver | None = None
    ) -> PrefixStore:
        if self._server is not None:
            opening = opened_store(self._server.url, timing=timing, observer=observer)
            return await self._stack.enter_async_context(opening)
        store = MemoryPrefixStore(timing=timing, observer=observer, clock=self._clock)
        await store.start()
        self._stack.push_async_callback(store.close)
        return store

    def _clock(self) -> float:
        return time.monotonic() + self._passed_s

    async def pass_time(self, seconds: float) -> None:
        """Bring the end of everything that is stored so much nearer, without waiting."""
        self._passed_s += seconds
        if self._server is not None:
            async with self._server.admin() as admin:
                for key in await admin.keys("pagewire:1:blocks:*"):
                    left_ms = await admin.pttl(key) - int(seconds * 1000)
                    await admin.pexpire(key, max(1, left_ms))

    async def is_kept_for(self, scope: PrefixScope, seconds: float) -> bool:
        """Whether a server keeps entries for so long yet; in memory a lease counts at once."""
        if self._server is None:
            return True
        async with self._server.admin() as admin:
            return await admin.pttl(f"pagewire:1:blocks:{scope.key}") >= seconds * 1000


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
async def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stores]:
    async with contextlib.AsyncExitStack() as stack:
        server = None
        if request.param == "redis":
            server = ValkeyProcess(tmp_path)
            await server.start()
            stack.push_async_callback(server.kill)
        yield Stores(stack, server)


async def test_unknown_scope_is_empty(open_store):
    store = await open_store()
    assert await store.load(SCOPE) == {}


async def test_recorded_entries_are_loaded(open_store):
    store = await open_store()
    store.record(SCOPE, entries(3))
    await until_loaded(store, SCOPE, entries(3))


async def test_record_is_visible_to_load_at_once(open_store):
    store = await open_store()
    store.record(SCOPE, entries(3))
    store.record(SCOPE, {2: None, 3: entry(9, 7)})
    assert await store.load(SCOPE) == {1: entry(1), 3: entry(9, 7)}


async def test_newest_value_of_a_block_wins(open_store):
    store = await open_store()
    for generation in range(1, 200):
        store.record(SCOPE, {5: entry(generation, generation)})
    await until_loaded(store, SCOPE, {5: entry(199, 199)})


async def test_removed_entry_is_gone(open_store):
    store = await open_store()
    store.record(SCOPE, entries(3))
    await until_loaded(store, SCOPE, entries(3))
    store.record(SCOPE, {1: None, 3: None, 77: None})
    await until_loaded(store, SCOPE, {2: entry(2)})


async def test_scopes_do_not_meet(open_store):
    store = await open_store()
    store.record(SCOPE, {1: entry(1)})
    store.record(OTHER_EPOCH, {1: entry(2)})
    store.record(OTHER_DEPLOYMENT, {1: entry(3)})
    await until_loaded(store, SCOPE, {1: entry(1)})
    await until_loaded(store, OTHER_EPOCH, {1: entry(2)})
    await until_loaded(store, OTHER_DEPLOYMENT, {1: entry(3)})


async def test_limits_of_an_entry_survive(open_store):
    store = await open_store()
    limits = {1: (b"\x00" * 32, 0), 2**31 - 1: (b"\xff" * 32, 2**63 - 1)}
    store.record(SCOPE, limits)
    await until_loaded(store, SCOPE, limits)


async def test_many_entries_survive(open_store):
    store = await open_store()
    store.record(SCOPE, entries(5000))
    await until_loaded(store, SCOPE, entries(5000))


async def test_malformed_entry_is_refused_and_others_are_kept(open_store):
    observer = Recorder()
    store = await open_store(observer=observer)
    store.record(SCOPE, {1: (b"short", 1), 2: entry(2), 3: (b"\x00" * 32, 2**63)})
    await until_loaded(store, SCOPE, {2: entry(2)})
    assert observer.failures["invalid"] == 2


async def test_first_lease_writes_live_entries(open_store):
    store = await open_store()
    store.renew(SCOPE, lambda: entries(4))
    await until_loaded(store, SCOPE, entries(4))


async def test_live_is_not_asked_while_the_store_is_known_to_be_complete(open_store):
    observer = Recorder()
    store = await open_store(observer=observer)
    store.renew(SCOPE, lambda: entries(2))
    await until_loaded(store, SCOPE, entries(2))
    for generation in range(50):
        store.renew(SCOPE, lambda: entries(2))
        store.record(SCOPE, {9: entry(9, generation)})
        await asyncio.sleep(0)
    await until_loaded(store, SCOPE, entries(2) | {9: entry(9, 49)})
    assert observer.num_resyncs == 1


async def test_entries_expire_without_a_lease_and_come_back_with_one(open_store):
    store = await open_store(timing=StoreTiming(ttl_s=0.2, renew_interval_s=0.01, coalesce_s=0.001))
    store.record(SCOPE, entries(3))
    await until_loaded(store, SCOPE, {})

    async def are_back() -> bool:
        # Again each time: on a busy machine they may expire before anybody looks.
        store.renew(SCOPE, lambda: entries(3, generation=4))
        return await store.load(SCOPE) == entries(3, generation=4)

    await until(are_back)


async def test_lease_keeps_entries_alive(open_store):
    store = await open_store()
    store.record(SCOPE, entries(3))
    await until(lambda: open_store.is_kept_for(SCOPE, 0.9 * TIMING.ttl_s))
    for _ in range(4):
        await open_store.pass_time(0.5 * TIMING.ttl_s)

        async def is_renewed() -> bool:
            # Nothing live: only the renewed TTL keeps what was recorded.
            store.renew(SCOPE, dict)
            return await open_store.is_kept_for(SCOPE, 0.9 * TIMING.ttl_s)

        await until(is_renewed)
    assert await store.load(SCOPE) == entries(3)


async def test_terms_grow_and_exceed_what_is_asked(open_store):
    store = await open_store()
    assert await store.next_term("s0", 0) == 1
    assert await store.next_term("s0", 0) == 2
    assert await store.next_term("s0", 40) == 41
    assert await store.next_term("s0", 7) == 42
    assert await store.next_term("s1", 0) == 1


async def until_known(store, expected, *, deployment="test"):
    async def is_so() -> bool:
        scopes = await store.known_scopes(deployment, [SCOPE.model_fingerprint])
        return scopes is not None and set(scopes) == set(expected)

    await until(is_so)


async def test_replicas_that_have_entries_are_known(open_store):
    store = await open_store()
    assert await store.known_scopes("test", [SCOPE.model_fingerprint]) == []
    store.record(SCOPE, entries(1))
    store.renew(OTHER_EPOCH, lambda: entries(2))
    store.record(OTHER_DEPLOYMENT, entries(1))
    await until_known(store, [SCOPE, OTHER_EPOCH])
    await until_known(store, [OTHER_DEPLOYMENT], deployment="other:test")
    assert await store.known_scopes("test", [b"\x07" * 32]) == []


async def test_a_replica_without_entries_is_not_known(open_store):
    store = await open_store()
    store.renew(SCOPE, dict)
    store.record(OTHER_EPOCH, entries(2))
    await until_known(store, [OTHER_EPOCH])
    store.record(OTHER_EPOCH, dict.fromkeys([1, 2]))
    await until_known(store, [])
    store.record(SCOPE, entries(1))
    await until_known(store, [SCOPE])


async def test_a_replica_is_unknown_once_its_entries_expired(open_store):
    store = await open_store(timing=StoreTiming(ttl_s=0.2, renew_interval_s=0.01, coalesce_s=0.001))
    store.record(SCOPE, entries(3))
    await until_known(store, [])

    async def is_known_again() -> bool:
        store.renew(SCOPE, lambda: entries(3))
        return await store.known_scopes("test", [SCOPE.model_fingerprint]) == [SCOPE]

    await until(is_known_again)


async def test_closing_twice_and_recording_afterwards_is_harmless(open_store):
    store = await open_store()
    await store.close()
    store.record(SCOPE, entries(1))
    store.renew(SCOPE, lambda: entries(1))
    await store.close()


# URLs and entries.


def test_entry_form_is_the_same_everywhere():
    codec = EntryCodec(SCOPE)
    packed = codec.encode(7, bytes(range(32)), 258)
    fields = "02" + bytes(range(32)).hex() + "0201000000000000"
    assert packed.hex() == fields + "3936f064945f4177"
    assert codec.decode(7, packed) == (bytes(range(32)), 258)
    assert codec.decode(8, packed) is None
    assert EntryCodec(OTHER_EPOCH).decode(7, packed) is None


def test_url_is_read_whole():
    address = parse_store_url("rediss://al%40ice:p%2Fw@[::1]:7000/3?ssl_cert_reqs=none")
    assert address is not None
    assert (address.host, address.port, address.db, address.tls) == ("::1", 7000, 3, True)
    assert (address.username, address.password) == ("al@ice", "p/w")
    assert str(address) == "rediss://[::1]:7000/3"
    assert "p/w" not in repr(address)


def test_url_defaults():
    address = parse_store_url("redis://cache")
    assert address is not None
    assert (address.host, address.port, address.db, address.tls) == ("cache", 6379, 0, False)
    assert isinstance(open_prefix_store("memory://", deployment="test"), MemoryPrefixStore)


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("", "must be redis://"),
        ("localhost:6379", "must be redis://"),
        ("unix:///tmp/secret.sock", "must be redis://"),
        ("http://secret@host", "must be redis://"),
        ("memory://secret", "takes nothing"),
        ("redis://", "names no host"),
        ("redis://:secret@", "names no host"),
        ("redis://host:0", "port"),
        ("redis://host:65536", "port"),
        ("redis://host:secret", "port"),
        ("redis://:sec/ret@host:6379", "port"),
        ("redis://:sec#ret@host:6379", "'#'"),
        ("redis://[secret", "malformed"),
        ("redis://host/secret", "database number"),
        ("redis://host/-1", "database number"),
        ("redis://host/1/2", "database number"),
        ("redis://host?password=secret", "unknown option"),
        ("redis://host?ssl_cert_reqs=none", "unknown option"),
        ("rediss://host?ssl_cert_reqs=secret", "required or optional or none"),
        ("rediss://host?ssl_ca_certs=", "must be a path"),
    ],
)
def test_bad_url_is_refused_without_quoting_it(url, complaint):
    with pytest.raises(ValueError, match=complaint) as refusal:
        parse_store_url(url)
    assert "sec" not in str(refusal.value)


def test_timing_refuses_a_ttl_shorter_than_two_leases():
    with pytest.raises(ValueError, match="ttl_s"):
        StoreTiming(ttl_s=3.0, renew_interval_s=2.0)
