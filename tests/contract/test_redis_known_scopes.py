"""Which replicas the Redis prefix store knows of: its listing, and what is wrong in it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from conditions import until
from prefix_store_helpers import (
    IMPATIENT,
    MODELS,
    OTHER_DEPLOYMENT,
    OTHER_EPOCH,
    SCOPE,
    TIMING,
    entries,
    opened_store,
    redis_store,
    until_held,
    until_loaded,
)

from control_plane.prefix_store import MAX_SCOPES

if TYPE_CHECKING:
    from control_plane.prefix_store import PrefixScope
    from control_plane.redis_prefix_store import RedisPrefixStore

pytestmark = pytest.mark.redis


def listing_of(deployment: str = "test", shard: str = "0") -> str:
    return f"pagewire:1:scopes:{deployment}:{shard}"


async def listed(store: RedisPrefixStore, *expected: PrefixScope) -> None:
    async def is_so() -> bool:
        known = await store.known_scopes("test", MODELS)
        return known is not None and set(known) == set(expected)

    await until(is_so)


async def test_next_process_knows_the_replicas_of_its_shard_and_deployment(valkey):
    async with redis_store(valkey.url) as first, opened_store(valkey.url, shard="1") as other:
        first.renew(SCOPE, lambda: entries(2))
        first.renew(OTHER_DEPLOYMENT, lambda: entries(2))
        other.renew(OTHER_EPOCH, lambda: entries(2))
        await listed(first, SCOPE)
        await until_held(valkey.url, OTHER_EPOCH, entries(2))
    async with redis_store(valkey.url) as second, opened_store(valkey.url, shard="1") as other:
        assert await second.known_scopes("test", MODELS) == [SCOPE]
        assert await second.known_scopes("other:test", MODELS) == [OTHER_DEPLOYMENT]
        assert await other.known_scopes("test", MODELS) == [OTHER_EPOCH]


async def test_replicas_whose_entries_are_gone_are_listed_no_more(valkey):
    async with redis_store(valkey.url) as store, valkey.admin() as admin:
        store.record(SCOPE, entries(1))
        store.record(OTHER_EPOCH, entries(1))
        await until(lambda: store.num_pending == 0)
        await listed(store, SCOPE, OTHER_EPOCH)
        await admin.delete(f"pagewire:1:blocks:{OTHER_EPOCH.key}")
        assert await store.known_scopes("test", MODELS) == [SCOPE]
        assert await admin.scard(listing_of()) == 1
        # A lease lists it again.
        store.renew(OTHER_EPOCH, lambda: entries(1))
        await until_loaded(store, OTHER_EPOCH, entries(1))

        async def is_listed_again() -> bool:
            store.renew(OTHER_EPOCH, lambda: entries(1))
            return await admin.scard(listing_of()) == 2

        await until(is_listed_again)
        assert 0 < await admin.pttl(listing_of()) <= TIMING.ttl_s * 1000


async def test_what_does_not_read_as_a_replica_is_left_out(valkey):
    async with redis_store(valkey.url) as store, valkey.admin() as admin:
        store.record(SCOPE, entries(1))
        await listed(store, SCOPE)
        name = SCOPE.key.split(":", 1)[1]
        # Of the right form, but what is there is no hash.
        liar = f"{SCOPE.model_fingerprint.hex()}:{'9' * 64}"
        await admin.set(f"pagewire:1:blocks:test:{liar}", "no hash")
        junk = [b"", b"\xff" * 9, b"a:b", name[:-1], name + "0", name.upper(), name + "\n", liar]
        await admin.sadd(listing_of(), *junk)
        assert await store.known_scopes("test", MODELS) == [SCOPE]


async def test_so_many_replicas_are_read_and_no_more(valkey):
    async with redis_store(valkey.url) as store, valkey.admin() as admin:
        fingerprint = SCOPE.model_fingerprint.hex()
        names = [f"{fingerprint}:{number:064x}" for number in range(MAX_SCOPES + 500)]
        pipe = admin.pipeline(transaction=False)
        pipe.sadd(listing_of(), *names)
        for name in names:
            pipe.hset(f"pagewire:1:blocks:test:{name}", "1", "anything")
        await pipe.execute()
        async with asyncio.timeout(20):
            while (known := await store.known_scopes("test", MODELS)) is None:
                pass  # a loaded machine
        assert len({scope.replica_epoch for scope in known}) == len(known) == MAX_SCOPES


async def test_a_listing_of_a_wrong_type_is_replaced(valkey):
    async with redis_store(valkey.url) as store, valkey.admin() as admin:
        await admin.set(listing_of(), "no set")
        assert await store.known_scopes("test", MODELS) == []
        store.renew(SCOPE, lambda: entries(2))
        await listed(store, SCOPE)
        await admin.set(listing_of(), "no set")

        async def is_replaced() -> bool:
            store.renew(SCOPE, lambda: entries(2))
            return await store.known_scopes("test", MODELS) == [SCOPE]

        await until(is_replaced)
        # No doubt fell on the entries.
        assert await store.load(SCOPE) == entries(2)
        assert store.describe() == "redis: ok"


async def test_who_cannot_be_asked_knows_nothing_and_says_so_in_time(valkey):
    async with redis_store(valkey.url, timing=IMPATIENT) as store:
        store.record(SCOPE, entries(1))
        await listed(store, SCOPE)
        valkey.freeze()
        async with asyncio.timeout(IMPATIENT.op_timeout_s + 20):
            assert await store.known_scopes("test", MODELS) is None
        valkey.thaw()
        await valkey.kill()
        assert await store.known_scopes("test", MODELS) is None


async def test_a_read_only_server_still_tells_its_replicas(valkey):
    async with redis_store(valkey.url) as store, valkey.admin() as admin:
        store.record(SCOPE, entries(1))
        await listed(store, SCOPE)
        # Gone, and it cannot be removed.
        await admin.sadd(listing_of(), f"{SCOPE.model_fingerprint.hex()}:{'7' * 64}")
        await admin.execute_command("REPLICAOF", "127.0.0.1", "1")
        assert await store.known_scopes("test", MODELS) == [SCOPE]
