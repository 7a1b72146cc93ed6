"""The control plane itself does not run for a while: stopped, paused, asleep, or busy."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cluster_harness import (
    FINGERPRINT,
    Harness,
    RawPeer,
    collect,
    long_prompt,
    running_cluster,
    undisturbed,
    until,
)
from fake_model import FakeModelRunner
from fake_worker import FakeWorker
from scripted_control_plane import ScriptedControlPlane, heartbeat, plan

from control_plane.run_clock import RunClock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from data_plane.step_work import StepWork

TESTS = Path(__file__).parents[1]


class Leaping:
    """A monotonic clock that a test puts forward: to this process it looks like having stood."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


def stalled_since(harness: Harness, num_stalls: int) -> bool:
    return harness.cluster.stats().num_stalls > num_stalls


@asynccontextmanager
async def leaping_cluster(leap: Leaping, **config: Any) -> AsyncIterator[Harness]:
    clock = RunClock(tolerance_s=0.5, monotonic=leap)
    async with running_cluster(clock=clock, **config) as harness:
        yield harness


async def test_a_stall_longer_than_lease_and_step_timeout_loses_nobody() -> None:
    leap = Leaping()
    config = {"lease_s": 30.0, "step_timeout_s": 40.0}
    async with leaping_cluster(leap, **config) as harness, harness.worker() as worker:
        await harness.ready()
        worker.runner.gate.clear()
        request = harness.request(long_prompt(0), max_tokens=24)
        stream = harness.cluster.submit(request)
        await until(lambda: harness.replica().num_requests_running)
        (engine,) = harness.cluster.fleet
        for _ in range(3):
            num_stalls = harness.cluster.stats().num_stalls
            leap.ahead_s += 100.0
            # The first to look at the clock is whoever decides about the lease.
            engine._wake.set()
            await until(partial(stalled_since, harness, num_stalls))
        worker.runner.gate.set()
        assert await collect(stream) == undisturbed(request)
        assert harness.cluster.stats().num_replicas_lost == 0
        assert request.num_losses == 0
        harness.assert_nothing_held()


async def test_a_silent_worker_is_lost_however_often_the_control_plane_stalls() -> None:
    leap = Leaping()
    async with leaping_cluster(leap, lease_s=1.0) as harness, RawPeer(harness.address) as peer:
        await peer.attach()
        await harness.ready()
        leap.ahead_s += 100.0
        assert (await peer.end())[1] == "LEASE_EXPIRED"


async def test_after_a_stall_workers_hear_a_heartbeat_at_once() -> None:
    leap = Leaping()
    async with leaping_cluster(leap, lease_s=3000.0) as harness, RawPeer(harness.address) as peer:
        await peer.attach()
        await harness.ready()
        (engine,) = harness.cluster.fleet
        # Well within what is left of its third of the lease: the worker heard nothing meanwhile.
        leap.ahead_s += 900.0
        engine._wake.set()
        assert (await peer.hear()).HasField("heartbeat")


@pytest.mark.parametrize("same_process", [True, False])
async def test_a_stream_that_ends_behind_a_stall_of_ours_is_no_loss(*, same_process: bool) -> None:
    leap = Leaping()
    async with leaping_cluster(leap) as harness:
        first = harness.worker("w0", epoch=bytes(16))
        first.start()
        await harness.ready()
        first.runner.gate.clear()
        requests = [harness.request(long_prompt(i), max_tokens=24) for i in range(4)]
        streams = [harness.cluster.submit(request) for request in requests]
        await until(lambda: harness.replica().num_requests_running == 4)
        leap.ahead_s += 20.0
        if same_process:
            # It dials again before the end of its old stream is seen.
            async with harness.worker("w0", epoch=bytes(16)):
                outputs = await asyncio.gather(*map(collect, streams))
            await first.kill()
        else:
            await first.kill()
            await until(lambda: harness.cluster.num_ready("fake") == 0)
            async with harness.worker("w1"):
                outputs = await asyncio.gather(*map(collect, streams))
        assert outputs == [undisturbed(request) for request in requests]
        assert [request.num_losses for request in requests] == [0] * 4
        assert harness.cluster.stats().num_replicas_lost == 0
        harness.assert_nothing_held()


class SlowRunner(FakeModelRunner):
    """Takes a few milliseconds per step, so that a stop finds requests under way."""

    def launch(self, work: StepWork):  # type: ignore[no-untyped-def]
        time.sleep(0.02)
        return super().launch(work)


async def test_a_stopped_control_plane_marks_no_request_at_its_wake_up() -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        str(TESTS / "stalled_cluster.py"),
        "1.0",
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(TESTS), str(TESTS.parent)))},
    )
    assert child.stdout is not None

    async def say() -> dict[str, Any]:
        async with asyncio.timeout(60):
            return json.loads(await child.stdout.readline())  # type: ignore[union-attr]

    try:
        address = (await say())["address"]
        worker = FakeWorker(address, runner=SlowRunner(), model_fingerprint=FINGERPRINT)
        async with worker:
            assert (await say())["running"]
            child.send_signal(signal.SIGSTOP)
            # The worker has given it up and dials again, in vain.
            await until(lambda: not worker.is_serving)
            await asyncio.sleep(1.5)
            child.send_signal(signal.SIGCONT)
            report = await say()
        assert report["right"]
        assert set(report["num_losses"]) == {0}
        assert report["num_replicas_lost"] == 0
        assert report["stalled_s"] > 1.0
        assert await child.wait() == 0
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def test_a_worker_that_did_not_run_reads_what_was_said_before_it_leaves() -> None:
    async with ScriptedControlPlane() as control, FakeWorker(control.address):
        stream = await control.accept()
        await stream.attach(1, lease_s=0.6)
        assert (await stream.receive(heartbeats=True)).HasField("heartbeat")
        # Nobody in this process runs, so that silence and heartbeat are both due afterwards.
        time.sleep(1.2)  # noqa: ASYNC251
        for _ in range(10):
            await asyncio.sleep(0)
        await stream.send(heartbeat(), plan(2))
        assert (await stream.receive()).step_result.version == 2
