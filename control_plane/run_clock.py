"""A monotonic clock that leaves out the time in which this process did not run.

A stopped process, a paused machine or a blocked event loop hears nobody: whatever lease or timeout
ran out meanwhile says nothing about the others. On this clock they all have as much left as they
had before.

Owns: how long that was, and when it last ended. Does not know: leases, streams.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

# Shorter ones happen on every busy machine, and leases are longer.
_WORTH_A_LINE_S = 1.0
# Stalls that are remembered: a loop that is blocked for long may be found stalled in pieces.
_NUM_REMEMBERED = 64


def _suspended_s() -> float:
    """Seconds that this machine slept since it was booted: the monotonic clock stood still."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()


def _never() -> float:
    return 0.0


class RunClock:
    """Call it for seconds. It never goes back, and while it ticks it never leaps.

    Whoever reads it first after a stall finds the stall: no order of events at the wake-up matters.

    Attributes:
        num_stalls: Stalls found so far.
        stalled_s: Their seconds, together.
    """

    def __init__(
        self,
        *,
        tolerance_s: float = 0.5,
        monotonic: Callable[[], float] = time.monotonic,
        suspended: Callable[[], float] | None = None,
    ) -> None:
        """Build a clock that does not tick yet; until then it is the monotonic one.

        Args:
            tolerance_s: Lateness of a tick that counts as a stall.
            monotonic: Seconds that go on while the process is stopped.
            suspended: Seconds in which even those stood still.
        """
        if not tolerance_s > 0:
            raise ValueError(f"tolerance_s must be positive, got {tolerance_s}")
        self.num_stalls = 0
        self.stalled_s = 0.0
        self._tolerance_s = tolerance_s
        self._interval_s = tolerance_s / 2
        self._monotonic = monotonic
        if suspended is None:
            suspended = _suspended_s if hasattr(time, "CLOCK_BOOTTIME") else _never
        self._suspended = suspended
        self._suspended_s = 0.0
        self._excused_s = 0.0
        self._ticked: float | None = None
        self._handle: asyncio.TimerHandle | None = None
        # When the last stalls ended, on this clock, and how long they were.
        self._recent: deque[tuple[float, float]] = deque(maxlen=_NUM_REMEMBERED)

    def __call__(self) -> float:
        """Seconds that this process has run, from an arbitrary start."""
        now = self._monotonic()
        if self._ticked is not None:
            late_s = now - self._ticked - self._interval_s
            if late_s > self._tolerance_s:
                # It may have been running for one interval; all the rest was a stall.
                self._excused_s += late_s
                self._ticked = now
                self._found(late_s, now - self._excused_s)
        return now - self._excused_s

    def start(self) -> None:
        """Begin to tick, on the running loop."""
        self._suspended_s = self._suspended()
        self._tick()

    def stop(self) -> None:
        """Tick no more: from here on it is a monotonic clock again."""
        self._ticked = None
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def has_stalled(self, *, for_s: float, within_s: float) -> bool:
        """Whether stalls of at least `for_s` together ended in the last `within_s` seconds."""
        now = self()
        self._look_for_sleep(now)
        return sum(seconds for end, seconds in self._recent if now - end <= within_s) >= for_s

    def _tick(self) -> None:
        now = self()
        self._look_for_sleep(now)
        self._ticked = self._monotonic()
        self._handle = asyncio.get_running_loop().call_later(self._interval_s, self._tick)

    def _look_for_sleep(self, now: float) -> None:
        """Notice that the machine slept: nothing ran out here, but the others were awake."""
        slept_s = self._suspended() - self._suspended_s
        if slept_s > self._tolerance_s:
            self._suspended_s += slept_s
            self._found(slept_s, now)

    def _found(self, seconds: float, now: float) -> None:
        self.num_stalls += 1
        self.stalled_s += seconds
        self._recent.append((now, seconds))
        if seconds >= _WORTH_A_LINE_S:
            logger.warning("stall: this process did not run: seconds=%.1f", seconds)
