"""The whole system on this machine: store, control plane, workers, each a real process.

Owns: their command lines, ports and order, and when they count as ready. Tests and demos build on
it; what they want to break, they break through `ServingStack.processes`.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pagewire_client import AsyncClient

from demo import valkey
from demo.ports import PortClaims
from demo.processes import (
    ManagedProcess,
    ProcessGroup,
    Registry,
    child_environment,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from types import TracebackType

PUBLIC_PORT = 50051
WORKER_PORT = 50052
METRICS_PORT = 9464
_READY_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class StackConfig:
    """What to run and where its files go.

    Attributes:
        root: The checkout; children run in it.
        base_dir: Logs and the store's data go below it (`.pagewire` for the demos).
        model_dir: What both planes load.
        model_name: What clients call it.
        python: Interpreter of the children.
        environment: Base of the children's environment.
        store: "valkey" for a server of our own, or a URL for --redis-url.
        device: "cpu" or "cuda".
        random_ports: Take any free port instead of the next one from the default; for tests.
        control_plane_args: Further flags.
        worker_args: Further flags.
        grace_s: How long a process may take to stop.
    """

    root: Path
    base_dir: Path
    model_dir: Path
    model_name: str
    python: str
    environment: Mapping[str, str]
    store: str = "valkey"
    device: str = "cpu"
    random_ports: bool = False
    control_plane_args: tuple[str, ...] = ()
    worker_args: tuple[str, ...] = ()
    grace_s: float = 15.0


@dataclass(slots=True)
class Ports:
    """Where the control plane and the store listen; None: not started."""

    public: int
    worker: int
    metrics: int
    store: int | None = field(default=None)


class ServingStack:
    """Processes of one deployment. An async context manager: nothing outlives the block."""

    def __init__(self, config: StackConfig, *, registry: Registry | None = None) -> None:
        self.config = config
        self.processes = ProcessGroup(
            log_dir=config.base_dir / "logs",
            cwd=config.root,
            env=child_environment(config.root, config.environment),
            registry=registry,
            grace_s=config.grace_s,
        )
        self._claims = PortClaims()
        self.ports = _choose_ports(self._claims, random=config.random_ports)
        self.control_plane: ManagedProcess | None = None
        self.workers: dict[str, ManagedProcess] = {}

    @property
    def address(self) -> str:
        """host:port of the public API."""
        return f"127.0.0.1:{self.ports.public}"

    @property
    def store_url(self) -> str:
        if self.config.store != "valkey":
            return self.config.store
        if self.ports.store is None:
            return "memory://"
        return f"redis://127.0.0.1:{self.ports.store}/0"

    @property
    def store_label(self) -> str:
        """The store for people: never a URL that may hold a password."""
        if self.store_url == "memory://":
            return "none: memory of the control plane"
        return "as given in STORE" if "@" in self.store_url else self.store_url

    def client(self) -> AsyncClient:
        return AsyncClient(self.address)

    async def start_store(self) -> None:
        """Start Valkey and wait until it answers; nothing to do for another store."""
        if self.config.store != "valkey":
            return
        if self.ports.store is None:
            self.ports.store = self._claims.any_free()
        command = valkey.server_command(
            port=self.ports.store, data_dir=self.config.base_dir / "valkey"
        )
        self.processes.start("valkey", command)
        await self.processes.guard(valkey.wait_until_answering(self.ports.store))

    def start_control_plane(self, *args: str) -> ManagedProcess:
        config, ports = self.config, self.ports
        self.control_plane = self.processes.start(
            "control-plane",
            [
                *(config.python, "-m", "control_plane"),
                *("--model", str(config.model_dir), "--served-model-name", config.model_name),
                *("--port", str(ports.public), "--worker-port", str(ports.worker)),
                *("--metrics-port", str(ports.metrics), "--redis-url", self.store_url),
                *config.control_plane_args,
                *args,
            ],
        )
        return self.control_plane

    def start_worker(
        self, worker_id: str, *args: str, control_plane_port: int | None = None
    ) -> ManagedProcess:
        """Start one worker.

        Args:
            worker_id: Its name; also that of its log.
            args: Further flags.
            control_plane_port: Where it dials, such as the port of a `Link`; default: directly.
        """
        config = self.config
        port = self.ports.worker if control_plane_port is None else control_plane_port
        worker = self.processes.start(
            worker_id,
            [
                *(config.python, "-m", "data_plane", "--model", str(config.model_dir)),
                *("--control-plane", f"127.0.0.1:{port}", "--worker-id", worker_id),
                *("--device", config.device),
                *config.worker_args,
                *args,
            ],
        )
        self.workers[worker_id] = worker
        return worker

    async def wait_until_ready(
        self,
        num_replicas: int = 1,
        *,
        timeout_s: float = 180.0,
        on_change: Callable[[str], None] | None = None,
    ) -> None:
        """Wait until the control plane answers and that many replicas take work.

        Args:
            num_replicas: Of the served model.
            timeout_s: Limit of the whole wait.
            on_change: Told what is there, each time that it is more.

        Raises:
            ProcessDiedError: a process ended instead.
            TimeoutError: with what was there at the end.
        """
        ready = _Readiness(self, on_change)
        try:
            async with asyncio.timeout(timeout_s):
                await self.processes.guard(ready.wait_for(num_replicas))
        except TimeoutError as error:
            raise TimeoutError(
                f"{num_replicas} replicas were not ready within {timeout_s:.0f} s: {ready.seen}"
            ) from error

    async def aclose(self) -> None:
        try:
            await self.processes.aclose()
        finally:
            self._claims.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


class _Readiness:
    """Asks the health service, then counts replicas."""

    def __init__(self, stack: ServingStack, on_change: Callable[[str], None] | None) -> None:
        self._stack = stack
        self._on_change = on_change
        self.seen = "the control plane does not answer"

    async def wait_for(self, num_replicas: int) -> None:
        async with (
            grpc.aio.insecure_channel(self._stack.address) as channel,
            self._stack.client() as client,
        ):
            health: Any = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest()
            while True:
                try:
                    answer = await health.Check(request, timeout=2.0)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        break
                except grpc.aio.AioRpcError:
                    # A channel that failed once waits before it dials again; a new process is
                    # better asked anew than after that pause.
                    await channel.close()
                    channel = grpc.aio.insecure_channel(self._stack.address)
                    health = health_pb2_grpc.HealthStub(channel)
                await asyncio.sleep(_READY_POLL_S)
            self._see("the control plane answers")
            while (ready := await self._num_ready(client)) < num_replicas:
                if ready:
                    self._see(f"{ready} of {num_replicas} replicas ready")
                await asyncio.sleep(_READY_POLL_S)
            self._see(f"{ready} of {num_replicas} replicas ready")
            await channel.close()

    async def _num_ready(self, client: AsyncClient) -> int:
        models = await client.models(timeout_s=5.0)
        return sum(m.ready_replicas for m in models if m.name == self._stack.config.model_name)

    def _see(self, what: str) -> None:
        if what != self.seen:
            self.seen = what
            if self._on_change is not None:
                self._on_change(what)


def _choose_ports(claims: PortClaims, *, random: bool) -> Ports:
    if random:
        return Ports(claims.any_free(), claims.any_free(), claims.any_free())
    public = claims.next_free(PUBLIC_PORT)
    worker = claims.next_free(max(WORKER_PORT, public + 1))
    return Ports(public, worker, claims.next_free(METRICS_PORT))


def choose_device(wanted: str) -> str:
    """Turn "auto", "cpu" or "cuda" into one of the last two.

    Raises:
        ValueError: no such device, or "cuda" on a machine without a GPU.
    """
    if wanted not in ("auto", "cpu", "cuda"):
        raise ValueError(f"DEVICE must be auto, cpu or cuda, got {wanted!r}")
    if wanted == "cpu":
        return "cpu"
    has_gpu = _has_gpu()
    if wanted == "cuda" and not has_gpu:
        raise ValueError(
            "DEVICE=cuda, but `nvidia-smi -L` finds no GPU on this machine; use DEVICE=cpu"
        )
    return "cuda" if has_gpu else "cpu"


def _has_gpu() -> bool:
    if shutil.which("nvidia-smi") is None:
        return False
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and "GPU" in done.stdout
