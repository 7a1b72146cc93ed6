"""What an engine does in which turn of the loop, as far as somebody waits for it.

Time stands still, so that whatever waited for a timer would not happen at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from virtual_time import VirtualTimeLoop
from world_parts import BLOCK_SIZE, MODEL, Worker

from control_plane.cluster import Cluster
from control_plane.cluster_config import ClusterConfig
from control_plane.memory_prefix_store import MemoryPrefixStore
from control_plane.replica import read_hello
from control_plane.request import Request, SamplingParams
from control_plane.run_clock import RunClock
from control_plane.worker_service import _Stream

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from control_plane.engine import Engine
    from control_plane.prefix_store import PrefixScope
    from control_plane.request import BlockHash, BlockId, Version
    from control_plane.token_stream import TokenStream
    from protos.pagewire.v1 import worker_pb2

LOOKAHEAD = 2


class NotingStore(MemoryPrefixStore):
    """Notes when it is told of entries."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def record(
        self, scope: PrefixScope, changes: Mapping[BlockId, tuple[BlockHash, Version] | None]
    ) -> None:
        self.log.append(f"recorded {len(changes)}")
        super().record(scope, changes)


class OneWorker:
    """A cluster with one worker, whose messages the test carries by hand."""

    def __init__(self) -> None:
        self.loop = VirtualTimeLoop()
        self.log: list[str] = []
        self.plans: list[worker_pb2.Plan] = []
        # For each plan, the last version that was made when it left.
        self.made: list[int] = []
        self.worker = Worker(0, num_blocks=20, max_num_seqs=4, budget=32)
        self.run(self._attach())

    def run(self, work: object = None) -> object:
        """Do everything that is ready, and nothing that waits for time to pass."""
        task = None if work is None else self.loop.create_task(work)  # type: ignore[arg-type]
        self.loop.run_for(0.0)
        return None if task is None else task.result()

    async def _attach(self) -> None:
        self.store = NotingStore(self.log)
        self.cluster = Cluster(
            ClusterConfig(lookahead=LOOKAHEAD, max_lookahead=LOOKAHEAD, term_gather_s=0.0),
            [MODEL],
            self.store,
            clock=RunClock(monotonic=self.loop.time, suspended=lambda: 0.0),
        )
        await self.cluster.start()
        self.stream = _Stream("s1")
        facts = read_hello(self.worker.hello().hello, peer="test")
        self.engine: Engine = await self.cluster.fleet.attach(facts, self.stream)
        self._writer = self.loop.create_task(self._write())

    async def _write(self) -> None:
        async for message in self.stream.messages():
            for answer in self.worker.feed(message):
                self.cluster.fleet.receive(self.engine, self.stream, answer)
            if message.HasField("plan"):
                self.plans.append(message.plan)
                self.made.append(self.engine.core.sent_version)

    async def submit(self, num_prompt_tokens: int) -> TokenStream:
        request = Request(
            req_id="r",
            prompt_token_ids=np.arange(3, 3 + num_prompt_tokens, dtype=np.int32),
            sampling=SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=8),
            seed=1,
            max_total_tokens=num_prompt_tokens + 8,
            arrival=0,
        )
        return self.cluster.submit(request)

    def answer(self) -> None:
        """Execute the oldest step and take its result."""
        (result,) = self.worker.run_step()
        self.cluster.fleet.receive(self.engine, self.stream, result)

    def close(self) -> None:
        self.loop.create_task(self.cluster.stop())
        self.loop.run_for(1.0)
        self.loop.close()


@pytest.fixture
def world() -> Iterator[OneWorker]:
    world = OneWorker()
    yield world
    world.close()


def test_a_lone_requests_plans_leave_without_any_timer(world: OneWorker) -> None:
    began_s = world.loop.time()
    world.run(world.submit(8))
    assert len(world.plans) == 1 + LOOKAHEAD
    assert world.loop.time() - began_s < 1e-3


def test_a_plan_leaves_before_the_next_one_is_made(world: OneWorker) -> None:
    world.run(world.submit(8))
    assert world.made == [plan.version for plan in world.plans]


def test_the_store_hears_of_blocks_behind_the_reader_of_their_tokens(world: OneWorker) -> None:
    stream = world.run(world.submit(4 * BLOCK_SIZE))

    async def read() -> None:
        await stream.read()  # type: ignore[attr-defined]
        world.log.append("read")

    reader = world.loop.create_task(read())
    world.run()
    world.loop.call_soon(world.answer)
    world.run()
    assert reader.done()
    assert world.log == ["read", "recorded 4"]


async def _lose(world: OneWorker) -> None:
    world.answer()
    world.cluster.fleet.lose(world.engine, None, lost=True)


def test_the_store_hears_of_blocks_that_were_computed_when_the_worker_was_lost(
    world: OneWorker,
) -> None:
    world.run(world.submit(4 * BLOCK_SIZE))
    world.run(_lose(world))
    assert world.log == ["recorded 4"]
