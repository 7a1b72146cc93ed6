"""What only a real server can do to the Redis prefix store: vanish, hang, fill up, lie."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import ssl
import subprocess
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest
from conditions import until
from prefix_store_helpers import (
    IMPATIENT,
    OTHER_DEPLOYMENT,
    OTHER_EPOCH,
    SCOPE,
    TIMING,
    Recorder,
    entries,
    entry,
    opened_store,
    until_held,
    until_loaded,
)
from valkey_process import ValkeyProcess

from control_plane.prefix_store import MAX_SCOPES, EntryCodec, StoreTiming
from control_plane.redis_prefix_store import RedisPrefixStore
from demo.link import Link, LinkConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from control_plane.prefix_store import PrefixScope, StoreObserver

pytestmark = pytest.mark.redis


@pytest.fixture
async def valkey(tmp_path: Path) -> AsyncIterator[ValkeyProcess]:
    server = ValkeyProcess(tmp_path)
    await server.start()
    yield server
    await server.kill()


@contextlib.asynccontextmanager
async def redis_store(
    url: str, *, timing: StoreTiming = TIMING, observer: StoreObserver | None = None
) -> AsyncIterator[RedisPrefixStore]:
    async with opened_store(url, timing=timing, observer=observer) as store:
        assert isinstance(store, RedisPrefixStore)
        yield store


async def leased_until_held(store, url, expected):
    """Let leases come in until the server holds what is live."""

    async with opened_store(url) as reader:

        async def is_complete() -> bool:
            store.renew(SCOPE, lambda: expected)
            return await reader.load(SCOPE) == expected

        await until(is_complete)


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
        redis_store(
            f"redis://127.0.0.1:{link.port}", timing=IMPATIENT, observer=observer
        ) as store,
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


# Which replicas there were.

MODELS = [SCOPE.model_fingerprint]


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


async def test_password_is_used_and_never_shown(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    server = ValkeyProcess(tmp_path)
    await server.start(requirepass="s3cr3t/#?")
    good = f"redis://:s3cr3t%2F%23%3F@127.0.0.1:{server.port}"
    async with redis_store(good) as store:
        store.record(SCOPE, entries(1))
        await until(lambda: store.num_pending == 0 and store.describe() == "redis: ok")
    for url in (f"redis://:wr0ng@127.0.0.1:{server.port}", server.url):
        async with redis_store(url) as store:
            await until(lambda store=store: store.describe().startswith("redis: denied since"))
            assert await store.load(SCOPE) is None
    await server.kill()
    assert "s3cr3t" not in caplog.text
    assert "wr0ng" not in caplog.text
    assert "denied" in caplog.text


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate that nobody signed but itself, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command to make a certificate")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


@pytest.fixture
async def tls_port(valkey: ValkeyProcess, certificate: tuple[Path, Path]) -> AsyncIterator[int]:
    """A TLS front before the server."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def front(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        plain_reader, plain_writer = await asyncio.open_connection("127.0.0.1", valkey.port)
        await asyncio.gather(pump(reader, plain_writer), pump(plain_reader, writer))

    server = await asyncio.start_server(front, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_tls_is_spoken_and_the_certificate_is_checked(valkey, tls_port, certificate):
    authority = quote(str(certificate[0]), safe="")
    good = f"rediss://127.0.0.1:{tls_port}/0?ssl_ca_certs={authority}"
    async with redis_store(good) as store:
        store.record(SCOPE, entries(3))
        await until(lambda: store.num_pending == 0)
        await until_held(valkey.url, SCOPE, entries(3))
    observer = Recorder()
    async with redis_store(f"rediss://127.0.0.1:{tls_port}/0", observer=observer) as store:
        await until(lambda: observer.failures["unreachable"] >= 2)
        assert await store.load(SCOPE) is None


async def test_no_token_and_no_text_reaches_the_server(valkey):
    async with redis_store(valkey.url) as store, valkey.admin() as admin:
        store.renew(SCOPE, lambda: entries(2))
        await until_loaded(store, SCOPE, entries(2))

        async def are_both_there() -> bool:
            return len(await admin.keys("*")) == 2

        await until(are_both_there)
        [key] = await admin.keys("pagewire:1:blocks:*")
        [listing] = await admin.keys("pagewire:1:scopes:*")
        assert await admin.smembers(listing) == {key.split(b":", 4)[-1]}
        stored = await admin.hgetall(key)
        assert set(stored) == {b"writer", b"1", b"2"}
        assert {len(value) for name, value in stored.items() if name != b"writer"} == {49}
