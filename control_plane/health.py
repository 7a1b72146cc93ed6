"""grpc.health.v1, as load balancers ask it.

The empty service name is this process: SERVING while it accepts requests. The name of a model is
its readiness: SERVING while a replica of it takes work, which a worker proves by a step before it
attaches. After a restart none does while requests wait for other replicas to come back.

It is the one service that asks for no token, so whoever asks may hold little: a request has to come
within seconds, and there are only so many watchers.

Owns: who is told of which change. Does not know: replicas.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_NAME = "grpc.health.v1.Health"

_REQUEST_TIMEOUT_S = 5.0
_MAX_WATCHERS = 4096


class HealthService:
    """Statuses by name. A watcher that does not read holds up neither the others nor a change."""

    def __init__(self) -> None:
        self._statuses: dict[str, Any] = {}
        self._watchers: set[asyncio.Event] = set()
        self._is_closed = False

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register Check and Watch, as streams: gRPC would wait for ever for a single message."""
        methods: dict[str, Callable[[str, Any], Awaitable[None]]] = {
            "Check": self._check,
            "Watch": self._watch,
        }
        handlers = {
            name: grpc.stream_stream_rpc_method_handler(
                _reading(method),
                response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
            )
            for name, method in methods.items()
        }
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),)
        )

    @property
    def serves(self) -> bool:
        """What the empty service name says."""
        return self._statuses.get("") == SERVING

    def set(self, statuses: Mapping[str, bool]) -> None:
        """Set what serves and what does not."""
        new = {name: SERVING if serves else NOT_SERVING for name, serves in statuses.items()}
        if any(self._statuses.get(name) != status for name, status in new.items()):
            self._statuses.update(new)
            self._wake()

    def close(self) -> None:
        """End every watch, so that the server can stop."""
        self._is_closed = True
        self._wake()

    async def _check(self, service: str, context: Any) -> None:
        status = self._statuses.get(service)
        if status is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                "No such service; the empty name is the server, a model's name is its readiness.",
            )
        await context.write(health_pb2.HealthCheckResponse(status=status))

    async def _watch(self, service: str, context: Any) -> None:
        if len(self._watchers) >= _MAX_WATCHERS:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{_MAX_WATCHERS} watch already. Use Check, or try again later.",
            )
        changed = asyncio.Event()
        self._watchers.add(changed)
        last: Any = None
        try:
            while not self._is_closed:
                changed.clear()
                status = self._statuses.get(service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
                if status != last:
                    last = status
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                await changed.wait()
        finally:
            self._watchers.discard(changed)

    def _wake(self) -> None:
        for changed in self._watchers:
            changed.set()


def _reading(method: Callable[[str, Any], Awaitable[None]]) -> Callable[[Any, Any], Any]:
    async def handle(requests: Any, context: Any) -> None:
        del requests  # read through the context
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                data = await context.read()
            request = health_pb2.HealthCheckRequest.FromString(b"" if data is _EOF else data)
        except TimeoutError:
            await context.abort(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"The request did not come within {_REQUEST_TIMEOUT_S:g} s.",
            )
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "Not a HealthCheckRequest.")
        else:
            await method(request.service, context)

    return handle


_EOF: Any = grpc.aio.EOF
