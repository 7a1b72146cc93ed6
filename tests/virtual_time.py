"""An event loop whose clock stands still unless the test moves it."""

from __future__ import annotations

import asyncio
import selectors
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


# What a turn of the loop takes: a timer that rounding lets fire too early must not come for ever.
_TURN_S = 1e-6


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Runs what is ready, and timers in the order of their time, without ever waiting.

    Deterministic as long as nothing on it uses sockets or threads.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._until_s = 0.0
        super().__init__(_NoWaiting(self))

    def time(self) -> float:
        return self.now_s

    def run_for(self, seconds: float) -> None:
        """Do everything that happens within `seconds`; 0: all that is ready now."""
        self._until_s = self.now_s + seconds
        self.run_forever()

    def pass_time(self, seconds: float | None) -> None:
        """Nothing is ready for so long: go there, or stop if that is past the end of the run."""
        if seconds is None or self.now_s + seconds > self._until_s:
            self.now_s = self._until_s
            self.stop()
        else:
            self.now_s += seconds


class _NoWaiting(selectors.BaseSelector):
    """A selector that moves the loop's clock where it should wait."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self._loop = loop
        self._selector = selectors.DefaultSelector()

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._selector.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._selector.unregister(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop.now_s += _TURN_S
        ready = self._selector.select(0)
        if not ready and timeout != 0:
            self._loop.pass_time(timeout)
        return ready

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._selector.get_map()

    def close(self) -> None:
        self._selector.close()
