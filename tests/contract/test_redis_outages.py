"""A server of the Redis prefix store that is away, hangs, is slow, full or refuses writes."""

from __future__ import annotations

import asyncio
import logging

import pytest
from conditions import until
from prefix_store_helpers import (
    IMPATIENT,
    SCOPE,
    Recorder,
    entries,
    entry,
    redis_store,
    until_held,
    until_loaded,
)
from valkey_process import ValkeyProcess

from control_plane.prefix_store import StoreTiming
from demo.link import Link, LinkConfig

pytestmark = pytest.mark.redis


async def test_server_that_is_down_at_start_costs_nothing_and_is_caught_up(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    server = ValkeyProcess(tmp_path)
    observer = Recorder()
    async with redis_store(server.url, observer=observer) as store:
        assert await store.load(SCOPE) is None
        assert await store.next_term("s0", 10) == 11
        assert await store.next_term("s0", 0) == 12
        store.record(SCOPE, entries(3))
        await until(lambda: observer.failures["unreachable"] >= 5)
        assert store.describe().startswith("redis: unreachable since 2")
        caplog.clear()
        await server.start()
        await until(lambda: store.num_pending == 0 and store.describe() == "redis: ok")
        assert await store.load(SCOPE) == entries(3)
        assert observer.states == [False, True]
        assert [r.message.split(":")[0] for r in caplog.records] == ["prefix store ready"]

        async def is_term_written() -> bool:
            async with server.admin() as admin:
                return await admin.get("pagewire:1:term:test:s0") == b"12"

        await until(is_term_written)
    await server.kill()


async def test_outage_is_logged_once_and_changes_made_meanwhile_arrive(valkey, caplog):
    caplog.set_level(logging.INFO, logger="control_plane.redis_prefix_store")
    observer = Recorder()
    async with redis_store(valkey.url, observer=observer) as store:
        store.record(SCOPE, entries(4))
        await until(lambda: store.num_pending == 0 and store.describe() == "redis: ok")
        await valkey.kill()
        store.record(SCOPE, {1: None, 2: entry(2, 9)})
        await until(lambda: observer.failures["unreachable"] >= 10)
        await valkey.start()
        await until(lambda: store.num_pending == 0 and store.describe() == "redis: ok")
        assert await store.load(SCOPE) == {2: entry(2, 9), 3: entry(3), 4: entry(4)}
    assert [r.levelname for r in caplog.records] == ["INFO", "WARNING", "INFO"]


async def test_memory_is_bounded_while_the_server_is_away(tmp_path):
    server = ValkeyProcess(tmp_path)
    async with redis_store(server.url) as store:
        for generation in range(200):
            store.record(SCOPE, entries(50, generation))
            store.record(SCOPE, dict.fromkeys(range(1, 51, 2)))
        assert store.num_pending == 50


async def test_scope_without_a_lease_is_forgotten_while_the_server_is_away(tmp_path):
    server = ValkeyProcess(tmp_path)
    timing = StoreTiming(ttl_s=0.1, renew_interval_s=0.01, backoff_min_s=0.01, backoff_max_s=0.02)
    async with redis_store(server.url, timing=timing) as store:
        store.record(SCOPE, entries(50))
        assert store.num_pending == 50
        await until(lambda: store.num_pending == 0)


async def test_frozen_server_delays_nobody_and_is_caught_up(valkey):
    observer = Recorder()
    async with redis_store(valkey.url, timing=IMPATIENT, observer=observer) as store:
        await until(lambda: store.describe() == "redis: ok")
        valkey.freeze()
        store.record(SCOPE, entries(3))
        await until(lambda: observer.failures["unreachable"] >= 2)
        async with asyncio.timeout(IMPATIENT.load_timeout_s + 20):
            assert await store.load(SCOPE) is None
            assert await store.next_term("s0", 3) == 4
        valkey.thaw()
        await until_loaded(store, SCOPE, entries(3))
        await until(lambda: store.describe() == "redis: ok")


async def test_server_that_answers_after_two_seconds_counts_as_unreachable(valkey):
    observer = Recorder()
    async with (
        Link(valkey.port, downstream=LinkConfig(delay_s=2.0)) as link,
        redis_store(f"redis://127.0.0.1:{link.port}", timing=IMPATIENT, observer=observer) as store,
    ):
        store.record(SCOPE, entries(3))
        await until(lambda: observer.failures["unreachable"] >= 2)
        assert store.describe().startswith("redis: unreachable since")
        link.set_round_trip(0)
        await until(lambda: store.num_pending == 0 and store.describe() == "redis: ok")
        await until_held(valkey.url, SCOPE, entries(3))


async def test_connection_cut_under_writes_loses_nothing(valkey):
    async with (
        Link(valkey.port) as link,
        redis_store(f"redis://127.0.0.1:{link.port}") as store,
    ):
        for generation in range(1, 30):
            store.record(SCOPE, entries(200, generation))
            if generation % 5 == 0:
                await link.cut()
            await asyncio.sleep(0.002)
        await until(lambda: store.num_pending == 0)
        await until_held(valkey.url, SCOPE, entries(200, 29))


async def test_read_only_server_is_named_and_caught_up_when_writable(valkey):
    observer = Recorder()
    async with redis_store(valkey.url, observer=observer) as store, valkey.admin() as admin:
        await until(lambda: store.describe() == "redis: ok")
        assert await store.next_term("s0", 5) == 6
        # A replica of nobody keeps its data and refuses writes.
        await admin.execute_command("REPLICAOF", "127.0.0.1", "1")
        store.record(SCOPE, entries(3))
        await until(lambda: observer.failures["read-only"] >= 2)
        assert store.describe().startswith("redis: read-only since")
        assert await store.next_term("s0", 0) == 7  # it can still be read
        await admin.execute_command("REPLICAOF", "NO", "ONE")
        await until(lambda: store.num_pending == 0 and store.describe() == "redis: ok")
        assert await store.load(SCOPE) == entries(3)

        async def is_term_written() -> bool:
            return await admin.get("pagewire:1:term:test:s0") == b"7"

        await until(is_term_written)


async def test_full_server_is_named_still_takes_removals_and_is_caught_up(valkey):
    observer = Recorder()
    async with redis_store(valkey.url, observer=observer) as store, valkey.admin() as admin:
        store.record(SCOPE, entries(3))
        await until(lambda: store.num_pending == 0)
        await admin.config_set("maxmemory", "1")
        store.record(SCOPE, {1: None, 4: entry(4)})
        await until(lambda: observer.failures["full"] >= 2)
        assert store.describe().startswith("redis: full since")
        [key] = await admin.keys("pagewire:1:blocks:*")
        assert not await admin.hexists(key, "1")
        await admin.config_set("maxmemory", "0")
        await until(lambda: store.num_pending == 0 and store.describe() == "redis: ok")
        assert await store.load(SCOPE) == {2: entry(2), 3: entry(3), 4: entry(4)}
