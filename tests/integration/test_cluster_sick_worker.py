"""Every step fails on one worker, beside a healthy one: no request pays for it with its life."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from cluster_harness import collect, long_prompt, running_cluster, undisturbed
from fake_model import FakeModelRunner

from control_plane.errors import ReplayLimitError

if TYPE_CHECKING:
    from data_plane.step_work import StepWork

ROUNDS, CONCURRENCY = 4, 8


class SickRunner(FakeModelRunner):
    """Attaches, heartbeats, and fails every step."""

    def launch(self, work: StepWork):  # type: ignore[no-untyped-def]
        self.fail_launch.add(work.version)
        return super().launch(work)


async def test_a_sick_worker_does_not_use_up_the_retries_of_what_it_is_given() -> None:
    sick = SickRunner()
    async with (
        running_cluster() as harness,
        harness.worker("a-sick", runner=sick),
        harness.worker("healthy"),
    ):
        for _ in range(ROUNDS):
            # Idle, it looks like the better choice each time.
            await harness.ready(2)
            requests = [harness.request(long_prompt(i), max_tokens=8) for i in range(CONCURRENCY)]
            streams = [harness.cluster.submit(request) for request in requests]
            outputs = await asyncio.gather(*map(collect, streams))
            assert outputs == [undisturbed(request) for request in requests]
            assert max(request.num_losses for request in requests) <= 1
        assert sick.num_resets > 0
        harness.assert_nothing_held()


async def test_where_there_is_no_other_worker_a_request_goes_back_until_its_limit() -> None:
    async with running_cluster() as harness, harness.worker(runner=SickRunner()):
        await harness.ready()
        request = harness.request(long_prompt(0))
        with pytest.raises(ReplayLimitError):
            await collect(harness.cluster.submit(request))
        assert request.num_losses == 3
