"""Which replicas were in trouble so often lately that others get the work first.

A worker that dies or fails steps comes back at once and looks idle, which makes it everybody's
choice. From its second trouble within the window on it is doubted for a while, for twice as long
with each further one. A doubted replica still works where there is no other.

Owns: the troubles of the window. Does not know: clocks (time is an argument), what a trouble was.
"""

from __future__ import annotations

from collections import deque

# Seconds for which a trouble is remembered.
WINDOW_S = 300.0
FIRST_DOUBT_S = 5.0
LONGEST_DOUBT_S = 120.0
_MAX_TROUBLES = 16
# Workers may have a new id at every start.
_MAX_REPLICAS = 4096


class Trust:
    """Doubts by replica id. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._troubles: dict[str, deque[float]] = {}
        self._doubted_until: dict[str, float] = {}

    def note(self, replica_id: str, now: float) -> float:
        """A replica was lost, or a step failed on it.

        Returns:
            For how long it is doubted from now on; 0 if it is not.
        """
        self._forget(now)
        # Behind all others: the first is the one whose last trouble is longest ago.
        troubles = self._troubles.pop(replica_id, None) or deque(maxlen=_MAX_TROUBLES)
        self._troubles[replica_id] = troubles
        troubles.append(now)
        while troubles[0] <= now - WINDOW_S:
            troubles.popleft()
        if len(troubles) < 2:
            return 0.0
        doubt_s = min(LONGEST_DOUBT_S, FIRST_DOUBT_S * 2.0 ** (len(troubles) - 2))
        self._doubted_until[replica_id] = now + doubt_s
        return doubt_s

    def is_doubted(self, replica_id: str, now: float) -> bool:
        """Whether others should get work first."""
        return now < self._doubted_until.get(replica_id, float("-inf"))

    def _forget(self, now: float) -> None:
        while self._troubles:
            replica_id, troubles = next(iter(self._troubles.items()))
            if troubles[-1] > now - WINDOW_S and len(self._troubles) < _MAX_REPLICAS:
                return
            del self._troubles[replica_id]
            self._doubted_until.pop(replica_id, None)
