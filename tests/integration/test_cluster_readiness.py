"""Workers that are there and make no progress, little progress, or nothing but trouble."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from cluster_harness import (
    FINGERPRINT,
    RawPeer,
    collect,
    long_prompt,
    running_cluster,
    undisturbed,
    until,
)
from fake_model import FakeModelRunner
from google.rpc import status_pb2

from control_plane.run_clock import RunClock
from data_plane.step_work import StepError
from protos.pagewire.v1 import worker_pb2

if TYPE_CHECKING:
    from data_plane.step_work import StepWork


async def test_a_worker_whose_step_takes_long_is_not_ready_until_it_has_ended() -> None:
    async with running_cluster(readiness_s=0.2) as harness, harness.worker("slow") as slow:
        await harness.ready()
        slow.runner.gate.clear()
        request = harness.request(long_prompt(0), max_tokens=24)
        stream = harness.cluster.submit(request)
        await until(lambda: harness.cluster.num_ready("fake") == 0)
        assert not harness.replica("slow").ready
        # It heartbeats, so it keeps what it has. What is new goes to it only for want of others.
        alone = harness.request(long_prompt(1), max_tokens=24)
        streams = [stream, harness.cluster.submit(alone)]
        assert harness.cluster.stats().num_requests_unplaced == 0
        async with harness.worker("good"):
            await harness.ready(1)
            other = harness.request(long_prompt(2), max_tokens=24)
            assert await collect(harness.cluster.submit(other)) == undisturbed(other)
            assert harness.replica("good").generation_tokens == 24
        slow.runner.gate.set()
        outputs = await asyncio.gather(*map(collect, streams))
        assert outputs == [undisturbed(request), undisturbed(alone)]
        await harness.ready(1)
        assert request.num_losses == alone.num_losses == 0
        harness.assert_nothing_held()


async def test_an_idle_worker_is_ready_for_as_long_as_it_heartbeats() -> None:
    async with running_cluster(readiness_s=0.05, lease_s=0.5) as harness, harness.worker():
        await harness.ready()
        for _ in range(3):
            request = harness.request([10, 11], max_tokens=4)
            await collect(harness.cluster.submit(request))
            # Several times as long as any step may take.
            before = harness.cluster.clock()
            await until(lambda: harness.cluster.clock() > before + 0.3)  # noqa: B023
            await until(lambda: harness.cluster.num_ready("fake") == 1)


class OneByOne(FakeModelRunner):
    """Runs a step whenever it is allowed one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.allowed = threading.Semaphore(0)

    def launch(self, work: StepWork) -> Any:
        self.allowed.acquire()
        return super().launch(work)


async def test_a_worker_whose_steps_take_nearly_the_timeout_each_is_kept() -> None:
    # The clock moves only where the test moves it.
    now = [0.0]
    clock = RunClock(monotonic=lambda: now[0], suspended=lambda: 0.0)
    config = {"step_timeout_s": 10.0, "lease_s": 86400.0, "readiness_s": 5.0}
    runner = OneByOne()
    async with running_cluster(clock=clock, **config) as harness, harness.worker(runner=runner):
        clock.stop()
        await harness.ready()
        request = harness.request(long_prompt(0), max_tokens=24)
        stream = harness.cluster.submit(request)
        tokens = request.sequences[0].output_token_ids
        (engine,) = harness.cluster.fleet
        for count in range(1, 25):
            await until(lambda: engine.core.num_in_flight)
            now[0] += 9.9
            engine._wake.set()
            runner.allowed.release()
            await until(lambda: len(tokens) >= count)  # noqa: B023
        assert await collect(stream) == undisturbed(request)
        assert request.num_losses == 0
        # One that takes longer is one too many.
        other = harness.request(long_prompt(1), max_tokens=24)
        stream = harness.cluster.submit(other)
        await until(lambda: engine.core.num_in_flight)
        now[0] += 10.1
        engine._wake.set()
        await until(lambda: not engine.is_ready)
        assert other.num_losses == 1
        runner.allowed.release(1000)
        assert await collect(stream) == undisturbed(other)


async def refuse_every_plan(peer: RawPeer) -> None:
    """Answer each plan with a Nack until the stream is ended."""
    # Reading or writing: whichever finds that it has ended.
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while (message := await peer.call.read()) is not grpc.aio.EOF:
            if message.HasField("plan"):
                nack = worker_pb2.Nack(
                    version=message.plan.version, status=status_pb2.Status(message="never")
                )
                await peer.say(worker_pb2.WorkerMessage(nack=nack))


async def test_a_worker_that_refuses_every_plan_costs_a_request_one_replay() -> None:
    # No doubt ends by itself where time stands still.
    clock = RunClock(monotonic=lambda: 0.0, suspended=lambda: 0.0)
    async with running_cluster(clock=clock) as harness, harness.worker("good"):
        await harness.ready()
        for num_losses in range(4):
            async with RawPeer(harness.address) as peer:
                await peer.attach()
                await harness.ready(2)
                num_plans = harness.replica("raw").plans_sent
                refusing = asyncio.create_task(refuse_every_plan(peer))
                requests = [harness.request(long_prompt(i), max_tokens=24) for i in range(8)]
                streams = [harness.cluster.submit(request) for request in requests]
                outputs = await asyncio.gather(*map(collect, streams))
                assert outputs == [undisturbed(request) for request in requests]
                assert max(request.num_losses for request in requests) <= 1
                if num_losses < 2:
                    await refusing
                    assert harness.cluster.stats().num_replicas_lost == num_losses + 1
                else:
                    # Idle, it looks like the better choice. There is another, so it gets nothing.
                    assert harness.replica("raw").plans_sent == num_plans
                    refusing.cancel()
                    await asyncio.gather(refusing, return_exceptions=True)
            await harness.ready(1)
        harness.assert_nothing_held()


async def test_a_worker_in_doubt_still_works_where_there_is_no_other() -> None:
    async with running_cluster() as harness:
        runner = FakeModelRunner()
        launch = runner.launch
        num_failures = 0

        def fail_twice(work: StepWork) -> Any:
            nonlocal num_failures
            if num_failures < 2:
                num_failures += 1
                raise StepError("injected")
            return launch(work)

        runner.launch = fail_twice  # type: ignore[method-assign]
        async with harness.worker(runner=runner):
            await harness.ready()
            request = harness.request(long_prompt(0), max_tokens=24)
            assert await collect(harness.cluster.submit(request)) == undisturbed(request)
            (engine,) = harness.cluster.fleet
            assert engine.is_doubtful
            assert harness.cluster.num_ready("fake") == 1
            again = harness.request(long_prompt(1), max_tokens=24)
            assert await collect(harness.cluster.submit(again)) == undisturbed(again)
        harness.assert_nothing_held()


WORKER = """
import asyncio, sys, time
from fake_model import FakeModelRunner
from fake_worker import FakeWorker

class Slow(FakeModelRunner):
    def launch(self, work):
        time.sleep(0.05)
        return super().launch(work)

async def main(address, fingerprint):
    worker = FakeWorker(
        address, runner=Slow(), worker_id="hung", replica_id="replica-hung",
        model_fingerprint=bytes.fromhex(fingerprint),
    )
    async with worker:
        await worker.exited()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_stopped_worker_process_costs_its_requests_one_replay_and_comes_back() -> None:
    async with running_cluster(lease_s=1.0) as harness:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            WORKER,
            harness.address,
            FINGERPRINT.hex(),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        try:
            await harness.ready()
            requests = [harness.request(long_prompt(i), max_tokens=24) for i in range(4)]
            streams = [harness.cluster.submit(request) for request in requests]
            await until(lambda: requests[0].sequences[0].output_token_ids)
            process.send_signal(signal.SIGSTOP)
            async with harness.worker("good"):
                outputs = await asyncio.gather(*map(collect, streams))
                assert outputs == [undisturbed(request) for request in requests]
                assert [request.num_losses for request in requests] == [1] * 4
                await harness.ready(1)
                process.send_signal(signal.SIGCONT)
                await harness.ready(2)
            await harness.ready(1)
            again = harness.request(long_prompt(5), max_tokens=24)
            assert await collect(harness.cluster.submit(again)) == undisturbed(again)
            harness.assert_nothing_held()
        finally:
            process.kill()
            await process.wait()
