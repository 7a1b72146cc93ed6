"""A cluster that takes over from one that had several workers, which come back in any order.

Real gRPC, a real Valkey, fake workers; the one that has the prefix is behind a link and comes last.
Where a test must not wait, the limit is an hour, and it would not end.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import pytest
from cluster_harness import collect, undisturbed, until
from comeback_site import (
    SHARED,
    Site,
    attached,
    first_life,
    opened_site,
    request_for_shared,
    serve,
    until_written,
)
from prefix_store_helpers import IMPATIENT

from control_plane.errors import OverloadedError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

pytestmark = pytest.mark.redis


@pytest.fixture
async def site(tmp_path: Path) -> AsyncGenerator[Site]:
    async with opened_site(tmp_path) as site:
        yield site


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if r.name == "control_plane.placement_gate"]


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
