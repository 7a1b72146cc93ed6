"""How long a request that comes now would wait for a row, from how fast others got theirs.

Only starts with somebody waiting behind them tell how fast that is: without a queue, requests start
as fast as they come. So it is measured from when a queue built up, and forgotten when it is gone.

Owns: the starts of the present queue. Does not know: requests, clocks (time is an argument).
"""

from __future__ import annotations

from collections import deque

# What is older says little about now.
_WINDOW_S = 60.0
_MAX_STARTS = 256


class QueueWait:
    """The speed of one replica's queue."""

    def __init__(self) -> None:
        self._since: float | None = None
        # When requests started, and how many at once.
        self._starts: deque[tuple[float, int]] = deque()
        self._num_started = 0

    def observe(self, num_started: int, num_waiting: int, now: float) -> None:
        """Look at the queue after an ordering of steps.

        Args:
            num_started: Requests that got a row since the last look.
            num_waiting: Those that wait still.
            now: Monotonic seconds, as everywhere.
        """
        if not num_waiting:
            if self._since is not None:
                self._since = None
                self._starts.clear()
                self._num_started = 0
            return
        if self._since is None:
            # Whoever started just now did not wait for others.
            self._since = now
        elif num_started:
            self._starts.append((now, num_started))
            self._num_started += num_started
            while len(self._starts) > _MAX_STARTS or self._starts[0][0] < now - _WINDOW_S:
                self._since, count = self._starts.popleft()
                self._num_started -= count

    def expected_s(self, num_ahead: int, now: float) -> float:
        """Seconds until a request with so many before it would start; 0 if there is no queue."""
        if self._since is None or num_ahead < 1:
            return 0.0
        span_s = now - self._since
        if not self._num_started:
            # Nobody knows how fast it will be; it will hardly be over sooner than it has lasted.
            return span_s
        # Rows get free in bursts, and the next burst is on its way.
        burst = self._num_started / len(self._starts)
        return num_ahead * span_s / (self._num_started + burst)
