"""A timer that many events would move, and few have to.

Owns one pending call of the event loop. Does not know what it is for.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class WakeTimer:
    """Calls back once, at the earliest time that was asked for since the last call.

    It is only ever moved to be earlier. A call that comes too early costs one look at the clock,
    whereas each message that renews a lease would have to move a timer.
    """

    def __init__(self, on_time: Callable[[], None]) -> None:
        self._on_time = on_time
        self._handle: asyncio.TimerHandle | None = None

    def arm(self, delay_s: float) -> None:
        """Ask for a call after `delay_s` at the latest; now if it is negative."""
        loop = asyncio.get_running_loop()
        when = loop.time() + max(0.0, delay_s)
        if self._handle is not None:
            if self._handle.when() <= when:
                return
            self._handle.cancel()
        self._handle = loop.call_at(when, self._fire)

    def cancel(self) -> None:
        """Forget what was asked for."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        self._on_time()
