"""A cluster that takes over from one that had several workers, which come back in any order.

Real gRPC, a real Valkey, fake workers; the one that has the prefix is behind a link and comes last.
Where a test must not wait, the limit is an hour, and it would not end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import conditions
import pytest
from cluster_harness import (
    FINGERPRINT,
    Harness,
    collect,
    running_cluster,
    undisturbed,
    until,
)
from fake_model import FakeModelRunner
from fake_worker import FakeWorker
from prefix_store_helpers import IMPATIENT, TIMING
from valkey_process import ValkeyProcess

from control_plane.errors import OverloadedError
from control_plane.prefix_store import PrefixScope, open_prefix_store
from demo.link import Link
from demo.ports import any_free_port

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from control_plane.prefix_store import StoreTiming
    from control_plane.request import Request

pytestmark = pytest.mark.redis

SHARED = list(range(20, 60))  # ten blocks
HOUR_S = 3600.0


@dataclass
class Site:
    """A store and workers that outlive the clusters, which share a port."""

    valkey: ValkeyProcess
    link: Link
    port: int
    workers: dict[str, FakeWorker] = field(default_factory=dict)

    def start_worker(self, name: str, *, linked: bool = False) -> None:
        worker = FakeWorker(
            f"127.0.0.1:{self.link.port if linked else self.port}",
            runner=FakeModelRunner(num_blocks=64),
            worker_id=name,
            replica_id=f"replica-{name}",
            model_fingerprint=FINGERPRINT,
        )
        self.workers[name] = worker
        worker.start()

    @contextlib.asynccontextmanager
    async def cluster(
        self,
        *,
        url: str | None = None,
        timing: StoreTiming = TIMING,
        return_wait_s: float = HOUR_S,
        **config: Any,
    ) -> AsyncGenerator[Harness]:
        store = open_prefix_store(
            url or self.valkey.url,
            deployment="default",
            shard=config.get("shard", "0"),
            timing=timing,
        )
        config = {"adoption_wait_s": 60.0, "return_wait_s": return_wait_s, **config}
        async with running_cluster(store=store, port=self.port, **config) as harness:
            yield harness


@pytest.fixture
async def site(tmp_path: Path) -> AsyncGenerator[Site]:
    valkey = ValkeyProcess(tmp_path)
    await valkey.start()
    port = any_free_port()
    async with Link(port) as link:
        site = Site(valkey, link, port)
        yield site
        await asyncio.gather(*(worker.kill() for worker in site.workers.values()))
    await valkey.kill()


def request_for_shared(harness: Harness, tail: int = 100) -> Request:
    return harness.request([*SHARED, tail, tail + 1], max_tokens=6)


async def serve(harness: Harness, *requests: Request) -> list[int]:
    """All at once; gives their hit tokens."""
    streams = [harness.cluster.submit(request) for request in requests]
    for request, stream in zip(requests, streams, strict=True):
        assert await collect(stream) == undisturbed(request)
    return [request.sequences[0].num_cached_tokens for request in requests]


async def first_life(site: Site, *others: str, **config: Any) -> None:
    """The shared prefix is on "last", the others have some of their own, the store knows all."""
    site.start_worker("last", linked=True)
    async with site.cluster(**config) as harness:
        await harness.ready()
        await serve(harness, request_for_shared(harness))
        for name in others:
            site.start_worker(name)
        await harness.ready(1 + len(others))
        while not all(engine.core.live_entries() for engine in harness.cluster.fleet):
            prompts = [[200 + 40 * i + j for j in range(30)] for i in range(2 * (1 + len(others)))]
            await serve(harness, *(harness.request(prompt, max_tokens=2) for prompt in prompts))
        await until_written(site, harness)


async def until_written(site: Site, harness: Harness) -> None:
    reader = open_prefix_store(site.valkey.url, deployment="default", timing=TIMING)
    scopes = {
        PrefixScope("default", FINGERPRINT, engine.shape.replica_epoch): engine
        for engine in harness.cluster.fleet
    }

    async def is_written() -> bool:
        known = await harness.store.known_scopes("default", [FINGERPRINT])
        return (
            known is not None
            and set(known) >= set(scopes)
            and all(
                [await reader.load(s) == engine.core.live_entries() for s, engine in scopes.items()]
            )
        )

    await reader.start()
    try:
        await conditions.until(is_written)
    finally:
        await reader.close()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if r.name == "control_plane.placement_gate"]


def attached(harness: Harness) -> set[str]:
    """Workers whose blocks the cluster knows."""
    return {
        engine.facts.worker_id
        for engine in harness.cluster.fleet
        if engine.facts is not None and not engine.core.is_recovering
    }


async def test_requests_wait_for_the_replica_that_has_their_prefix_and_comes_last(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="control_plane.placement_gate")
    await first_life(site, "w0", "w1")
    await site.link.cut(refuse_new=True)
    caplog.clear()
    async with site.cluster() as harness:
        requests = [request_for_shared(harness, tail) for tail in (100, 102)]
        streams = [harness.cluster.submit(request) for request in requests]
        await until(lambda: attached(harness) == {"w0", "w1"})
        assert harness.cluster.stats().num_requests_unplaced == 2
        assert harness.cluster.num_ready("fake") == 0
        site.link.mend()
        for request, stream in zip(requests, streams, strict=True):
            assert await collect(stream) == undisturbed(request)
            assert request.sequences[0].num_cached_tokens == len(SHARED)
        await harness.ready(3)
        harness.assert_nothing_held()
    [line] = lines(caplog)
    assert line.startswith("requests waited for replicas: model=fake seconds=")
    assert line.endswith("back=3 missing=0")


async def test_a_replica_that_does_not_come_back_is_waited_for_once_and_not_for_long(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="control_plane.placement_gate")
    await first_life(site, "w0")
    await site.link.cut(refuse_new=True)
    caplog.clear()
    async with site.cluster(return_wait_s=0.3) as harness:
        assert await serve(harness, request_for_shared(harness)) == [0]
        assert lines(caplog)[0].endswith("back=1 missing=1")
        # What comes now does not make anybody wait.
        site.link.mend()
        await harness.ready(2)
        assert await serve(harness, request_for_shared(harness, 102)) == [len(SHARED)]
        site.workers["last"].break_stream()
        await serve(harness, request_for_shared(harness, 104))
    assert len(lines(caplog)) == 1


async def test_a_single_worker_waits_for_nobody(site: Site) -> None:
    await first_life(site)
    async with site.cluster() as harness:
        assert await serve(harness, request_for_shared(harness)) == [len(SHARED)]


async def test_a_cold_start_waits_for_nobody(site: Site) -> None:
    await first_life(site, "w0")
    await asyncio.gather(*(worker.kill() for worker in site.workers.values()))
    async with site.cluster() as harness:
        site.start_worker("w0")
        assert await serve(harness, request_for_shared(harness)) == [0]


@pytest.mark.parametrize("how", ["down", "frozen", "memory"])
async def test_without_a_store_that_answers_nobody_is_waited_for(site: Site, how: str) -> None:
    await first_life(site, "w0")
    await site.link.cut(refuse_new=True)
    if how == "down":
        await site.valkey.kill()
    elif how == "frozen":
        site.valkey.freeze()
    url = "memory://" if how == "memory" else None
    async with site.cluster(url=url, timing=IMPATIENT, adoption_wait_s=0.1) as harness:
        await serve(harness, request_for_shared(harness))
    if how == "frozen":
        site.valkey.thaw()


async def test_replicas_of_another_shard_are_not_waited_for(site: Site) -> None:
    await first_life(site, "w0", shard="other")
    await asyncio.gather(*(worker.kill() for worker in site.workers.values()))
    site.workers.clear()
    site.start_worker("w1")
    async with site.cluster() as harness:
        await serve(harness, request_for_shared(harness))
        await until_written(site, harness)
    async with site.cluster() as harness:
        assert await serve(harness, request_for_shared(harness)) == [len(SHARED)]


async def test_patience_that_ends_meanwhile_takes_the_replica_that_is_there(site: Site) -> None:
    await first_life(site, "w0")
    await site.link.cut(refuse_new=True)
    async with site.cluster() as harness:
        await until(lambda: attached(harness) == {"w0"})
        request = request_for_shared(harness)
        stream = harness.cluster.submit(request, timeout_s=0.2)
        assert await collect(stream) == undisturbed(request)
        assert harness.cluster.num_ready("fake") == 0


async def test_those_who_wait_are_a_queue_with_its_limits(site: Site) -> None:
    await first_life(site, "w0")
    await site.link.cut(refuse_new=True)
    async with site.cluster(max_queued_requests=1) as harness:
        await until(lambda: attached(harness) == {"w0"})
        first = request_for_shared(harness)
        stream = harness.cluster.submit(first)
        with pytest.raises(OverloadedError):
            harness.cluster.submit(request_for_shared(harness, 102))
        site.link.mend()
        assert await collect(stream) == undisturbed(first)


async def test_a_length_that_fits_a_replica_that_is_not_back_is_not_refused(site: Site) -> None:
    await first_life(site, "w0")
    await site.link.cut(refuse_new=True)
    async with site.cluster() as harness:
        await until(lambda: attached(harness) == {"w0"})
        model = harness.cluster.models["fake"]
        assert harness.cluster.longest_fit(model, 1) == model.max_model_len
