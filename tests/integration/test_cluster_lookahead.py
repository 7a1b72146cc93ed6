"""How many steps are in flight over a link that is long, and what they leave when it breaks."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cluster_harness import Harness, collect, long_prompt, running_cluster, undisturbed, until
from fake_model import FakeModelRunner

from demo.link import Link

if TYPE_CHECKING:
    from data_plane.step_work import StepWork


class PacedRunner(FakeModelRunner):
    """A step takes two milliseconds, and says so."""

    def launch(self, work: StepWork) -> Any:
        started = time.perf_counter()
        time.sleep(0.002)
        pending = super().launch(work)
        if pending.output is not None:
            elapsed_s = time.perf_counter() - started
            pending.output = replace(pending.output, device_time_us=int(elapsed_s * 1e6))
        return pending


async def keep_busy(harness: Harness, index: int, ended: asyncio.Event) -> None:
    while not ended.is_set():
        request = harness.request(long_prompt(index, output=80), max_tokens=80)
        assert await collect(harness.cluster.submit(request)) == undisturbed(request)


async def test_the_window_grows_with_the_round_trip_and_a_cut_loses_no_token() -> None:
    async with (
        running_cluster() as harness,
        Link(int(harness.address.rpartition(":")[2])) as link,
    ):
        runner = PacedRunner(num_blocks=256)
        harness.address = f"127.0.0.1:{link.port}"
        link.set_round_trip(0.05)
        async with harness.worker(runner=runner):
            await harness.ready()
            (engine,) = harness.cluster.fleet
            ended = asyncio.Event()
            clients = [asyncio.create_task(keep_busy(harness, i, ended)) for i in range(4)]
            await until(lambda: harness.replica().lookahead > 4)
            await until(lambda: engine.core.num_in_flight > 5)
            assert (harness.replica().round_trip_s or 0) > 0.05
            # Whatever is on its way is lost with the connection, and computed again.
            await link.cut()
            await until(lambda: harness.cluster.stats().num_replicas_lost == 1)
            await until(lambda: engine.core.num_in_flight > 5)
            ended.set()
            await asyncio.gather(*clients)
        harness.assert_nothing_held()
