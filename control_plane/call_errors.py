"""How a failed call ends: with a status that says everything a client may know, and nothing else.

Owns: what of an exception is logged and what travels. Does not know: methods.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from typing import TYPE_CHECKING, Any

import grpc.aio
from grpc_status import rpc_status as grpc_rpc_status

from control_plane import rpc_status
from control_plane.errors import InvariantError, ServingError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from google.protobuf.message import Message

    from control_plane.metrics import Metrics

logger = logging.getLogger(__name__)

_FRAMES = 4


class CallGuard:
    """Runs the body of a call and ends the call with a precise status where the body fails."""

    def __init__(self, metrics: Metrics, on_fatal: Callable[[InvariantError], None]) -> None:
        """Wire it up.

        Args:
            metrics: Counts failures by reason.
            on_fatal: Ends the process; gRPC would swallow what a handler raises.
        """
        self._metrics = metrics
        self._on_fatal = on_fatal

    async def run(self, context: Any, body: Awaitable[Any]) -> Any:
        """Await `body`.

        Args:
            context: The `grpc.aio.ServicerContext` of the call.
            body: What the method does.
        """
        try:
            return await body
        except asyncio.CancelledError:
            # gRPC cancels for a deadline as it does for a client that went away.
            is_late = context.time_remaining() == 0
            self._metrics.on_failed("DEADLINE_EXCEEDED" if is_late else "CANCELLED")
            raise
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            self.record(error)
            status = grpc_rpc_status.to_status(rpc_status.to_status(error))
        try:
            await context.abort(status.code, status.details, status.trailing_metadata)
        except grpc.aio.AbortError:
            raise
        except Exception as unsent:
            # The client is gone, or left a response unread to the end: nobody is there to be told.
            logger.info("status not sent: error=%s", type(unsent).__name__)
        return None

    def record(self, error: Exception) -> None:
        """Count a failure, and log it if it is not an answer to a client."""
        if isinstance(error, ServingError):
            self._metrics.on_failed(error.reason)
            return
        self._metrics.on_failed("INTERNAL")
        logger.error("call failed: error=%s where=%s", type(error).__name__, describe_place(error))
        if isinstance(error, InvariantError):
            self._on_fatal(error)


async def begin(context: Any, header: tuple[tuple[str, str], ...]) -> None:
    """Send the header of a stream before its first response.

    Raises:
        asyncio.CancelledError: The client is gone, as with `write`.
    """
    try:
        await context.send_initial_metadata(header)
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None


async def write(context: Any, response: Message) -> None:
    """Send a response.

    Raises:
        asyncio.CancelledError: The client is gone. A write can fail of that a moment before gRPC
            cancels the handler.
    """
    try:
        await context.write(response)
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None


def describe_place(error: BaseException) -> str:
    """Where an exception came from, innermost first, without its message or any value."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    names = [f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" for frame in reversed(frames)]
    return "<".join(names) or "unknown"
