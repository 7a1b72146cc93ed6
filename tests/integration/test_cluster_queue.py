"""Requests that wait for a replica: for how long, for which, and how many of them."""

from __future__ import annotations

import asyncio

import pytest
from cluster_harness import collect, long_prompt, running_cluster, undisturbed
from fake_model import FakeModelRunner

from control_plane.errors import OverloadedError, RequestTooLongError, UnavailableError


async def test_without_a_replica_a_request_is_unavailable_in_time() -> None:
    async with running_cluster(replica_wait_s=0.05) as harness:
        stream = harness.cluster.submit(harness.request([10, 11]))
        assert harness.cluster.stats().num_requests_unplaced == 1
        with pytest.raises(UnavailableError) as failure:
            await collect(stream)
        assert failure.value.retry_after_s is not None
        harness.assert_nothing_held()


async def test_a_deadline_bounds_the_wait_for_a_replica() -> None:
    async with running_cluster(replica_wait_s=3600.0) as harness:
        patient = harness.cluster.submit(harness.request([10, 11]))
        hasty = harness.cluster.submit(harness.request([10, 11]), timeout_s=0.05)
        with pytest.raises(UnavailableError):
            await collect(hasty)
        assert harness.cluster.stats().num_requests_unplaced == 1
        async with harness.worker():
            await collect(patient)
        harness.assert_nothing_held()


async def test_what_fits_no_replica_is_refused_with_the_longest_that_does() -> None:
    async with running_cluster() as harness:
        small = FakeModelRunner(num_blocks=11)  # 10 usable blocks of 4: 40 computed tokens
        async with harness.worker(runner=small):
            await harness.ready()
            with pytest.raises(RequestTooLongError, match="longest that fits is 41"):
                harness.cluster.submit(harness.request([10] * 20, max_tokens=22))
            request = harness.request(long_prompt(0, output=30), max_tokens=30)
            assert await collect(harness.cluster.submit(request)) == undisturbed(request)
            with pytest.raises(RequestTooLongError):
                harness.cluster.submit(harness.request([10] * 128, max_tokens=1))
        harness.assert_nothing_held()


async def test_a_request_waits_for_a_replica_that_it_fits() -> None:
    async with running_cluster() as harness:
        request = harness.request(long_prompt(0, output=40), max_tokens=40)
        stream = harness.cluster.submit(request)
        async with harness.worker("small", runner=FakeModelRunner(num_blocks=5)):
            await harness.ready()
            assert harness.cluster.stats().num_requests_unplaced == 1
            async with harness.worker("large"):
                assert await collect(stream) == undisturbed(request)
        harness.assert_nothing_held()


async def test_the_queue_is_bounded_by_requests() -> None:
    async with running_cluster(max_queued_requests=2) as harness:
        streams = [harness.cluster.submit(harness.request([10, 11 + i])) for i in range(2)]
        with pytest.raises(OverloadedError) as refusal:
            harness.cluster.submit(harness.request([10, 20]))
        assert refusal.value.retry_after_s is not None
        async with harness.worker():
            await asyncio.gather(*map(collect, streams))
            await collect(harness.cluster.submit(harness.request([10, 20])))
        harness.assert_nothing_held()


async def test_the_queue_is_bounded_by_tokens() -> None:
    async with running_cluster(max_queued_tokens=50) as harness:
        # Alone, even one above the bound is taken: it would never be otherwise.
        first = harness.cluster.submit(harness.request([10] * 60))
        with pytest.raises(OverloadedError):
            harness.cluster.submit(harness.request([10]))
        async with harness.worker():
            await collect(first)
            await collect(harness.cluster.submit(harness.request([10])))
        harness.assert_nothing_held()
