"""A cluster that takes over from one that is gone: what it adopts, whatever the store went through.

Real gRPC, a real Valkey, fake workers that compute from what their blocks hold. In every case all
output is that of an undisturbed run; the cases differ in how much was found again.
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import conditions
import numpy as np
import pytest
from cluster_harness import (
    FINGERPRINT,
    Harness,
    RawPeer,
    collect,
    hello,
    running_cluster,
    undisturbed,
    until,
)
from fake_model import FakeModelRunner
from fake_worker import FakeWorker
from prefix_store_helpers import IMPATIENT, TIMING
from valkey_process import ValkeyProcess

from control_plane.prefix_store import EntryCodec, PrefixScope, StoreTiming, open_prefix_store
from demo.link import Link, LinkConfig
from demo.ports import any_free_port
from protos.pagewire.v1 import worker_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable
    from pathlib import Path

    import redis.asyncio

SHARED = list(range(20, 60))  # ten blocks
# For a server that answers the first questions and nothing afterwards.
PATIENT_WITH_LOADS = replace(IMPATIENT, load_timeout_s=30.0)


@dataclass
class Site:
    """A store and a worker that outlive the clusters, which share a port."""

    valkey: ValkeyProcess
    tmp_path: Path
    port: int = field(default_factory=any_free_port)
    workers: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    async def start_worker(self, **identity: object) -> FakeWorker:
        worker = FakeWorker(
            f"127.0.0.1:{self.port}",
            runner=FakeModelRunner(num_blocks=64),
            worker_id="w0",
            replica_id="replica-w0",
            model_fingerprint=FINGERPRINT,
            **identity,
        )
        return await self.workers.enter_async_context(worker)

    @contextlib.asynccontextmanager
    async def cluster(
        self, *, url: str | None = None, timing: StoreTiming = TIMING, **config: Any
    ) -> AsyncGenerator[Harness]:
        store = open_prefix_store(url or self.valkey.url, deployment="default", timing=timing)
        config = {"adoption_wait_s": 10.0, **config}
        async with running_cluster(store=store, port=self.port, **config) as harness:
            await harness.ready()
            yield harness

    def admin(self) -> redis.asyncio.Redis:
        return self.valkey.admin()


@pytest.fixture
async def site(tmp_path: Path) -> AsyncGenerator[Site]:
    valkey = ValkeyProcess(tmp_path)
    await valkey.start()
    site = Site(valkey, tmp_path)
    async with site.workers:
        yield site
    await valkey.kill()


async def serve(harness: Harness, *tails: int) -> int:
    """Serve prompts that share a prefix, one after the other; gives the first one's hit tokens."""
    hits: list[int] = []
    for tail in tails:
        request = harness.request([*SHARED, tail, tail + 1], max_tokens=6)
        output = await collect(harness.cluster.submit(request))
        assert output == undisturbed(request)
        hits.append(request.sequences[0].num_cached_tokens)
    return hits[0]


async def until_written(site: Site, harness: Harness) -> None:
    """Until the store holds exactly what is live."""
    scope = PrefixScope("default", FINGERPRINT, bytes.fromhex(harness.replica().replica_epoch))
    (engine,) = harness.cluster.fleet
    reader = open_prefix_store(site.valkey.url, deployment="default", timing=TIMING)

    async with contextlib.AsyncExitStack() as stack:
        await reader.start()
        stack.push_async_callback(reader.close)

        async def is_written() -> bool:
            return await reader.load(scope) == engine.core.live_entries()

        await conditions.until(is_written)


async def first_life(site: Site, **config: Any) -> int:
    """Serve until the store knows it all; gives how many blocks it knows."""
    async with site.cluster(**config) as harness:
        await serve(harness, 100, 101)
        await until_written(site, harness)
        return harness.replica().cached_blocks


async def key_of(admin: redis.asyncio.Redis) -> bytes:
    [key] = await admin.keys("pagewire:1:blocks:*")
    return key


async def nothing(site: Site) -> None: ...


async def wipe(site: Site) -> None:
    async with site.admin() as admin:
        await admin.flushall()


async def evict(site: Site) -> None:
    async with site.admin() as admin:
        key = await key_of(admin)
        await admin.hdel(key, *[str(i) for i in range(2, 64)])


async def make_read_only(site: Site) -> None:
    async with site.admin() as admin:
        await admin.execute_command("REPLICAOF", "127.0.0.1", "1")


async def restart_empty(site: Site) -> None:
    await site.valkey.kill()
    shutil.rmtree(site.tmp_path / "data")
    await site.valkey.start()


async def corrupt(site: Site) -> None:
    async with site.admin() as admin:
        key = await key_of(admin)
        for name, value in (await admin.hgetall(key)).items():
            if name != b"writer":
                # The lowest byte of the generation, which decides.
                await admin.hset(key, name, value[:33] + bytes([value[33] ^ 1]) + value[34:])


async def swap(site: Site) -> None:
    """Each value under its neighbour's name: generations mostly fit, contents do not."""
    async with site.admin() as admin:
        key = await key_of(admin)
        values = await admin.hgetall(key)
        names = sorted((n for n in values if n != b"writer"), key=int)
        for name, other in zip(names, [*names[1:], names[0]], strict=True):
            await admin.hset(key, name, values[other])


async def freeze(site: Site) -> None:
    site.valkey.freeze()


@pytest.mark.redis
@pytest.mark.parametrize(
    ("damage", "finds"),
    [
        (nothing, "all"),
        (wipe, "none"),
        (evict, "some"),
        (make_read_only, "all"),
        (restart_empty, "none"),
        (corrupt, "none"),
        (swap, "none"),
        (freeze, "none"),
    ],
)
async def test_the_next_cluster_finds_what_the_store_still_has(
    site: Site, damage: Callable[[Site], Awaitable[None]], finds: str
) -> None:
    await site.start_worker()
    num_known = await first_life(site)
    await damage(site)
    haste = {"timing": IMPATIENT, "adoption_wait_s": 0.1} if damage is freeze else {}
    async with site.cluster(**haste) as harness:
        hits = await serve(harness, 100)
        replica = harness.replica()
        await serve(harness, 101, 102)
        harness.assert_nothing_held()
    expected = {"all": (len(SHARED), num_known), "none": (0, 0), "some": (4, 1)}
    assert (hits, replica.adopted_blocks) == expected[finds]
    assert replica.refused_entries == 0


@pytest.mark.redis
async def test_another_deployment_finds_nothing(site: Site) -> None:
    await site.start_worker()
    await first_life(site)
    async with site.cluster(deployment="other") as harness:
        assert await serve(harness, 100) == 0
        assert harness.replica().adopted_blocks == 0


@pytest.mark.redis
async def test_a_new_process_under_the_same_id_starts_empty(site: Site) -> None:
    worker = await site.start_worker()
    await first_life(site)
    await worker.kill()
    await site.start_worker()
    async with site.cluster() as harness:
        assert await serve(harness, 100) == 0
        assert harness.replica().adopted_blocks == 0


@pytest.mark.redis
async def test_a_store_that_is_behind_is_contradicted(site: Site) -> None:
    await site.start_worker()
    await first_life(site)
    async with site.admin() as admin:
        key = await key_of(admin)
        old = await admin.hgetall(key)
        async with site.cluster() as harness:
            # Enough to evict everything of before.
            for first in range(200, 440, 40):
                request = harness.request(list(range(first, first + 40)), max_tokens=6)
                assert await collect(harness.cluster.submit(request)) == undisturbed(request)
            await until_written(site, harness)
        await admin.delete(key)
        await admin.hset(key, mapping=old)
    async with site.cluster() as harness:
        await serve(harness, 100, 101, 102)
        replica = harness.replica()
        assert replica.refused_entries == len(old) - 1 - replica.adopted_blocks > 0


@pytest.mark.redis
async def test_a_store_that_is_ahead_is_contradicted(site: Site) -> None:
    await site.start_worker()
    num_known = await first_life(site)
    async with site.admin() as admin:
        key = await key_of(admin)
        _, fingerprint, epoch = key.decode().removeprefix("pagewire:1:blocks:").split(":")
        codec = EntryCodec(PrefixScope("default", bytes.fromhex(fingerprint), bytes.fromhex(epoch)))
        for i in range(1, 6):
            await admin.hset(key, str(i), codec.encode(i, bytes(32), 10**6))
    async with site.cluster() as harness:
        await serve(harness, 100, 101)
        assert harness.replica().adopted_blocks == num_known - 5
        assert harness.replica().refused_entries == 5


@pytest.mark.redis
async def test_a_crash_before_the_store_learns_costs_hits_only(site: Site) -> None:
    await site.start_worker()
    await first_life(site)
    async with site.cluster(timing=PATIENT_WITH_LOADS) as harness:
        # Everything of before is found, then handed out again while nothing can be written.
        assert await serve(harness, 100) == len(SHARED)
        site.valkey.freeze()
        for first in range(200, 440, 40):
            request = harness.request(list(range(first, first + 40)), max_tokens=6)
            assert await collect(harness.cluster.submit(request)) == undisturbed(request)
    site.valkey.thaw()
    async with site.cluster() as harness:
        await serve(harness, 100, 101, 102)
        assert harness.replica().refused_entries > 0


@pytest.mark.redis
async def test_a_store_that_takes_seconds_delays_nobody_and_is_heard_late(site: Site) -> None:
    await site.start_worker()
    await first_life(site)
    slow = LinkConfig(delay_s=2.0)
    async with Link(site.valkey.port, upstream=slow, downstream=slow) as link:
        url = f"redis://127.0.0.1:{link.port}/0"
        # Long enough for the worker's generations, which say what is best overwritten first.
        async with site.cluster(url=url, timing=PATIENT_WITH_LOADS, adoption_wait_s=1.0) as harness:
            request = harness.request([300, 301, 302], max_tokens=4)
            assert await collect(harness.cluster.submit(request)) == undisturbed(request)
            assert harness.replica().adopted_blocks == 0
            await until(lambda: harness.replica().adopted_blocks > 0)
            # The blocks that the first request took were not among the most useful ones.
            assert await serve(harness, 100) == len(SHARED)


BLOCKS = 64


def generations(*, first: int = 0, count: int = BLOCKS, value: int = 0, is_last: bool = True):
    return worker_pb2.WorkerMessage(
        generations=worker_pb2.Generations(
            first_block_id=first,
            generations=np.array(
                [0] * (first == 0) + [value] * (count - (first == 0)), "<i8"
            ).tobytes(),
            is_last=is_last,
        )
    )


HEARTBEAT = worker_pb2.WorkerMessage(heartbeat=worker_pb2.Heartbeat())
RESULT = worker_pb2.WorkerMessage(step_result=worker_pb2.StepResult(version=11))


@pytest.mark.parametrize(
    ("messages", "reason", "named"),
    [
        ([generations(first=1)], "MALFORMED_MESSAGE", "generations.first_block_id"),
        ([generations(count=BLOCKS - 1)], "MALFORMED_MESSAGE", "generations.is_last"),
        ([generations(count=BLOCKS + 1)], "MALFORMED_MESSAGE", "generations.is_last"),
        ([generations(value=11)], "MALFORMED_MESSAGE", "generations.generations"),
        ([generations(value=-1)], "MALFORMED_MESSAGE", "generations.generations"),
        ([generations(), generations()], "UNEXPECTED_MESSAGE", "generations"),
        ([RESULT], "UNEXPECTED_MESSAGE", "step_result"),
        (
            [generations(count=9, is_last=False), HEARTBEAT, RESULT],
            "UNEXPECTED_MESSAGE",
            "step_result",
        ),
    ],
)
async def test_contradicting_generations_end_the_stream_by_name(
    messages: list[worker_pb2.WorkerMessage], reason: str, named: str
) -> None:
    async with running_cluster() as harness, RawPeer(harness.address) as peer:
        await peer.say(hello(applied_version=10))
        welcome = await peer.hear()
        assert welcome.welcome.send_generations
        for message in messages:
            await peer.say(message)
        _, found, metadata = await peer.end()
        assert found == reason
        assert metadata.get("field", metadata.get("kind")) == named


async def test_a_worker_that_applied_nothing_is_not_asked() -> None:
    async with running_cluster() as harness, RawPeer(harness.address) as peer:
        assert not (await peer.attach()).send_generations
        await peer.say(generations())
        _, reason, _ = await peer.end()
        assert reason == "UNEXPECTED_MESSAGE"
