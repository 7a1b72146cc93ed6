"""The steps of one stream that are ordered and not confirmed.

Owns: their versions in order, how many there may be, and since when the oldest can be running. Does
not know: what they compute, messages, clocks (time is an argument).
"""

from __future__ import annotations

from collections import deque


class StepWindow:
    """At most `lookahead + 1` steps, confirmed in the order in which they were sent.

    Attributes:
        lookahead: Steps beyond the one whose result is awaited.
    """

    def __init__(self, lookahead: int) -> None:
        self.lookahead = lookahead
        self._versions: deque[int] = deque()
        self._since = 0.0

    def __len__(self) -> int:
        return len(self._versions)

    @property
    def has_room(self) -> bool:
        return len(self._versions) <= self.lookahead

    @property
    def oldest(self) -> int | None:
        """Version of the plan whose result comes next."""
        return self._versions[0] if self._versions else None

    @property
    def since(self) -> float | None:
        """When the worker could begin the oldest step; None if there is none."""
        return self._since if self._versions else None

    def sent(self, version: int, now: float) -> None:
        """A plan left."""
        if not self._versions:
            self._since = now
        self._versions.append(version)

    def confirm(self, now: float) -> None:
        """The oldest step's result came: the next one is what the worker runs now."""
        self._versions.popleft()
        self._since = now

    def clear(self) -> None:
        """None of them counts any longer."""
        self._versions.clear()
