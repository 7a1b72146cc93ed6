"""A queue that would take too long is refused early, and only to whom it would take too long."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from cluster_harness import Harness, collect, long_prompt, running_cluster, undisturbed, until

from control_plane.errors import DeadlineError, OverloadedError

if TYPE_CHECKING:
    from control_plane.request import Request
    from control_plane.token_stream import TokenStream


def full(harness: Harness) -> tuple[list[Request], list[TokenStream]]:
    """Eight requests for its rows, and two that wait."""
    requests = [harness.request(long_prompt(i), max_tokens=24, tenant="a") for i in range(10)]
    return requests, [harness.cluster.submit(request) for request in requests]


async def test_a_queue_that_does_not_move_takes_nobody_new() -> None:
    async with running_cluster(max_queue_wait_s=0.3) as harness, harness.worker() as worker:
        await harness.ready()
        worker.runner.gate.clear()
        requests, streams = full(harness)

        def is_refused() -> OverloadedError | None:
            late = harness.request([10, 11], tenant="a")
            try:
                harness.cluster.submit(late)
            except OverloadedError as error:
                return error
            harness.cluster.abort(late)
            return None

        await until(is_refused)
        refusal = is_refused()
        assert refusal is not None
        assert refusal.retry_after_s is not None
        assert refusal.retry_after_s >= 1
        assert refusal.metadata["unit"] == "seconds"
        # Whoever is patient, or goes first, is not refused.
        patient = harness.request([10, 11], tenant="a")
        first = harness.request([10, 12], tenant="a", priority=1)
        streams += [harness.cluster.submit(patient, is_patient=True), harness.cluster.submit(first)]
        worker.runner.gate.set()
        outputs = await asyncio.gather(*map(collect, streams))
        assert outputs == [undisturbed(request) for request in (*requests, patient, first)]
        # The queue is gone, and so is what was known of its speed.
        again = harness.request([10, 11], tenant="a")
        assert await collect(harness.cluster.submit(again)) == undisturbed(again)
        harness.assert_nothing_held()


async def test_a_request_that_would_miss_its_deadline_in_the_queue_is_refused_at_once() -> None:
    async with running_cluster(max_queue_wait_s=1000.0) as harness, harness.worker() as worker:
        await harness.ready()
        worker.runner.gate.clear()
        _, streams = full(harness)

        def is_refused() -> bool:
            hasty = harness.request([10, 11], tenant="a")
            try:
                harness.cluster.submit(hasty, timeout_s=0.3, is_patient=True)
            except OverloadedError:
                return True
            harness.cluster.abort(hasty)
            return False

        await until(is_refused)
        leisurely = harness.request([10, 11], tenant="a")
        streams.append(harness.cluster.submit(leisurely, timeout_s=1000.0))
        worker.runner.gate.set()
        await asyncio.gather(*map(collect, streams))
        harness.assert_nothing_held()


async def test_a_deadline_that_has_passed_is_not_called_a_queue_that_is_too_long() -> None:
    async with running_cluster() as harness, harness.worker():
        await harness.ready()
        with pytest.raises(DeadlineError):
            harness.cluster.submit(harness.request([10, 11]), timeout_s=-0.001)
        harness.assert_nothing_held()


async def test_a_replica_without_a_queue_is_enough_to_be_taken() -> None:
    async with running_cluster(max_queue_wait_s=0.0) as harness, harness.worker("w0") as worker:
        await harness.ready()
        worker.runner.gate.clear()
        requests, streams = full(harness)
        (engine,) = harness.cluster.fleet
        await until(lambda: engine.expected_wait_s(requests[0]) > 0)
        with pytest.raises(OverloadedError):
            harness.cluster.submit(harness.request([10, 11]))
        async with harness.worker("w1"):
            await harness.ready(2)
            request = harness.request([10, 11])
            streams.append(harness.cluster.submit(request))
            worker.runner.gate.set()
            outputs = await asyncio.gather(*map(collect, streams))
        assert outputs == [undisturbed(r) for r in (*requests, request)]
