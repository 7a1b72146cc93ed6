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
        position: The last fault that had begun in each lane.
        request_kind: Of the request that it is about; empty: of none.
    """

    kind: str
    text: str
    position: str
    request_kind: str = ""

    def __str__(self) -> str:
        return f"{self.kind} (after {self.position}): {self.text}"


class Findings:
    """All of them, in order.

    Attributes:
        positions: Number of the last fault that has begun, by lane.
    """

    def __init__(self) -> None:
        self.items: list[Finding] = []
        self.positions: dict[str, int] = {}
        self._any = asyncio.Event()

    def add(self, kind: str, text: str, *, request_kind: str = "") -> None:
        self.items.append(Finding(kind, text, self.position, request_kind))
        self._any.set()

    @property
    def position(self) -> str:
        """Where the schedule is, for people."""
        numbers = ", ".join(f"{lane} {number}" for lane, number in self.positions.items())
        return f"fault {numbers}" if numbers else "no fault"

    def count(self, kind: str, request_kind: str | None = None) -> int:
        """How many of a kind, of any request or of those of one kind."""
        return sum(
            item.kind == kind and request_kind in (None, item.request_kind) for item in self.items
        )

    @property
    def any(self) -> bool:
        return bool(self.items)

    async def wait(self) -> None:
        """Return once there is one."""
        await self._any.wait()
