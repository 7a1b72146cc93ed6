"""Workers that leave in order, at any moment, and workers that come and go under load."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from cluster_harness import collect, long_prompt, running_cluster, undisturbed, until
from fake_model import FakeModelRunner, expected_output
from fake_worker import FakeWorker
from scripted_control_plane import PROMPT, ScriptedControlPlane, plan, read_column, start_row

from data_plane.control_stream import EXIT_OK

if TYPE_CHECKING:
    from cluster_harness import Harness


async def test_a_worker_that_leaves_before_its_welcome_says_so() -> None:
    async with ScriptedControlPlane() as control, FakeWorker(control.address) as worker:
        stream = await control.accept()
        assert (await stream.receive()).HasField("hello")
        worker.drain()
        assert (await stream.receive()).HasField("drain")
        assert await worker.exited() == EXIT_OK


async def test_draining_worker_serves_until_its_rows_are_finished() -> None:
    async with ScriptedControlPlane() as control, FakeWorker(control.address) as worker:
        stream = await control.accept()
        await stream.attach(1)
        tokens = await start_row(stream, 2)
        worker.drain()
        drain = (await stream.receive()).drain
        assert drain.grace.ToSeconds() == 10
        version = 3
        while True:
            await stream.send(plan(version))
            result = (await stream.receive()).step_result
            tokens += read_column(result.token_ids)
            version += 1
            if result.finished_rows:
                break
        await stream.receive_end()
        stream.end()
        assert await worker.exited() == EXIT_OK
        assert tokens == expected_output(PROMPT, max_total_tokens=24, eos_token_ids=())[0]


async def test_draining_worker_leaves_when_the_grace_period_ends() -> None:
    async with (
        ScriptedControlPlane() as control,
        FakeWorker(control.address, grace_s=0.1) as worker,
    ):
        stream = await control.accept()
        await stream.attach(1)
        await start_row(stream, 2)
        worker.drain()
        await stream.receive_end()
        assert await worker.exited() == EXIT_OK


async def test_draining_worker_leaves_when_the_control_plane_ends_its_stream() -> None:
    async with ScriptedControlPlane() as control, FakeWorker(control.address) as worker:
        stream = await control.accept()
        await stream.attach(1)
        await start_row(stream, 2)
        worker.drain()
        assert (await stream.receive()).HasField("drain")
        stream.end()
        assert await worker.exited() == EXIT_OK


async def test_worker_that_is_not_attached_drains_at_once() -> None:
    async with ScriptedControlPlane() as control:
        address = control.address
    async with FakeWorker(address) as worker:
        worker.drain()
        assert await worker.exited() == EXIT_OK


async def test_plans_behind_the_welcome_of_a_worker_that_leaves_are_given_back_unmarked() -> None:
    async with running_cluster() as harness:
        requests = [harness.request(long_prompt(i), max_tokens=24) for i in range(8)]
        streams = [harness.cluster.submit(request) for request in requests]
        leaving = harness.worker("leaving")
        leaving.start()
        # It has said Hello, and what was waiting is on its way to it.
        await until(lambda: list(harness.cluster.fleet))
        leaving.drain()
        assert await leaving.exited() == EXIT_OK
        async with harness.worker("good"):
            outputs = await asyncio.gather(*map(collect, streams))
            assert harness.cluster.stats().num_replicas_lost == 0
        assert outputs == [undisturbed(request) for request in requests]
        assert [request.num_losses for request in requests] == [0] * 8
        harness.assert_nothing_held()


class Load:
    """Requests that never stop coming, each compared with what it should have given."""

    def __init__(self, harness: Harness, *, concurrency: int) -> None:
        self._harness = harness
        self._is_over = asyncio.Event()
        self.num_done = 0
        self.num_losses = 0
        self._tasks = [asyncio.create_task(self._client(i)) for i in range(concurrency)]

    async def _client(self, index: int) -> None:
        while not self._is_over.is_set():
            request = self._harness.request(long_prompt(index), max_tokens=24)
            output = await collect(self._harness.cluster.submit(request))
            assert output == undisturbed(request)
            self.num_losses += request.num_losses
            self.num_done += 1

    async def end(self) -> None:
        self._is_over.set()
        await asyncio.gather(*self._tasks)

    async def goes_on(self, count: int) -> None:
        """Wait until so many more have ended; what fails ends the test."""
        target = self.num_done + count

        def has_come() -> bool:
            for task in self._tasks:
                if task.done():
                    task.result()
            return self.num_done >= target

        await until(has_come)


async def test_workers_added_and_removed_under_load_fail_no_request() -> None:
    rng = random.Random(4)
    async with running_cluster() as harness:
        workers: list[FakeWorker] = []
        load = Load(harness, concurrency=16)
        try:
            for number in range(24):
                if len(workers) > 1 and (len(workers) > 3 or rng.random() < 0.5):
                    leaving = workers.pop(rng.randrange(len(workers)))
                    leaving.drain()
                    assert await leaving.exited() == EXIT_OK
                else:
                    # Room for all that run: preemptions only make it slower.
                    worker = harness.worker(f"w{number}", runner=FakeModelRunner(num_blocks=128))
                    worker.start()
                    workers.append(worker)
                await load.goes_on(rng.randrange(1, 12))
            await load.end()
            assert load.num_losses == 0
            assert harness.cluster.stats().num_replicas_lost == 0
            harness.assert_nothing_held()
        finally:
            for worker in workers:
                await worker.kill()
