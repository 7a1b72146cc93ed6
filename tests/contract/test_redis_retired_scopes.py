"""Removals from a server that is away or full, and other processes that still write."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from conditions import until
from prefix_store_helpers import (
    IMPATIENT,
    MODELS,
    OTHER_EPOCH,
    SCOPE,
    entries,
    entry,
    redis_store,
    until_held,
    until_loaded,
)

from control_plane.prefix_store import MAX_SCOPES, PrefixScope, StoreTiming
from control_plane.scope_register import RETIRED, blocks_key
from demo.link import Link

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import redis.asyncio

    from control_plane.redis_prefix_store import RedisPrefixStore

pytestmark = pytest.mark.redis

KEY = blocks_key(SCOPE)
LISTING = "pagewire:1:scopes:test:0"
ONLY_THE_MARK = {b"writer": RETIRED}


async def until_known(store: RedisPrefixStore, *expected: PrefixScope) -> None:
    async def is_so() -> bool:
        known = await store.known_scopes("test", MODELS)
        return known is not None and set(known) == set(expected)

    await until(is_so)


def holds(admin: redis.asyncio.Redis, fields: dict[bytes, bytes]) -> Callable[[], Awaitable[bool]]:
    async def is_so() -> bool:
        return await admin.hgetall(KEY) == fields

    return is_so


async def test_of_a_retired_replica_a_mark_is_left_that_expires(valkey):
    async with redis_store(valkey.url) as store, valkey.admin() as admin:
        store.renew(SCOPE, lambda: entries(3000))
        await until_known(store, SCOPE)
        store.retire(SCOPE)
        await until(holds(admin, ONLY_THE_MARK))
        assert 0 < await admin.pttl(KEY) <= 120_000
        assert await admin.scard(LISTING) == 0


async def test_a_process_that_ends_at_once_has_removed_what_is_gone(valkey):
    async with redis_store(valkey.url) as store:
        store.renew(SCOPE, lambda: entries(3))
        await until_known(store, SCOPE)
        store.retire(SCOPE)
    async with redis_store(valkey.url) as next_one:
        assert await next_one.known_scopes("test", MODELS) == []
        assert await next_one.load(SCOPE) == {}


@pytest.mark.parametrize("how", ["cut", "frozen"])
async def test_what_is_retired_while_the_server_is_away_is_removed_when_it_is_back(valkey, how):
    async with (
        Link(valkey.port) as link,
        redis_store(f"redis://127.0.0.1:{link.port}/0", timing=IMPATIENT) as store,
        valkey.admin() as admin,
    ):
        store.renew(SCOPE, lambda: entries(3))
        await until_held(valkey.url, SCOPE, entries(3))
        if how == "cut":
            await link.cut(refuse_new=True)
        else:
            valkey.freeze()
        store.retire(SCOPE)
        await until(lambda: store.describe().startswith("redis: unreachable"))
        if how == "cut":
            assert await admin.exists(KEY)
            link.mend()
        else:
            valkey.thaw()
        await until(holds(admin, ONLY_THE_MARK))
        await until_known(store)


async def test_what_the_server_never_took_is_not_tried_for_longer_than_it_lives(valkey):
    timing = StoreTiming(
        ttl_s=0.2, renew_interval_s=0.01, coalesce_s=0.001, backoff_max_s=0.05, op_timeout_s=30.0
    )
    async with (
        Link(valkey.port) as link,
        redis_store(f"redis://127.0.0.1:{link.port}/0", timing=timing) as store,
        valkey.admin() as admin,
    ):
        store.record(SCOPE, entries(3))
        await until(lambda: store.num_pending == 0)
        await link.cut(refuse_new=True)
        store.retire(SCOPE)

        await until(lambda: time.monotonic() - store._retired[SCOPE] > timing.ttl_s)
        link.mend()
        await until(lambda: not store._retired)
        assert not await admin.exists(KEY)


async def test_no_more_removals_are_kept_than_there_are_replicas(valkey):
    await valkey.kill()
    async with redis_store(valkey.url) as store:
        for number in range(MAX_SCOPES + 10):
            store.retire(PrefixScope("test", bytes(32), number.to_bytes(32, "big")))
        assert len(store._retired) == MAX_SCOPES


async def test_a_replica_that_comes_back_before_it_was_removed_begins_anew(valkey):
    async with redis_store(valkey.url) as store:
        store.renew(SCOPE, lambda: entries(3))
        await until_held(valkey.url, SCOPE, entries(3))
        store.retire(SCOPE)
        store.renew(SCOPE, lambda: {9: entry(9, 7)})
        assert await store.load(SCOPE) == {}
        await until_held(valkey.url, SCOPE, {9: entry(9, 7)})
        await until_known(store, SCOPE)


async def test_a_full_server_takes_the_removal_and_refuses_the_mark(valkey):
    async with redis_store(valkey.url) as store, valkey.admin() as admin:
        store.renew(SCOPE, lambda: entries(3))
        await until_known(store, SCOPE)
        await admin.config_set("maxmemory", "1")
        store.retire(SCOPE)
        await until(holds(admin, {}))
        await until(lambda: not store._retired)
        assert await admin.scard(LISTING) == 0


async def test_a_server_that_refuses_the_removal_is_asked_again_and_others_are_served(valkey):
    async with redis_store(valkey.url) as store, valkey.admin() as admin:
        store.renew(SCOPE, lambda: entries(3))
        await until_known(store, SCOPE)
        await admin.execute_command("ACL SETUSER default -unlink")
        store.retire(SCOPE)
        await until(lambda: store.describe().startswith("redis: denied"))
        store.record(OTHER_EPOCH, entries(2))
        await until_held(valkey.url, OTHER_EPOCH, entries(2))
        await admin.execute_command("ACL SETUSER default +unlink")
        await until(holds(admin, ONLY_THE_MARK))
        await until(lambda: store.describe() == "redis: ok")


async def test_late_changes_of_another_process_do_not_bring_a_retired_replica_back(valkey):
    async with (
        Link(valkey.port) as link,
        redis_store(f"redis://127.0.0.1:{link.port}/0") as old,
        redis_store(valkey.url) as new,
        valkey.admin() as admin,
    ):
        new.renew(SCOPE, lambda: entries(3))
        await until_known(new, SCOPE)
        await until(lambda: old.describe() == "redis: ok")
        await link.cut(refuse_new=True)
        old.record(SCOPE, entries(5, 7))
        new.retire(SCOPE)
        await until(holds(admin, ONLY_THE_MARK))
        link.mend()
        # It writes and lists them, as it has not heard of anything.
        await until(lambda: old.num_pending == 0 and old._scopes[SCOPE].is_listed)
        assert await admin.hlen(KEY) == 6
        assert await old.known_scopes("test", MODELS) == []
        assert await new.known_scopes("test", MODELS) == []
        assert await admin.scard(LISTING) == 0


async def test_a_late_lease_of_another_process_does_not_bring_it_back_a_live_worker_does(
    valkey,
):
    async with redis_store(valkey.url) as old, redis_store(valkey.url) as new, valkey.admin() as a:
        old.renew(SCOPE, lambda: entries(3))
        await until_known(new, SCOPE)
        new.retire(SCOPE)
        await until(holds(a, ONLY_THE_MARK))
        old.renew(SCOPE, lambda: entries(3))
        # It is seen that the replica was retired, and what it was is let go of.
        await until(lambda: SCOPE not in old._scopes)
        assert await a.hgetall(KEY) == ONLY_THE_MARK
        assert await new.known_scopes("test", MODELS) == []
        # The next lease: it is there.
        old.renew(SCOPE, lambda: entries(4))
        await until_known(new, SCOPE)
        await until_loaded(old, SCOPE, entries(4))


async def test_a_replica_that_comes_back_to_another_process_is_known_there_again(valkey):
    async with redis_store(valkey.url) as first:
        first.renew(SCOPE, lambda: entries(3))
        await until_known(first, SCOPE)
        first.retire(SCOPE)
    async with redis_store(valkey.url) as second:
        second.renew(SCOPE, lambda: entries(2))
        await until_known(second, SCOPE)
        await until_held(valkey.url, SCOPE, entries(2))
