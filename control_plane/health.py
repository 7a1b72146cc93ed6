"""grpc.health.v1, as load balancers ask it.

The empty service name is this process: SERVING while it accepts requests. The name of a model is
its readiness: SERVING while a replica of it takes work, which a worker proves by a step before it
attaches.

Owns: who is told of which change. Does not know: replicas.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Mapping

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_NAME = "grpc.health.v1.Health"


class HealthService(health_pb2_grpc.HealthServicer):
    """Statuses by name. A watcher that does not read holds up neither the others nor a change."""

    def __init__(self) -> None:
        self._statuses: dict[str, Any] = {}
        self._watchers: set[asyncio.Event] = set()
        self._is_closed = False

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

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802 - the proto's name
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                "No such service; the empty name is the server, a model's name is its readiness.",
            )
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802 - the proto's name
        changed = asyncio.Event()
        self._watchers.add(changed)
        last: Any = None
        try:
            while not self._is_closed:
                changed.clear()
                status = self._statuses.get(
                    request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
                )
                if status != last:
                    last = status
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                await changed.wait()
        finally:
            self._watchers.discard(changed)

    def _wake(self) -> None:
        for changed in self._watchers:
            changed.set()
