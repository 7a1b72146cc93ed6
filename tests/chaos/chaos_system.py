"""The system under faults: real processes, with a link of the suite's own on every connection.

    clients ──client links──► control plane ◄──worker links── workers
                                    └──store link──► Valkey

Owns: processes and links, what of them serves at the moment, their logs. Does not know: which fault
comes when, what is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Self

from chaos.chaos_model import MODEL_NAME
from chaos.forked_processes import ForkingGroup, Zygote
from chaos.process_logs import LogSummary
from pagewire_client import AsyncClient, PagewireError
from valkey_process import ValkeyProcess

from demo.link import Link
from demo.processes import child_environment
from demo.stack import ServingStack, StackConfig

if TYPE_CHECKING:
    from types import TracebackType

    from demo.leftovers import RunDirectory
    from demo.processes import ManagedProcess
    from protos.pagewire.v1 import inference_pb2

ROOT = Path(__file__).resolve().parents[2]
CLIENT_LINKS = ("clients-a", "clients-b")
STORE_LINK = "store-link"
# Too few blocks for all that could run: known prefixes are evicted, sequences preempted.
_WORKER_ARGS = (
    *("--num-blocks", "140", "--max-num-seqs", "12", "--max-num-batched-tokens", "256"),
    *("--threads", "1"),
)
_POLL_S = 0.2
_STATS_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemConfig:
    """Sizes and times of the system. Times in seconds.

    Attributes:
        base_dir: Logs and the store's data.
        model_dir: Of `chaos_model`.
        num_workers: How many.
        lease_s: After which a silent worker counts as gone.
        grace_s: Of a SIGTERM, on either side.
        replica_wait_s: How long requests wait for a worker.
    """

    base_dir: Path
    model_dir: Path
    num_workers: int = 2
    lease_s: float = 3.0
    grace_s: float = 3.0
    replica_wait_s: float = 90.0


class StoreContents(Enum):
    """What a store that was killed comes back with."""

    AS_WRITTEN = "as written"
    NONE = "none"
    FROM_BACKUP = "from a backup"


@dataclass(slots=True)
class WorkerSlot:
    """A place for a worker: its processes come and go, its link stays.

    Attributes:
        name: Of the slot, which is also the first worker id.
        worker_id: Of the present process.
        process: None while there is none.
    """

    name: str
    link: Link
    worker_id: str
    process: ManagedProcess | None = None


class ChaosSystem:
    """The system. An async context manager: nothing outlives the block.

    Attributes:
        stats: What the control plane last said of itself; None while it does not answer.
        control_plane: None while there is none.
        logs: What was read from logs of processes that have ended.
    """

    def __init__(self, config: SystemConfig, registry: RunDirectory | None = None) -> None:
        self.config = config
        self.store = ValkeyProcess(config.base_dir)
        self.store_link = Link(self.store.port)
        self.stack = ServingStack(
            _stack_config(config, store="redis://127.0.0.1:1/0"), registry=registry
        )
        environment = child_environment(ROOT, os.environ)
        zygotes = {
            module: Zygote(module, config.model_dir, cwd=ROOT, env=environment)
            for module in ("control_plane", "data_plane")
        }
        self._processes = self.stack.processes = ForkingGroup(
            zygotes,
            log_dir=config.base_dir / "logs",
            cwd=ROOT,
            env=environment,
            registry=registry,
            grace_s=self.stack.config.grace_s,
        )
        self.client_links = {name: Link(self.stack.ports.public) for name in CLIENT_LINKS}
        self.slots = {
            name: WorkerSlot(name, Link(self.stack.ports.worker), name)
            for name in (f"worker-{i}" for i in range(config.num_workers))
        }
        self.control_plane: ManagedProcess | None = None
        self.stats: inference_pb2.GetStatsResponse | None = None
        self.logs = LogSummary()
        self._incarnations = itertools.count(1)
        self._exit = contextlib.AsyncExitStack()

    @property
    def links(self) -> dict[str, Link]:
        """All of them by name; a worker's has its slot's."""
        return {
            **{f"link of {slot.name}": slot.link for slot in self.slots.values()},
            **self.client_links,
            STORE_LINK: self.store_link,
        }

    def client(self, link: str) -> AsyncClient:
        return AsyncClient(f"127.0.0.1:{self.client_links[link].port}")

    # Life.

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        self.thaw_all()
        await self._exit.aclose()
        await self.stack.aclose()
        for zygote in self._processes.zygotes.values():
            zygote.close()
        await self.store.kill()

    async def _start(self) -> None:
        self.config.base_dir.mkdir(parents=True, exist_ok=True)
        await self.store.start()
        for link in self.links.values():
            await self._exit.enter_async_context(link)
        self.stack.config = _stack_config(
            self.config, store=f"redis://127.0.0.1:{self.store_link.port}/0"
        )
        self.start_control_plane()
        for slot in self.slots.values():
            self.start_worker(slot)
        watching = asyncio.create_task(self._watch(), name="watch")

        async def stop_watching() -> None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

        self._exit.push_async_callback(stop_watching)
        await self.stack.processes.guard(self.wait_until_whole())

    def start_control_plane(self, *, forks: bool = True) -> None:
        """Start it in the midst of a run.

        Args:
            forks: From a zygote; otherwise with all that a start costs.
        """
        self.stats = None
        self._processes.forks = forks
        self.control_plane = self.stack.start_control_plane()
        self._processes.forks = True

    def start_worker(self, slot: WorkerSlot, *, new_id: bool = False) -> None:
        """Start a process in an empty slot.

        Args:
            slot: Where.
            new_id: It is somebody else, as where a scheduler of containers starts it.
        """
        if new_id:
            slot.worker_id = f"{slot.name}-{next(self._incarnations)}"
        slot.process = self.stack.start_worker(slot.worker_id, control_plane_port=slot.link.port)

    async def forget(self, process: ManagedProcess) -> list[str]:
        """Let go of a process that has ended; gives what its log may not say.

        The log is kept under a name of its own.
        """
        process.is_expected_to_end = True
        await self.stack.processes.stop(process)
        found = self.logs.read(process.log_path)
        kept = process.log_path.with_suffix(f".{next(self._incarnations)}.log")
        shutil.move(process.log_path, kept)
        return found

    async def revive_control_plane(self) -> list[str]:
        """Start the control plane again if it made way for another one, as a supervisor would.

        It does so when a worker has seen a higher term than it has, which a wiped store can cause.

        Returns:
            What its log may not say.
        """
        process = self.control_plane
        if process is None or process.is_expected_to_end or not stepped_back(process):
            return []
        process.is_expected_to_end = True
        found = await self.forget(process)
        self.start_control_plane()
        return found

    def read_live_logs(self) -> list[str]:
        """What the logs of those that run now may not say."""
        paths = {process.log_path for process in self.stack.processes.processes}
        return [line for path in sorted(paths) if path.exists() for line in self.logs.read(path)]

    async def restart_store(self, contents: StoreContents, *, after_s: float) -> None:
        """Kill the store and start it again.

        Args:
            contents: With what it comes back.
            after_s: How long it is away.
        """
        await self.store.kill()
        data, backup = self.config.base_dir / "data", self.config.base_dir / "backup"
        if contents is not StoreContents.AS_WRITTEN:
            shutil.rmtree(data, ignore_errors=True)
        elif not backup.exists():
            shutil.copytree(data, backup)
        if contents is StoreContents.FROM_BACKUP and backup.exists():
            # The next one begins with what is there then.
            backup.rename(data)
        await asyncio.sleep(after_s)
        await self.store.start()

    # What serves.

    @property
    def serving_workers(self) -> set[str]:
        """Ids of workers that are attached, as the control plane sees it."""
        replicas = self.stats.replicas if self.stats is not None else ()
        return {worker.worker_id for replica in replicas for worker in replica.workers}

    def is_serving(self, slot: WorkerSlot) -> bool:
        return slot.process is not None and slot.worker_id in self.serving_workers

    @property
    def is_whole(self) -> bool:
        """Whether every worker that runs is attached."""
        return all(self.is_serving(slot) for slot in self.slots.values() if slot.process)

    @property
    def is_free(self) -> bool:
        """Whether nothing runs, waits or holds a block, on any replica that is attached."""
        return self.stats is not None and holds_nothing(self.stats)

    def thaw_all(self) -> None:
        """Undo everything that links do, without waiting for anything."""
        for link in self.links.values():
            link.thaw()
            link.mend()
            link.set_round_trip(0.0)

    async def wait_until_whole(self, timeout_s: float = 120.0) -> None:
        """Wait until every worker that runs is attached.

        Raises:
            TimeoutError: One is not.
        """
        async with asyncio.timeout(timeout_s):
            while not self.is_whole:  # noqa: ASYNC110 - what serves is polled
                await asyncio.sleep(_POLL_S)

    async def _watch(self) -> None:
        """Keep `stats`, asking directly: what is done to links does not count."""
        while True:
            control_plane = self.control_plane
            async with AsyncClient(self.stack.address, resume=None) as client:
                while self.control_plane is control_plane:
                    try:
                        stats = await client.stats(timeout_s=_STATS_TIMEOUT_S)
                    except PagewireError:
                        self.stats = None
                        # A channel that failed waits before it dials again.
                        break
                    if self.control_plane is control_plane:
                        self.stats = stats
                    await asyncio.sleep(_POLL_S)
            await asyncio.sleep(_POLL_S)


def holds_nothing(stats: inference_pb2.GetStatsResponse) -> bool:
    """Whether nothing runs, waits or holds a block."""
    return stats.num_requests_unplaced == 0 and all(
        replica.free_blocks == replica.usable_blocks
        and replica.num_requests_running == 0
        and replica.num_requests_waiting == 0
        for replica in stats.replicas
    )


def stepped_back(process: ManagedProcess) -> bool:
    """Whether a control plane ended in good order because another one seemed to be active."""
    return process.returncode == 0 and "a newer control plane is active" in process.log_tail(1000)


def _stack_config(config: SystemConfig, *, store: str) -> StackConfig:
    grace = ("--grace-s", str(config.grace_s))
    return StackConfig(
        root=ROOT,
        base_dir=config.base_dir,
        model_dir=config.model_dir,
        model_name=MODEL_NAME,
        python=sys.executable,
        environment=os.environ,
        store=store,
        random_ports=True,
        control_plane_args=(
            *("--lease-s", str(config.lease_s)),
            *("--replica-wait-s", str(config.replica_wait_s)),
            *grace,
        ),
        worker_args=(*_WORKER_ARGS, *grace),
        grace_s=20.0,
    )


def undisturbed_config(base_dir: Path, model_dir: Path) -> StackConfig:
    """One worker that nobody touches, computing every prompt in full."""
    return StackConfig(
        root=ROOT,
        base_dir=base_dir,
        model_dir=model_dir,
        model_name=MODEL_NAME,
        python=sys.executable,
        environment=os.environ,
        store="memory://",
        random_ports=True,
        # As long as it takes: nothing of it is to be lost on a busy machine.
        control_plane_args=("--no-prefix-caching", "--lease-s", "120"),
        worker_args=("--num-blocks", "1200", "--max-num-seqs", "8", "--threads", "1"),
        grace_s=20.0,
    )
