"""Outputs whose length the client left open, on replicas of different lengths."""

from __future__ import annotations

import pytest
from cluster_harness import collect, running_cluster, undisturbed, until
from fake_model import FakeModelRunner, expected_output

from control_plane.errors import RequestTooLongError
from control_plane.request import FinishReason

LONGEST = 41


def short_runner() -> FakeModelRunner:
    return FakeModelRunner(num_blocks=11)  # 10 usable blocks of 4: 40 computed tokens


def endless_prompt() -> list[int]:
    """A prompt whose output does not end before the model does."""
    for variant in range(10_000):
        prompt = [30 + variant % 100, 31, 32 + variant // 100]
        token_ids, _ = expected_output(prompt, max_total_tokens=128)
        if len(token_ids) == 125:
            return prompt
    raise AssertionError("no such prompt")


async def test_an_output_left_open_is_cut_to_the_replica_that_came_after_it() -> None:
    async with running_cluster() as harness:
        request = harness.request(endless_prompt(), max_total_tokens=128, is_open_ended=True)
        stream = harness.cluster.submit(request)
        async with harness.worker(runner=short_runner()):
            output = await collect(stream)
        assert output.reason is FinishReason.LENGTH
        assert output.token_ids == undisturbed(request).token_ids
        assert len(output.token_ids) == LONGEST - 3
        harness.assert_nothing_held()


async def test_an_output_left_open_goes_on_where_a_longer_replica_has_room() -> None:
    async with running_cluster() as harness:
        runner = short_runner()
        first = harness.worker("short", runner=runner)
        first.start()
        await harness.ready()
        request = harness.request(endless_prompt(), max_total_tokens=128, is_open_ended=True)
        stream = harness.cluster.submit(request)
        await until(lambda: len(request.sequences[0].output_token_ids) > 3)
        assert request.max_total_tokens == LONGEST
        runner.gate.clear()
        async with harness.worker("long"):
            await harness.ready(2)
            await first.kill()
            output = await collect(stream)
        assert len(output.token_ids) == 125
        assert output == undisturbed(request)
        harness.assert_nothing_held()


async def test_a_limit_that_the_client_set_is_not_lowered() -> None:
    async with running_cluster(replica_wait_s=0.2) as harness:
        request = harness.request(endless_prompt(), max_tokens=100)
        stream = harness.cluster.submit(request)
        async with harness.worker(runner=short_runner()):
            with pytest.raises(Exception, match="No replica of model fake that fits"):
                await collect(stream)
        assert request.max_total_tokens == 103


async def test_an_open_output_is_refused_only_where_its_prompt_does_not_fit() -> None:
    async with running_cluster() as harness, harness.worker(runner=short_runner()):
        await harness.ready()
        with pytest.raises(RequestTooLongError, match="longest that fits is 41"):
            harness.cluster.submit(
                harness.request([10] * 41, max_total_tokens=128, is_open_ended=True)
            )
        request = harness.request([10] * 40, max_total_tokens=128, is_open_ended=True)
        output = await collect(harness.cluster.submit(request))
        assert len(output.token_ids) == 1
        harness.assert_nothing_held()


@pytest.mark.parametrize("is_open_ended", [True, False])
async def test_a_resume_waits_for_a_replica_as_long_as_the_one_it_had(
    *, is_open_ended: bool
) -> None:
    async with running_cluster() as harness, harness.worker("short", runner=short_runner()):
        await harness.ready()
        prompt = endless_prompt()
        known = expected_output(prompt, max_total_tokens=128)[0][:60]
        request = harness.request(
            prompt, max_total_tokens=128, is_open_ended=is_open_ended, resume={0: known}
        )
        stream = harness.cluster.submit(request)
        assert harness.cluster.stats().num_requests_unplaced == 1
        async with harness.worker("long"):
            output = await collect(stream)
        assert known + output.token_ids == undisturbed(request).token_ids
        harness.assert_nothing_held()


async def test_the_wait_for_a_row_is_reported_once_per_request() -> None:
    waits: list[float] = []
    async with running_cluster(on_started=waits.append) as harness:
        first = harness.worker("w0")
        first.start()
        await harness.ready()
        first.runner.gate.clear()
        requests = [harness.request([10 + i, 11, 12], max_tokens=8) for i in range(10)]
        streams = [harness.cluster.submit(request) for request in requests]
        await until(lambda: len(waits) == 8)
        await first.kill()
        async with harness.worker("w1"):
            for stream in streams:
                await collect(stream)
        assert len(waits) == 10
        assert min(waits) >= 0
        assert max(waits) < 60
