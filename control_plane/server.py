"""The process: everything wired together, three listeners, and an end in good order.

- public port: InferenceService, grpc.health.v1, reflection;
- worker port: WorkerService and nothing else;
- metrics port: HTTP for Prometheus.

Owns: wiring, ports, readiness, the order of a shutdown. Does not know: what any service does.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Self

import grpc
import grpc.aio
from grpc_reflection.v1alpha import reflection

from control_plane import health, inference_service
from control_plane.call_auth import CallAuth
from control_plane.cluster import Cluster
from control_plane.encoding_pool import EncodingPool
from control_plane.generation import GenerationService
from control_plane.health import HealthService
from control_plane.inference_service import InferenceService
from control_plane.metrics import Metrics
from control_plane.metrics_server import MetricsServer
from control_plane.port_options import public_options, worker_options
from control_plane.port_security import PortSecurity
from control_plane.prefix_store import open_prefix_store
from control_plane.recording import Recorder
from control_plane.request_builder import RequestBuilder
from control_plane.stream_pace import StreamPace
from control_plane.worker_service import WORKER_SERVER_OPTIONS, WorkerService
from protos.pagewire.v1 import worker_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from control_plane.config import ControlPlaneConfig
    from control_plane.errors import InvariantError
    from control_plane.model_catalog import ModelCatalog

logger = logging.getLogger(__name__)

_READINESS_INTERVAL_S = 0.1
# Once every request has ended, its last response may still be on its way to the client.
_LAST_WRITES_S = 5.0


class PortTakenError(OSError):
    """A port cannot be bound; the message names it and its flag."""


class ControlPlane:
    """A running control plane: `async with ControlPlane(config, catalog) as control_plane`."""

    def __init__(self, config: ControlPlaneConfig, catalog: ModelCatalog) -> None:
        """Wire everything up, on the running loop. Nothing listens yet.

        Raises:
            ValueError: The URL of the prefix store is wrong, or a certificate or token file is.
        """
        self._config = config
        security = config.security
        self._security = PortSecurity(security)
        self._catalog = catalog
        self.metrics = Metrics()
        self._store = open_prefix_store(
            config.redis_url,
            deployment=config.cluster.deployment,
            shard=config.cluster.shard,
            observer=self.metrics.store,
        )
        self._recorder: Recorder | None = None
        if config.recording is not None:
            self._recorder = Recorder(config.recording, deployment=config.cluster.deployment)
            self.metrics.recorder = self._recorder
        self.cluster = Cluster(
            config.cluster,
            [model.served for model in catalog.models.values()],
            self._store,
            observers=self._recorder,
            on_started=self.metrics.request_queue_time.observe,
        )
        self._pool = EncodingPool()
        self._health = HealthService()
        self._fatal: asyncio.Future[InvariantError] = asyncio.get_running_loop().create_future()
        builder = RequestBuilder(
            catalog,
            self._pool,
            max_n=config.max_n,
            enforce_cache_salt=security.enforce_cache_salt,
            max_priority=security.max_priority,
        )
        self.pace = StreamPace()
        self._inference = InferenceService(
            catalog=catalog,
            cluster=self.cluster,
            generations=GenerationService(self.cluster, builder, self.metrics, self.pace),
            pool=self._pool,
            metrics=self.metrics,
            limits=config.limits,
            on_fatal=self._on_fatal,
            tokens=self._security.tokens,
        )
        self._public_server = self._build_public_server()
        self._worker_server = grpc.aio.server(options=(*WORKER_SERVER_OPTIONS, *worker_options()))
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(
            WorkerService(self.cluster, self._security.worker_tokens), self._worker_server
        )
        self._metrics_server: MetricsServer | None = None
        self._readiness: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self.port = 0
        self.worker_port = 0

    @property
    def metrics_port(self) -> int:
        return self._metrics_server.port if self._metrics_server else 0

    async def start(self) -> None:
        """Listen on all three ports.

        Raises:
            PortTakenError: One of them cannot be bound.
        """
        config = self._config
        self.port = _bind(
            self._public_server, config.host, config.port, "--port", self._security.credentials
        )
        self.worker_port = _bind(
            self._worker_server,
            config.host,
            config.worker_port,
            "--worker-port",
            self._security.worker_credentials,
        )
        metrics_host = config.metrics_host or config.host
        try:
            self._metrics_server = MetricsServer(
                self.metrics,
                self.cluster.stats,
                host=metrics_host,
                port=config.metrics_port,
                serves=lambda: self._health.serves,
            )
        except OSError as error:
            raise _port_taken(metrics_host, config.metrics_port, "--metrics-port") from error
        self._security.warn(config.host)
        if self._recorder is not None:
            self._recorder.start()
        await self._store.start()
        await self.cluster.start()
        await self._worker_server.start()
        self._health.set({"": True, inference_service.SERVICE_NAME: True, **self._ready_models()})
        await self._public_server.start()
        self._readiness = asyncio.create_task(self._watch_readiness(), name="readiness")
        self._watching = asyncio.create_task(self._security.watch(), name="secrets")

    async def reread_secrets(self) -> None:
        """Take over what the files of certificates and tokens hold now."""
        await self._security.reread()

    def describe(self) -> str:
        """One line: where things listen and what is served."""
        host = self._config.host
        metrics = _address(self._config.metrics_host or host, self.metrics_port)
        return (
            f"pagewire control plane: public={_address(host, self.port)} "
            f"workers={_address(host, self.worker_port)} "
            f"metrics=http://{metrics}/metrics "
            f"models={','.join(self._catalog.models)}"
        )

    async def run_until(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set or another control plane took over.

        Raises:
            InvariantError: This process contradicts itself and must end.
        """
        await self._until_any(stop.wait(), self.cluster.superseded())

    async def leave(self, grace_s: float, cut: asyncio.Event) -> bool:
        """Drain until everything has finished, `grace_s` is over or `cut` is set.

        Returns:
            Whether everything finished.

        Raises:
            InvariantError: This process contradicts itself and must end.
        """
        drain = asyncio.create_task(self.drain(grace_s), name="drain")
        try:
            await self._until_any(asyncio.shield(drain), cut.wait())
            return drain.done() and drain.result()
        finally:
            drain.cancel()
            await asyncio.gather(drain, return_exceptions=True)

    async def _until_any(self, *ends: Awaitable[object]) -> None:
        """Wait for one of these.

        Raises:
            InvariantError: A broken invariant came first.
        """
        failed = asyncio.ensure_future(self.cluster.failed())
        tasks = [failed, *(asyncio.ensure_future(end) for end in ends)]
        try:
            await asyncio.wait([*tasks, self._fatal], return_when=asyncio.FIRST_COMPLETED)
            if self._fatal.done():
                raise self._fatal.result()
            if failed.done():
                await failed
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def drain(self, grace_s: float) -> bool:
        """Take nothing new and let what runs finish.

        Returns:
            Whether everything finished within `grace_s`.
        """
        if self._readiness is not None:
            self._readiness.cancel()
        # First of all: load balancers must hear of it before a request is refused.
        self._health.set(
            {"": False, inference_service.SERVICE_NAME: False}
            | dict.fromkeys(self._catalog.models, False)
        )
        self.cluster.begin_drain()
        return await self.cluster.drained(grace_s)

    async def stop(self) -> None:
        """Close everything; what still runs is cut off."""
        for task in (self._readiness, self._watching):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._health.close()
        await self._public_server.stop(_LAST_WRITES_S)
        await self.cluster.stop()
        await self._worker_server.stop(1.0)
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close)
        if self._metrics_server is not None:
            await self._metrics_server.close()
        await self._store.close()
        self._pool.close()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _build_public_server(self) -> grpc.aio.Server:
        tokens = self._security.tokens
        server = grpc.aio.server(
            interceptors=[CallAuth(tokens, self.metrics)] if tokens else None,
            options=public_options(max_message_bytes=self._config.limits.max_transport_bytes),
        )
        self._inference.add_to(server)
        self._health.add_to(server)
        reflection.enable_server_reflection(
            (inference_service.SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
        return server

    def _ready_models(self) -> dict[str, bool]:
        return {name: self.cluster.num_ready(name) > 0 for name in self._catalog.models}

    async def _watch_readiness(self) -> None:
        while True:
            await asyncio.sleep(_READINESS_INTERVAL_S)
            self._health.set(self._ready_models())

    def _on_fatal(self, error: InvariantError) -> None:
        if not self._fatal.done():
            self._fatal.set_result(error)


def _bind(
    server: grpc.aio.Server,
    host: str,
    port: int,
    flag: str,
    credentials: grpc.ServerCredentials | None,
) -> int:
    address = _address(host, port)
    try:
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise _port_taken(host, port, flag) from error
    if not bound:
        raise _port_taken(host, port, flag)
    return bound


def _port_taken(host: str, port: int, flag: str) -> PortTakenError:
    return PortTakenError(
        f"cannot listen on {_address(host, port)} ({flag} {port}): the port is taken or the "
        f"address is not of this machine. Stop what listens there, choose another {flag}, or use "
        f"{flag} 0 for a free port."
    )


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _reread(control_plane: ControlPlane, reread: asyncio.Event) -> None:
    while True:
        await reread.wait()
        reread.clear()
        await control_plane.reread_secrets()


async def serve(
    config: ControlPlaneConfig,
    catalog: ModelCatalog,
    *,
    stop: asyncio.Event,
    cut: asyncio.Event,
    reread: asyncio.Event,
    on_listening: Callable[[str], None],
) -> bool:
    """Run a control plane until `stop`, then drain; `cut` ends the drain early.

    Args:
        config: Of the process.
        catalog: The models, loaded.
        stop: Set by a signal.
        cut: Set by a second one.
        reread: Set to have certificates and tokens read again.
        on_listening: Gets one line about where things listen.

    Returns:
        Whether everything that ran could finish.

    Raises:
        PortTakenError: A port cannot be bound.
        InvariantError: The process must end.
    """
    async with ControlPlane(config, catalog) as control_plane:
        on_listening(control_plane.describe())
        rereading = asyncio.create_task(_reread(control_plane, reread), name="reread")
        try:
            await control_plane.run_until(stop)
        finally:
            rereading.cancel()
            await asyncio.gather(rereading, return_exceptions=True)
        logger.info("drain: grace_s=%g", config.grace_s)
        finished = await control_plane.leave(config.grace_s, cut)
        logger.info("drained: finished=%s", finished)
        return finished
