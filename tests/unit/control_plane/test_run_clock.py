"""Time as a process lives it, on clocks that the tests move."""

from __future__ import annotations

import pytest
from conditions import until

from control_plane.run_clock import RunClock


class Times:
    """What the machine's clocks say."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept = 7.0

    def clock(self) -> RunClock:
        return RunClock(tolerance_s=0.5, monotonic=lambda: self.now, suspended=lambda: self.slept)


async def test_a_stall_is_left_out_whoever_reads_the_clock_first() -> None:
    times = Times()
    clock = times.clock()
    clock.start()
    before = clock()
    times.now += 40.0
    # It may have run for as long as a tick takes, and not longer.
    assert before <= clock() <= before + 0.5
    assert clock.num_stalls == 1
    assert clock.stalled_s == pytest.approx(40.0, abs=0.5)
    times.now += 0.3
    assert clock() <= before + 0.8
    assert clock.num_stalls == 1
    clock.stop()


async def test_lateness_within_the_tolerance_is_time_like_any_other() -> None:
    times = Times()
    clock = times.clock()
    clock.start()
    before = clock()
    times.now += 0.7
    assert clock() == before + 0.7
    assert clock.num_stalls == 0
    clock.stop()


async def test_a_clock_that_does_not_tick_is_the_monotonic_one() -> None:
    times = Times()
    clock = times.clock()
    assert clock() == 100.0
    times.now += 40.0
    assert clock() == 140.0
    clock.start()
    clock.stop()
    times.now += 40.0
    assert clock() == 180.0
    assert clock.num_stalls == 0


async def test_it_ticks_by_itself() -> None:
    clock = RunClock(tolerance_s=0.02)
    clock.start()
    before = clock()
    # Many tolerances long: without ticks all of it would be taken for a stall.
    await until(lambda: clock() - before > 0.2)
    clock.stop()


async def test_only_a_stall_that_ended_lately_and_was_long_explains_something() -> None:
    times = Times()
    clock = times.clock()
    clock.start()
    assert not clock.has_stalled(for_s=3.0, within_s=1.0)
    times.now += 2.0
    assert not clock.has_stalled(for_s=3.0, within_s=1.0)
    assert clock.has_stalled(for_s=1.0, within_s=1.0)
    # A loop that is blocked for long is found stalled in pieces.
    times.now += 2.0
    assert clock.has_stalled(for_s=3.0, within_s=1.0)
    for _ in range(4):
        times.now += 0.4
        clock._tick()
    assert not clock.has_stalled(for_s=1.0, within_s=1.0)
    clock.stop()


async def test_a_machine_that_slept_has_stalled_though_no_time_passed() -> None:
    times = Times()
    clock = times.clock()
    clock.start()
    before = clock()
    times.slept += 3600.0
    assert clock.has_stalled(for_s=3.0, within_s=1.0)
    assert clock() == before
    assert (clock.num_stalls, clock.stalled_s) == (1, 3600.0)
    clock.stop()
