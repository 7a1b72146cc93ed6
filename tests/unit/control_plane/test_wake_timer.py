"""The timer that is only moved to be earlier."""

from __future__ import annotations

import asyncio

from control_plane.wake_timer import WakeTimer

FAR_S = 3600.0


async def test_earliest_time_that_was_asked_for_counts() -> None:
    called = asyncio.Event()
    timer = WakeTimer(called.set)
    for delay_s in (FAR_S, 0.0, FAR_S):
        timer.arm(delay_s)
    await called.wait()


async def test_it_can_be_asked_again_once_it_has_called() -> None:
    called = asyncio.Event()
    timer = WakeTimer(called.set)
    for _ in range(2):
        timer.arm(-1.0)
        timer.arm(FAR_S)
        await called.wait()
        called.clear()


async def test_cancelled_timer_does_not_call() -> None:
    calls: list[int] = []
    timer = WakeTimer(lambda: calls.append(1))
    timer.arm(0.0)
    timer.cancel()
    timer.cancel()
    last = asyncio.Event()
    WakeTimer(last.set).arm(0.0)
    await last.wait()
    assert calls == []
