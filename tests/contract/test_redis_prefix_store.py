"""What only a real server does with the Redis prefix store: keep, lose and garble what it holds."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from conditions import until
from prefix_store_helpers import (
    MODELS,
    OTHER_EPOCH,
    SCOPE,
    TIMING,
    Recorder,
    entries,
    entry,
    leased_until_held,
    redis_store,
    until_loaded,
)

from control_plane.prefix_store import EntryCodec

pytestmark = pytest.mark.redis


async def test_next_process_finds_entries_and_terms(valkey):
    async with redis_store(valkey.url) as first:
        first.record(SCOPE, entries(3))
        assert await first.next_term("s0", 5) == 6
    async with redis_store(valkey.url) as second:
        assert await second.load(SCOPE) == entries(3)
        assert await second.next_term("s0", 0) == 7


async def test_a_process_that_ends_at_once_has_written_what_it_knew(valkey):
    async with redis_store(valkey.url) as first:
        first.record(SCOPE, entries(3))
    async with redis_store(valkey.url) as second:
        assert await second.load(SCOPE) == entries(3)
        assert await second.known_scopes("test", MODELS) == [SCOPE]


async def test_next_process_keeps_entries_it_has_not_adopted_yet(valkey):
    async with redis_store(valkey.url) as first:
        first.renew(SCOPE, lambda: entries(3))
        await until(lambda: first.num_pending == 0 and first.describe() == "redis: ok")
    async with redis_store(valkey.url) as second:
        second.renew(SCOPE, lambda: {4: entry(4)})
        await until_loaded(second, SCOPE, entries(4))


async def test_entries_survive_kill_of_the_server(valkey):
    async with redis_store(valkey.url) as store:
        store.record(SCOPE, entries(3))
        await until(lambda: store.num_pending == 0)
        await valkey.kill()
        await valkey.start()
        store.renew(SCOPE, lambda: entries(3))
        await until_loaded(store, SCOPE, entries(3))
        await until(lambda: store.describe() == "redis: ok")


async def test_key_never_lacks_a_ttl(valkey):
    async with redis_store(valkey.url) as store, valkey.admin() as admin:
        store.record(SCOPE, entries(3))
        await until(lambda: store.num_pending == 0)
        store.renew(OTHER_EPOCH, lambda: entries(2))
        await until_loaded(store, OTHER_EPOCH, entries(2))
        keys = await admin.keys("pagewire:1:blocks:*")
        assert len(keys) == 2
        for key in keys:
            assert 0 < await admin.pttl(key) <= TIMING.ttl_s * 1000


async def test_wiped_server_is_filled_again_by_the_next_lease(valkey):
    async with redis_store(valkey.url) as store, valkey.admin() as admin:
        store.renew(SCOPE, lambda: entries(5))
        await until_loaded(store, SCOPE, entries(5))
        await admin.flushall()
        # A change in between must not make the rest look present.
        store.record(SCOPE, {6: entry(6)})

        await leased_until_held(store, valkey.url, entries(6))


async def test_server_restarted_with_an_older_state_is_brought_up_to_date(valkey):
    observer = Recorder()
    async with redis_store(valkey.url, observer=observer) as store:
        store.renew(SCOPE, lambda: entries(5))
        await until_loaded(store, SCOPE, entries(5))
        async with valkey.admin() as admin:
            # What losing the last second of the append-only file looks like: our mark is there.
            [key] = await admin.keys("pagewire:1:blocks:*")
            await admin.hdel(key, "4", "5")
        await valkey.kill()
        await valkey.start()

        await leased_until_held(store, valkey.url, entries(5))
        assert observer.num_resyncs >= 2


async def test_key_of_a_wrong_type_is_replaced(valkey):
    async with redis_store(valkey.url) as store, valkey.admin() as admin:
        store.renew(SCOPE, lambda: entries(3))
        await until_loaded(store, SCOPE, entries(3))
        [key] = await admin.keys("pagewire:1:blocks:*")
        await admin.set(key, "not a hash")
        assert await store.load(SCOPE) is None

        await leased_until_held(store, valkey.url, entries(3))


def flipped(value: bytes, index: int) -> bytes:
    return value[:index] + bytes([value[index] ^ 1]) + value[index + 1 :]


async def test_corrupted_values_are_left_out_and_reported(valkey, caplog):
    observer = Recorder()
    async with redis_store(valkey.url, observer=observer) as store, valkey.admin() as admin:
        store.record(SCOPE, entries(3))
        await until(lambda: store.num_pending == 0)
        [key] = await admin.keys("pagewire:1:blocks:*")
        codec = EntryCodec(SCOPE)
        good = codec.encode(2, *entry(1))
        broken = {
            "2": good[:-1],  # too short
            "10": good + b"\x00",  # too long
            "11": b"\x01" + good[1:],  # another format
            "14": good,  # of another block
            "15": EntryCodec(OTHER_EPOCH).encode(15, *entry(1)),  # of another scope
            "16": flipped(codec.encode(16, *entry(1)), 3),  # another hash
            "17": flipped(codec.encode(17, *entry(1)), 34),  # another generation
            "12": b"",
            "13": codec.encode(13, b"\x00" * 32, -1),  # a generation that cannot be
            "0": good,  # the null block
            "-4": good,
            "07": good,
            "12345678901": good,
            "block": good,
            "\xb2": good,  # a digit to Unicode, not to us
        }
        await admin.hset(key, mapping=broken)
        assert await store.load(SCOPE) == {1: entry(1), 3: entry(3)}
        assert observer.num_invalid == len(broken)
        assert sum("left out" in r.message for r in caplog.records) == 1


@pytest.mark.parametrize("damage", [b"many", b"", b"1.5", [b"a", b"list"]])
async def test_damaged_term_counter_is_replaced(valkey, damage):
    async with redis_store(valkey.url) as store, valkey.admin() as admin:
        key = "pagewire:1:term:test:s0"
        await (admin.rpush(key, *damage) if isinstance(damage, list) else admin.set(key, damage))
        assert await store.next_term("s0", 6) == 7
        assert await admin.get(key) == b"7"


async def test_terms_taken_at_once_by_many_differ(valkey):
    async with contextlib.AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(redis_store(valkey.url)) for _ in range(8)]
        terms = await asyncio.gather(*(store.next_term("s0", 3) for store in stores))
        # The very first write may collide: nobody had a counter to raise.
        later = await asyncio.gather(*(store.next_term("s0", 3) for store in stores))
        assert len(set(later)) == len(later)
        assert min(later) > 4
        assert min(terms) >= 4
