"""Control planes and workers of a world in virtual time, and the streams between them.

Nothing is delivered, executed or noticed before the test says so; only the control planes' own
timers go by themselves.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fake_store import FakeServer, FakeStore
from virtual_time import VirtualTimeLoop
from world_parts import (
    BLOCK_SIZE,
    FINGERPRINT,
    HOLD_S,
    LEASE_S,
    MODEL,
    REPLICA_WAIT_S,
    STEP_TIMEOUT_S,
    Client,
    Connection,
    Plane,
    Worker,
)

from control_plane.block_hash import BlockHasher
from control_plane.cluster import Cluster
from control_plane.cluster_config import ClusterConfig
from control_plane.errors import Code, ServingError
from control_plane.replica import read_hello
from control_plane.run_clock import RunClock
from data_plane.stream_protocol import Phase, ProtocolViolation
from protos.pagewire.v1 import worker_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

# With these a worker process exits instead of dialling again.
_FOR_GOOD = (Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION, Code.UNIMPLEMENTED)
# What a worker may find wrong with messages that were lost, and with a term that is fenced off.
_VIOLATIONS = ("STALE_TERM", "UNEXPECTED_MESSAGE")


class WorldBase:
    """Time, the store, control planes, workers and the streams between them."""

    def __init__(
        self,
        *,
        num_workers: int = 1,
        num_blocks: int = 20,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 32,
        lookahead: int = 2,
        return_wait_s: float = 0.0,
    ) -> None:
        self.loop = VirtualTimeLoop()
        self.server = FakeServer()
        self.lookahead = lookahead
        self.return_wait_s = return_wait_s
        self.planes: list[Plane] = []
        self.connections: list[Connection] = []
        self.clients: list[Client] = []
        self.problems: list[BaseException] = []
        self.terms: dict[str, int] = {}
        # Block hash -> what the slots of a block of that name must hold.
        self.contents: dict[bytes, list[int]] = {}
        self._arrivals = 0
        self._hasher = BlockHasher(
            deployment_seed=ClusterConfig().deployment.encode(),
            model_fingerprint=FINGERPRINT,
            block_size=BLOCK_SIZE,
        )
        self.workers = [
            Worker(i, num_blocks, max_num_seqs, max_num_batched_tokens) for i in range(num_workers)
        ]

    def close(self) -> None:
        self.problems.clear()
        for plane in self.planes:
            if plane.is_alive:
                self.kill_plane(plane)
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.run()
        self.loop.close()

    def run(self, seconds: float = 0.0) -> None:
        """Let the control planes and clients do what they have to do within so much time."""
        self.loop.run_for(seconds)
        if self.problems:
            raise self.problems[0]

    def _do(self, work: object) -> object:
        """Run a coroutine that waits for nothing but virtual time."""

        async def noted() -> object:
            try:
                return await work  # type: ignore[misc]
            except BaseException as error:
                self.problems.append(error)
                raise

        task = self.loop.create_task(noted())
        for _ in range(600):
            self.run(0.0 if task.done() else 0.1)
            if task.done():
                return task.result()
        raise AssertionError(f"{work} does not end")

    def _call(self, function: Callable[..., object], *args: object) -> None:
        """Call something on the running loop, and let everything that follows from it happen."""

        def noted() -> None:
            try:
                function(*args)
            except Exception as error:
                self.problems.append(error)

        self.loop.call_soon(noted)
        self.run()

    # Control planes.

    def start_plane(self) -> Plane:
        async def build() -> Plane:
            store = FakeStore(self.server)
            cluster = Cluster(
                ClusterConfig(
                    lookahead=self.lookahead,
                    lease_s=LEASE_S,
                    step_timeout_s=STEP_TIMEOUT_S,
                    replica_wait_s=REPLICA_WAIT_S,
                    adoption_wait_s=HOLD_S,
                    return_wait_s=self.return_wait_s,
                    term_gather_s=0.0,
                    audit_interval_s=0.0,
                ),
                [MODEL],
                store,
                clock=RunClock(monotonic=self.loop.time, suspended=lambda: 0.0),
            )
            await store.start()
            await cluster.start()
            return Plane(f"p{len(self.planes)}", cluster, store)

        plane: Plane = self._do(build())  # type: ignore[assignment]
        self.planes.append(plane)
        self.loop.create_task(self._watch(plane))
        self.loop.create_task(self._note_end(plane))
        return plane

    async def _note_end(self, plane: Plane) -> None:
        await plane.cluster.superseded()
        plane.has_stepped_back = True

    async def _watch(self, plane: Plane) -> None:
        try:
            await plane.cluster.failed()
        except Exception as error:
            self.problems.append(error)

    def kill_plane(self, plane: Plane) -> None:
        """kill -9: peers see a broken stream, what the store does not have is gone."""
        plane.is_alive = False
        self._leave_clients(plane)
        for connection in self.connections_of(plane):
            self._worker_leaves(connection)
        self._do(plane.cluster.stop())
        self._do(plane.store.close())

    def cut_plane(self, plane: Plane) -> None:
        """A network that is cut: peers hear of it, the plane hears nothing, for now."""
        plane.is_cut = True
        self._leave_clients(plane)
        for connection in self.connections_of(plane):
            self._worker_leaves(connection)

    def mend_plane(self, plane: Plane) -> None:
        plane.is_cut = False
        for request in plane.ghosts:
            self._call(plane.cluster.abort, request)
        plane.ghosts.clear()

    def connections_of(self, plane: Plane) -> list[Connection]:
        return [c for c in self.connections if c.plane is plane]

    # Streams of workers.

    def attach(self, worker: Worker, plane: Plane) -> Connection | None:
        """The worker dials, if it is a process that would."""
        if worker.connection is not None or worker.has_exited or not plane.takes_requests:
            return None
        connection = Connection(worker, plane, len(self.connections))
        self.connections.append(connection)
        worker.connection = connection
        hello = worker.hello().hello
        self.loop.create_task(self._greet(connection, hello))
        self.run()
        return connection

    async def _greet(self, connection: Connection, hello: worker_pb2.Hello) -> None:
        fleet = connection.plane.cluster.fleet
        try:
            facts = read_hello(hello, peer="test")
            engine = await fleet.attach(facts, connection)
        except ServingError as error:
            connection.end(error)
            return
        except asyncio.CancelledError:
            # The control plane ends before it has settled its term.
            connection.end(None)
            return
        except Exception as error:
            self.problems.append(error)
            raise
        connection.engine = engine
        if connection.is_left and not connection.plane.is_cut:
            fleet.stream_closed(engine, connection)

    def break_stream(self, worker: Worker, *, control_notices: bool = True) -> None:
        """The worker loses its stream; the control plane hears of it now, or by its lease."""
        connection = worker.connection
        if connection is None:
            return
        self._worker_leaves(connection)
        if control_notices:
            self._control_notices(connection)

    def _worker_leaves(self, connection: Connection) -> None:
        connection.is_left = True
        connection.to_worker.clear()
        worker = connection.worker
        if worker.connection is connection:
            worker.connection = None
            worker.disconnect()

    def _control_notices(self, connection: Connection) -> None:
        """The transport tells the control plane that the worker's side is gone."""
        connection.to_control.clear()
        if connection.engine is not None and connection.plane.takes_requests:
            fleet = connection.plane.cluster.fleet
            self._call(fleet.stream_closed, connection.engine, connection)

    def crash(self, worker: Worker, *, control_notices: bool = True) -> None:
        self.break_stream(worker, control_notices=control_notices)
        worker.crash()
        self.terms.pop(worker.name, None)

    def drain(self, worker: Worker, grace_s: float) -> None:
        """SIGTERM. It leaves once idle; the world does not enforce its grace."""
        connection = worker.connection
        if connection is None or worker.protocol.phase is Phase.AWAITING_WELCOME:
            return
        drain = worker_pb2.Drain()
        drain.grace.FromNanoseconds(int(grace_s * 1e9))
        connection.to_control.append(worker_pb2.WorkerMessage(drain=drain))
        worker.is_draining = True

    def deliver_down(self, worker: Worker, count: int = 1_000) -> None:
        """Messages of the control plane reach the worker."""
        for _ in range(count):
            connection = worker.connection
            if connection is None or not connection.to_worker or worker.is_hung:
                return
            item = connection.to_worker.popleft()
            if not isinstance(item, worker_pb2.ControlMessage):
                self._end_worker(worker, connection, item)
                return
            try:
                connection.to_control.extend(worker.feed(item))
            except ProtocolViolation as violation:
                if violation.reason not in _VIOLATIONS:
                    raise
                self.break_stream(worker)

    def _end_worker(
        self, worker: Worker, connection: Connection, error: ServingError | None
    ) -> None:
        self._worker_leaves(connection)
        if worker.is_draining or (
            error is not None and (error.reason == "SUPERSEDED" or error.code in _FOR_GOOD)
        ):
            worker.has_exited = True
        self._control_notices(connection)

    def run_steps(self, worker: Worker, count: int = 1_000) -> None:
        """The worker executes what it was ordered."""
        for _ in range(count):
            connection = worker.connection
            if connection is None or worker.is_hung or not worker.ordered:
                break
            connection.to_control.extend(worker.run_step())
        if worker.is_draining and worker.protocol.is_idle and worker.connection is not None:
            connection = worker.connection
            self.deliver_up(worker)
            self._worker_leaves(connection)
            worker.has_exited = True
            self._control_notices(connection)

    def deliver_up(self, worker: Worker, count: int = 1_000) -> None:
        """Messages of the worker reach the control plane, over its latest stream."""
        for _ in range(count):
            connection = worker.connection
            if connection is None or connection.engine is None or not connection.to_control:
                break
            message = connection.to_control.popleft()
            if connection.plane.takes_requests:
                # Also over a stream that has ended: it may have been read by then.
                fleet = connection.plane.cluster.fleet
                self._call(fleet.receive, connection.engine, connection, message)
        self.run()

    def round_trip(self, worker: Worker) -> None:
        """Everything there, executed, and everything back."""
        self.run()
        self.deliver_down(worker)
        self.run_steps(worker)
        self.deliver_up(worker)

    def wait(self, seconds: float, *, heartbeats: bool = True) -> None:
        """Time passes; workers that are not hung heartbeat."""
        left = seconds
        while left > 0:
            beat = min(left, LEASE_S / 3)
            self.run(beat)
            left -= beat
            for worker in self.workers if heartbeats else ():
                connection = worker.connection
                if connection is not None and not worker.is_hung:
                    heartbeat = worker_pb2.WorkerMessage(heartbeat=worker_pb2.Heartbeat())
                    connection.to_control.append(heartbeat)
                    self.deliver_up(worker)

    def _leave_clients(self, plane: Plane) -> None:
        """The calls of this plane's clients break."""
        for client in self.clients:
            if client.plane is plane and client.request is not None:
                plane.ghosts.append(client.request)
                if client.reader is not None:
                    client.reader.cancel()
                client.plane = client.request = client.reader = None
