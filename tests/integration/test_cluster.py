"""Requests through a cluster and real streams to fake workers, with and without faults."""

from __future__ import annotations

import asyncio

import pytest
from cluster_harness import (
    FINGERPRINT,
    RawPeer,
    collect,
    fake_model,
    hello,
    long_prompt,
    running_cluster,
    undisturbed,
    until,
)
from fake_model import FakeModelRunner

from control_plane.errors import AbortedError, InvariantError
from control_plane.prefix_store import PrefixScope
from control_plane.request import FinishReason


@pytest.mark.parametrize("lookahead", [0, 2, 16])
async def test_sixteen_concurrent_requests_give_their_own_outputs(lookahead: int) -> None:
    async with running_cluster(lookahead=lookahead) as harness, harness.worker():
        await harness.ready()
        requests = [harness.request([10 + i, 11, 12 + i % 3, 13], max_tokens=20) for i in range(16)]
        outputs = await asyncio.gather(*(collect(harness.cluster.submit(r)) for r in requests))
        assert outputs == [undisturbed(r) for r in requests]
        harness.assert_nothing_held()
        replica = harness.replica()
        assert replica.generation_tokens == sum(len(o.token_ids) for o in outputs)
        assert replica.prompt_tokens_sent == sum(r.num_prompt_tokens for r in requests)
        assert replica.confirmed_version == replica.sent_version


@pytest.mark.parametrize("lookahead", [2, 16])
async def test_blocks_change_hands_behind_a_deep_window(lookahead: int) -> None:
    async with (
        running_cluster(lookahead=lookahead) as harness,
        # Room for two of eight rows: whoever grows takes blocks that others are giving up, while
        # many steps that still have them are on their way.
        harness.worker(runner=FakeModelRunner(num_blocks=18)),
    ):
        await harness.ready()
        requests = [harness.request(long_prompt(i), max_tokens=24) for i in range(16)]
        streams = [harness.cluster.submit(request) for request in requests]
        for gone in requests[::5]:
            await until(lambda: gone.sequences[0].output_token_ids or gone.is_finished)  # noqa: B023
            harness.cluster.abort(gone)
        for request, stream in zip(requests, streams, strict=True):
            if request in requests[::5]:
                with pytest.raises(AbortedError):
                    await collect(stream)
            else:
                assert await collect(stream) == undisturbed(request)
        assert harness.replica().num_preemptions > 0
        assert harness.replica().wasted_rows > 0
        harness.assert_nothing_held()


async def test_killing_one_of_two_workers_changes_no_output() -> None:
    async with running_cluster() as harness, harness.worker("w0"):
        doomed = harness.worker("w1")
        doomed.start()
        await harness.ready(2)
        requests = [harness.request(long_prompt(i), max_tokens=24) for i in range(12)]
        doomed.runner.gate.clear()
        streams = [harness.cluster.submit(r) for r in requests]
        await until(lambda: harness.replica("w1").num_requests_running)
        await doomed.kill()
        outputs = await asyncio.gather(*map(collect, streams))
        assert outputs == [undisturbed(r) for r in requests]
        assert harness.cluster.stats().num_replicas_lost == 1
        assert harness.cluster.stats().num_replays > 0
        harness.assert_nothing_held()


async def test_a_request_survives_the_only_worker() -> None:
    async with running_cluster() as harness:
        first = harness.worker("w0")
        first.start()
        await harness.ready()
        request = harness.request(long_prompt(0), max_tokens=24)
        stream = harness.cluster.submit(request)
        await until(lambda: len(request.sequences[0].output_token_ids) > 3)
        await first.kill()
        await until(lambda: harness.cluster.num_ready("fake") == 0)
        async with harness.worker("w1"):
            assert await collect(stream) == undisturbed(request)
        assert request.sequences[0].num_replays <= 1
        harness.assert_nothing_held()


async def test_a_returning_worker_finds_its_blocks_again() -> None:
    async with running_cluster() as harness:
        runner = FakeModelRunner()
        epoch = bytes(16)
        prompt = list(range(20, 60))
        async with harness.worker(runner=runner, epoch=epoch):
            await harness.ready()
            await collect(harness.cluster.submit(harness.request(prompt)))
        await until(lambda: harness.cluster.num_ready("fake") == 0)
        async with harness.worker(runner=runner, epoch=epoch):
            await harness.ready()
            request = harness.request(prompt)
            assert await collect(harness.cluster.submit(request)) == undisturbed(request)
            assert request.sequences[0].num_cached_tokens == 36
        harness.assert_nothing_held()


async def test_a_worker_of_a_new_epoch_starts_with_an_empty_pool() -> None:
    async with running_cluster() as harness:
        prompt = list(range(20, 60))
        for _ in range(2):
            async with harness.worker():
                await harness.ready()
                request = harness.request(prompt)
                assert await collect(harness.cluster.submit(request)) == undisturbed(request)
                assert request.sequences[0].num_cached_tokens == 0
            await until(lambda: harness.cluster.num_ready("fake") == 0)
        harness.assert_nothing_held()


async def test_the_router_prefers_the_replica_that_has_the_prefix() -> None:
    async with running_cluster() as harness, harness.worker("w0"), harness.worker("w1"):
        await harness.ready(2)
        prompt = list(range(20, 80))
        await collect(harness.cluster.submit(harness.request(prompt)))
        holder = next(r for r in harness.cluster.stats().replicas if r.cached_blocks)
        for _ in range(3):
            request = harness.request(prompt)
            await collect(harness.cluster.submit(request))
            assert request.sequences[0].num_cached_tokens == 56
        busy = [r for r in harness.cluster.stats().replicas if r.generation_tokens]
        assert [r.replica_id for r in busy] == [holder.replica_id]


async def test_what_is_cached_does_not_count_as_work_that_queues() -> None:
    async with running_cluster() as harness, harness.worker("w0"), harness.worker("w1"):
        await harness.ready(2)
        prompt = list(range(20, 80))
        await collect(harness.cluster.submit(harness.request(prompt)))
        # At once: none of them has any output when the last one is placed.
        requests = [harness.request(prompt) for _ in range(6)]
        streams = [harness.cluster.submit(request) for request in requests]
        for stream in streams:
            await collect(stream)
        assert [r.sequences[0].num_cached_tokens for r in requests] == [56] * 6


async def test_a_cancelled_request_frees_its_blocks() -> None:
    async with running_cluster() as harness, harness.worker() as worker:
        await harness.ready()
        worker.runner.gate.clear()
        requests = [harness.request(long_prompt(i), max_tokens=24) for i in range(10)]
        streams = [harness.cluster.submit(r) for r in requests]
        await until(lambda: harness.replica().num_requests_running == 8)
        for request in requests:
            harness.cluster.abort(request)
            harness.cluster.abort(request)
        # Free for the next plan, not only once the steps in flight have come back.
        harness.assert_nothing_held()
        worker.runner.gate.set()
        for stream in streams:
            with pytest.raises(AbortedError):
                await collect(stream)
        again = harness.request(long_prompt(0), max_tokens=24)
        assert await collect(harness.cluster.submit(again)) == undisturbed(again)
        harness.assert_nothing_held()


async def test_a_stop_string_ends_a_sequence_and_drops_what_came_after() -> None:
    async with running_cluster() as harness, harness.worker():
        await harness.ready()
        request = harness.request(long_prompt(0), max_tokens=24)
        stream = harness.cluster.submit(request)
        sequence = request.sequences[0]
        await until(lambda: len(sequence.output_token_ids) >= 5)
        harness.cluster.finish(sequence, 3, FinishReason.STOP)
        output = await collect(stream)
        assert output.reason is FinishReason.STOP
        assert sequence.output_token_ids == undisturbed(request).token_ids[:3]
        harness.assert_nothing_held()


async def test_a_request_that_breaks_every_worker_fails_and_takes_nobody_along() -> None:
    async with running_cluster() as harness, harness.worker() as worker:
        await harness.ready()
        poison = 77
        launch = worker.runner.launch

        def fail_on_poison(work):  # type: ignore[no-untyped-def]
            if any(poison in row.token_ids for row in work.added):
                worker.runner.fail_launch.add(work.version)
            return launch(work)

        worker.runner.launch = fail_on_poison
        requests = [harness.request(long_prompt(i), max_tokens=24) for i in range(5)]
        bad = harness.request([poison, 5, 6])
        streams = [harness.cluster.submit(r) for r in requests]
        bad_stream = harness.cluster.submit(bad)
        with pytest.raises(Exception, match="lost workers or failed steps") as failure:
            await collect(bad_stream)
        assert failure.value.reason == "REPLAY_LIMIT"
        outputs = await asyncio.gather(*map(collect, streams))
        assert outputs == [undisturbed(r) for r in requests]
        harness.assert_nothing_held()


async def test_a_resume_that_is_complete_ends_at_once() -> None:
    async with running_cluster() as harness:
        request = harness.request([10, 11], max_tokens=3, resume={0: [5, 6, 7]})
        output = await collect(harness.cluster.submit(request))
        assert (output.token_ids, output.reason) == ([], FinishReason.LENGTH)
        harness.assert_nothing_held()


async def test_confirmed_blocks_reach_the_prefix_store() -> None:
    async with running_cluster() as harness, harness.worker():
        await harness.ready()
        await collect(harness.cluster.submit(harness.request(list(range(20, 60)))))
        replica = harness.replica()
        scope = PrefixScope("default", FINGERPRINT, bytes.fromhex(replica.replica_epoch))
        entries = await harness.store.load(scope)
        (engine,) = harness.cluster.fleet
        assert entries == engine.core.live_entries()
        assert len(entries) == replica.cached_blocks > 9


async def test_a_leaking_pool_ends_the_process() -> None:
    async with running_cluster() as harness, harness.worker():
        await harness.ready()
        (engine,) = harness.cluster.fleet
        failed = asyncio.create_task(harness.cluster.failed())
        pool = engine.core.scheduler.kv_cache_manager.pool
        leaked = pool.allocate(1, 1)
        stream = harness.cluster.submit(harness.request([10, 11]))
        with pytest.raises(InvariantError):
            await failed
        pool.release(leaked)
        del stream
        harness.failure_is_expected = True


async def test_a_worker_that_does_not_read_loses_its_stream() -> None:
    model = fake_model(max_model_len=8_000_000)
    config = {"step_timeout_s": 0.3, "lease_s": 60.0, "max_queued_tokens": 10_000_000}
    async with running_cluster(model=model, **config) as harness:
        async with RawPeer(harness.address) as peer:
            # Not even the Welcome is read; the prompt alone overfills the transport.
            await peer.say(
                hello(
                    max_model_len=8_000_000,
                    max_num_batched_tokens=8_000_000,
                    geometry={"block_size": 65536},
                    num_blocks=256,
                )
            )
            await harness.ready()
            request = harness.request([10], max_tokens=2)
            big = harness.request([10] * 6_000_000, max_tokens=2)
            for each in (request, big):
                harness.cluster.submit(each)
            await until(lambda: harness.cluster.num_ready("fake") == 0)
            assert harness.cluster.stats().num_requests_unplaced == 2
            harness.cluster.abort(request)
            harness.cluster.abort(big)
        harness.assert_nothing_held()
