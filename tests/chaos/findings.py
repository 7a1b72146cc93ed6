"""What the suite found wrong, and where in the schedule.

Owns the list and the moment of the first finding. Does not know what looks for faults.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that must not happen.

    Attributes:
        kind: "wrong", "lost", "doubled", "failed", "stalled", "died", "leaked" or "logged".
        text: What exactly, for people.
        position: Number of the last fault that had begun.
    """

    kind: str
    text: str
    position: int

    def __str__(self) -> str:
        return f"{self.kind} (after fault #{self.position}): {self.text}"


class Findings:
    """All of them, in order."""

    def __init__(self) -> None:
        self.items: list[Finding] = []
        self.position = 0
        self._any = asyncio.Event()

    def add(self, kind: str, text: str) -> None:
        self.items.append(Finding(kind, text, self.position))
        self._any.set()

    def count(self, kind: str) -> int:
        return sum(item.kind == kind for item in self.items)

    @property
    def any(self) -> bool:
        return bool(self.items)

    async def wait(self) -> None:
        """Return once there is one."""
        await self._any.wait()
