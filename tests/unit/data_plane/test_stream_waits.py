"""What a worker says of the time that plans waited, on a loop whose own clock is coarse."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fake_worker import FakeModelRunner, StepwiseWorker
from scripted_control_plane import added_row, plan, reset, welcome
from virtual_time import VirtualTimeLoop

from data_plane.step_loop import StepLoop
from data_plane.stream_session import StreamSession

PROMPT = [5, 6, 7]


def test_a_plan_that_waited_less_than_a_tick_of_the_loops_clock_says_so() -> None:
    async def waits_us() -> list[int]:
        runner = FakeModelRunner()
        protocol = StepwiseWorker(runner).protocol
        call: Any = None  # nothing is sent
        session = StreamSession(
            call,
            protocol=protocol,
            steps=StepLoop(runner, lambda work, outcome: None),
            runner=runner,
            drain_requested=asyncio.Event(),
            grace_s=1.0,
        )
        protocol.hello()
        works = []
        row = added_row(0, PROMPT, [1, 2])
        for message in (
            welcome(num_blocks=runner.num_blocks),
            reset(1),
            plan(2, added_rows=[row], chunk_rows=[0], chunk_num_tokens=[len(PROMPT)]),
            plan(3),
        ):
            reaction = protocol.receive(message)
            works += reaction.works
            session._react(reaction)
        # The plans lie there for a while, of which this loop's clock shows nothing.
        came_s = time.monotonic()
        while time.monotonic() - came_s < 0.002:
            pass
        for work in works:
            session.take_outcome(work, runner.launch(work).wait())
        sent = [session._outgoing.get_nowait() for _ in works]
        return [message.step_result.waited_us for message in sent if message is not None]

    # Its clock stands still while something runs.
    loop = VirtualTimeLoop()
    task = loop.create_task(waits_us())
    loop.run_for(0.0)
    loop.close()
    first, second = task.result()
    assert first == 0
    assert second >= 2000
