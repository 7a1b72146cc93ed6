"""A control plane and simulated workers as processes, and what they have used of the machine.

Owns: starting them, pinning, reading processor time and the server's own counters. Used by
`bench_fleet.py` and `bench_pipeline.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "clients" / "python")]

from pagewire_client.bench.calls import Access  # noqa: E402 - these need the path
from pagewire_client.bench.config import BenchConfig  # noqa: E402
from pagewire_client.bench.load import Load  # noqa: E402

from demo.model import ensure_demo_model  # noqa: E402
from demo.stack import ServingStack, StackConfig  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from types import TracebackType

    from pagewire_client import AsyncClient

    from demo.processes import ManagedProcess

MODEL = "simulated"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Counters:
    """At one moment.

    Attributes:
        at_s: Monotonic.
        cpu_s: Processor time of the control plane, all threads.
        starved_s: Time its main thread was ready to run and had no core.
        worker_cpu_s: Processor time of the simulated workers.
        tokens: Output tokens of all replicas.
        plans: Plans sent to all of them: steps.
        plan_bytes: Of those.
        running: Sequences that hold a row.
    """

    at_s: float
    cpu_s: float
    starved_s: float
    worker_cpu_s: float
    tokens: int
    plans: int
    plan_bytes: int
    running: int


class SimulatedStack:
    """Processes of one deployment; an async context manager."""

    def __init__(
        self,
        *,
        profile: str,
        num_workers: int = 1,
        num_processes: int = 1,
        control_plane_args: tuple[str, ...] = (),
        worker_args: tuple[str, ...] = (),
        pinned_to: int | None = None,
        worker_port: Callable[[int], Awaitable[int]] | None = None,
    ) -> None:
        """Prepare it.

        Args:
            profile: Of --simulate.
            num_workers: Over all processes.
            num_processes: That simulate them.
            control_plane_args: Further flags.
            worker_args: Further flags.
            pinned_to: The only core of the control plane.
            worker_port: From the control plane's worker port to the one that workers dial.
        """
        self._num_workers = num_workers
        self._num_processes = num_processes
        self._profile = profile
        self._pinned_to = pinned_to
        self._worker_port = worker_port
        self._logs = tempfile.TemporaryDirectory(prefix="pagewire-bench-")
        self._exits = contextlib.AsyncExitStack()
        self._stack = ServingStack(
            StackConfig(
                root=ROOT,
                base_dir=Path(self._logs.name),
                model_dir=ensure_demo_model(ROOT / ".pagewire" / "models", progress=print),
                model_name=MODEL,
                python=sys.executable,
                environment=dict(os.environ),
                store="memory://",
                random_ports=True,
                control_plane_args=("--log-level", "warning", *control_plane_args),
                worker_args=worker_args,
            )
        )
        self.control_plane: ManagedProcess | None = None
        self.client: AsyncClient | None = None

    @property
    def address(self) -> str:
        return self._stack.address

    async def __aenter__(self) -> Self:
        stack = await self._exits.enter_async_context(self._stack)
        self.control_plane = stack.start_control_plane()
        if self._pinned_to is not None:
            # Before it has any further thread: those inherit it.
            os.sched_setaffinity(self.control_plane.pid, {self._pinned_to})
        port = stack.ports.worker
        if self._worker_port is not None:
            port = await self._worker_port(port)
        for number in range(self._num_processes):
            mine = self._num_workers // self._num_processes
            mine += number < self._num_workers % self._num_processes
            stack.start_worker(
                f"process-{number}",
                *("--simulate", self._profile, "--simulate-workers", str(mine)),
                control_plane_port=port,
            )
        await stack.wait_until_ready(self._num_workers, timeout_s=300.0)
        self.client = await self._exits.enter_async_context(stack.client())
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._exits.aclose()
        self._logs.cleanup()

    async def counters(self) -> Counters:
        assert self.client is not None
        assert self.control_plane is not None
        stats = await self.client.stats(timeout_s=60.0)
        replicas = stats.replicas
        return Counters(
            at_s=time.monotonic(),
            cpu_s=cpu_s(self.control_plane.pid),
            starved_s=starved_s(self.control_plane.pid),
            worker_cpu_s=sum(cpu_s(worker.pid) for worker in self._stack.workers.values()),
            tokens=sum(replica.generation_tokens for replica in replicas),
            plans=sum(replica.plans_sent for replica in replicas),
            plan_bytes=sum(replica.plan_bytes for replica in replicas),
            running=sum(replica.num_requests_running for replica in replicas),
        )

    async def until_running(self, count: int, *, timeout_s: float = 300.0) -> None:
        """Wait until so many sequences hold a row."""
        give_up_at_s = time.monotonic() + timeout_s
        while (running := (await self.counters()).running) != count:
            self._stack.processes.check()
            if time.monotonic() > give_up_at_s:
                raise TimeoutError(f"{running} sequences run after {timeout_s:g} s, not {count}")
            await asyncio.sleep(0.2)

    def load(self, **parameters: object) -> Load:
        """A load for this server; `run` it."""
        values = {"server": self.address, "vocab_size": 40_000, "warmup": 0, **parameters}
        return Load(BenchConfig(**values), Access(server=self.address))  # type: ignore[arg-type]

    @contextlib.asynccontextmanager
    async def decoding(self, num_rows: int, *, max_tokens: int) -> AsyncIterator[Load]:
        """So many sequences decode, over GenerateBatch, until the block ends or they do."""
        load = self.load(
            via="batch",
            arrivals="burst",
            num_requests=num_rows,
            concurrency=0,
            prompt_lengths="16",
            output_lengths=str(max_tokens),
            timeout_s=3600.0,
            channels=4,
        )
        task = asyncio.create_task(load.run())
        try:
            await self.until_running(num_rows)
            yield load
        finally:
            load.stop()
            await task
            await self.until_running(0)


def cpu_s(pid: int) -> float:
    """Processor time of a process, all threads, in steps of a clock tick."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def starved_s(pid: int) -> float:
    """Time that a process's main thread waited for a core."""
    return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
