"""Workers and clusters that leave: what is live ends or moves, what is new is refused."""

from __future__ import annotations

import asyncio

import pytest
from cluster_harness import collect, long_prompt, running_cluster, undisturbed, until
from fake_model import FakeModelRunner

from control_plane.errors import ShuttingDownError


async def test_a_drained_worker_leaves_with_0_and_its_requests_are_finished() -> None:
    async with running_cluster() as harness:
        # Room for all: a preempted sequence would have no row, and nothing to stay for.
        leaving = harness.worker("w0", runner=FakeModelRunner(num_blocks=128))
        leaving.start()
        await harness.ready()
        leaving.runner.gate.clear()
        requests = [harness.request(long_prompt(i), max_tokens=24) for i in range(12)]
        streams = [harness.cluster.submit(r) for r in requests]
        await until(lambda: harness.replica("w0").num_requests_running == 8)
        async with harness.worker("w1"):
            await harness.ready(2)
            leaving.drain()
            await until(lambda: harness.cluster.num_ready("fake") == 1)
            # What has no row there yet moves at once; what runs stays.
            assert harness.replica("w0").num_requests_waiting == 0
            leaving.runner.gate.set()
            outputs = await asyncio.gather(*map(collect, streams))
            assert await leaving.exited() == 0
            assert outputs == [undisturbed(r) for r in requests]
            assert harness.replica("w1").generation_tokens == 4 * 24
        assert all(r.num_losses == 0 for r in requests)
        harness.assert_nothing_held()


async def test_what_a_drain_has_no_time_for_is_replayed_elsewhere() -> None:
    async with running_cluster() as harness, harness.worker("w1") as other:
        leaving = harness.worker("w0", grace_s=2.0)
        leaving.start()
        await harness.ready(2)
        leaving.runner.gate.clear()
        other.runner.gate.clear()
        requests = [harness.request(long_prompt(i), max_tokens=24) for i in range(4)]
        streams = [harness.cluster.submit(r) for r in requests]
        await until(lambda: harness.replica("w0").num_requests_running)
        leaving.drain()
        await until(lambda: not harness.replica("w0").workers)
        leaving.runner.gate.set()
        other.runner.gate.set()
        outputs = await asyncio.gather(*map(collect, streams))
        assert outputs == [undisturbed(r) for r in requests]
        assert all(r.num_losses == 0 for r in requests)
        assert await leaving.exited() == 0
        harness.assert_nothing_held()


async def test_a_drain_finishes_what_is_live_and_refuses_what_is_new() -> None:
    async with running_cluster() as harness, harness.worker() as worker:
        await harness.ready()
        worker.runner.gate.clear()
        request = harness.request(long_prompt(0), max_tokens=24)
        stream = harness.cluster.submit(request)
        harness.cluster.begin_drain()
        with pytest.raises(ShuttingDownError):
            harness.cluster.submit(harness.request([10]))
        worker.runner.gate.set()
        assert await harness.cluster.drained(10.0)
        assert await collect(stream) == undisturbed(request)


async def test_what_a_drain_has_no_time_for_fails_as_shutting_down() -> None:
    async with running_cluster() as harness, harness.worker() as worker:
        await harness.ready()
        worker.runner.gate.clear()
        stream = harness.cluster.submit(harness.request(long_prompt(0), max_tokens=24))
        harness.cluster.begin_drain()
        assert not await harness.cluster.drained(0.01)
        with pytest.raises(ShuttingDownError):
            await collect(stream)
        harness.assert_nothing_held()
        worker.runner.gate.set()
