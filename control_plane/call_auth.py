"""Refuses calls without a token before a byte of their messages is read.

Owns: which methods stay open. Does not know: tokens (`tokens`), what the methods do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from grpc_status import rpc_status as grpc_rpc_status

from control_plane import health
from control_plane.errors import UnauthenticatedError
from control_plane.rpc_status import to_status

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from control_plane.metrics import Metrics
    from control_plane.tokens import ClientTokens

WORKER_SERVICE_NAME = "pagewire.v1.WorkerService"
_OPEN_PREFIXES = (
    # Load balancers have no token, and learn nothing but whether we serve.
    f"/{health.SERVICE_NAME}/",
    # Not here at all: a worker that dials the wrong port is to hear that, not that its token is
    # nobody's.
    f"/{WORKER_SERVICE_NAME}/",
)


class CallAuth(grpc.aio.ServerInterceptor):
    """Lets calls with a token through, and everybody to the health service."""

    def __init__(self, tokens: ClientTokens, metrics: Metrics) -> None:
        self._tokens = tokens
        self._metrics = metrics

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """Hand the call on, or to a handler that ends it."""
        if handler_call_details.method.startswith(_OPEN_PREFIXES):
            return await continuation(handler_call_details)
        try:
            self._tokens.check(handler_call_details.invocation_metadata or ())
        except UnauthenticatedError as error:
            self._metrics.on_failed(error.reason)
            # Fits every kind of method: it reads nothing.
            return grpc.stream_stream_rpc_method_handler(_refusal(error))
        return await continuation(handler_call_details)


def _refusal(error: UnauthenticatedError) -> Callable[[Any, Any], Awaitable[None]]:
    status = grpc_rpc_status.to_status(to_status(error))

    # A coroutine function, by which gRPC tells asynchronous handlers from those for threads.
    async def refuse(requests: Any, context: Any) -> None:
        del requests
        await context.abort_with_status(status)

    return refuse
