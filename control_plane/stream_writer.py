"""The responses of one stream on their way out, and a bound on how long a client may leave one.

Owns: the watch over a write that takes too long. Does not know: what a response says.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self

from control_plane.call_errors import write
from control_plane.errors import SlowClientError

if TYPE_CHECKING:
    from collections.abc import Callable

    from google.protobuf.message import Message


class StreamWriter:
    """Writes for the task that enters it; the one task that may use it.

    The watch is one timer per stream, which looks now and then whether a write has begun too long
    ago: a timer per response would cost a tenth of everything that a response costs.
    """

    def __init__(self, context: Any, *, limit_s: float, clock: Callable[[], float]) -> None:
        """Watch over nothing yet.

        Args:
            context: The `grpc.aio.ServicerContext` of the call.
            limit_s: How long a response may wait for the client, at least; at most twice that.
            clock: Seconds that this process has run: a stall of ours is no slowness of the client.
        """
        self._context = context
        self._limit_s = limit_s
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._began_at: float | None = None
        self._is_late = False

    async def __aenter__(self) -> Self:
        self._task = asyncio.current_task()
        self._timer = self._loop.call_later(self._limit_s, self._look)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def write(self, response: Message) -> None:
        """Send a response.

        Raises:
            SlowClientError: The client left it unread for too long.
        """
        self._began_at = self._clock()
        try:
            await write(self._context, response)
        except asyncio.CancelledError:
            # Cancelled by somebody else as well, the call ends as that one wants.
            if self._is_late and self._task is not None and self._task.uncancel() <= 0:
                raise slow_client(self._limit_s) from None
            raise
        finally:
            self._began_at = None

    def _look(self) -> None:
        now = self._clock()
        since = now if self._began_at is None else self._began_at
        left_s = since + self._limit_s - now
        if left_s <= 0 and self._task is not None:
            self._is_late = True
            self._task.cancel()
        else:
            self._timer = self._loop.call_later(left_s, self._look)


def slow_client(limit_s: float) -> SlowClientError:
    """What a call ends with whose client does not read."""
    return SlowClientError(
        f"The client left a response unread for {limit_s:g} seconds, so its stream was "
        "cancelled. Read faster, ask for a flush_interval, or resume the request.",
        limit_s=f"{limit_s:g}",
    )
