"""What the world of `cluster_world` is made of: workers, connections, control planes, clients."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fake_model import FakeModelRunner, _FakeRow
from fake_worker import FAKE_FINGERPRINT, StepwiseWorker

from control_plane.served_model import ServedModel
from protos.model_fingerprint import served_fingerprint

if TYPE_CHECKING:
    import asyncio

    from fake_store import FakeStore

    from control_plane.cluster import Cluster
    from control_plane.engine import Engine
    from control_plane.errors import ServingError
    from control_plane.request import FinishReason, Request
    from protos.pagewire.v1 import worker_pb2

VOCAB_SIZE = 512
EOS = 2
BLOCK_SIZE = 4
MAX_MODEL_LEN = 48
LEASE_S = 9.0
STEP_TIMEOUT_S = 30.0
REPLICA_WAIT_S = 20.0
HOLD_S = 1.0
MODEL = ServedModel(
    name="fake",
    base_fingerprint=FAKE_FINGERPRINT,
    max_model_len=MAX_MODEL_LEN,
    vocab_size=VOCAB_SIZE,
    eos_token_ids=(EOS,),
)
FINGERPRINT = served_fingerprint(FAKE_FINGERPRINT, kv_dtype="float32")


class CheckingRunner(FakeModelRunner):
    """Refuses to write a block that a second row holds: a shared block is never written."""

    def _write(self, state: _FakeRow, start: int, tokens: list[int]) -> None:
        last = start + len(tokens) - 1
        for block_id in state.table[start // self.block_size : last // self.block_size + 1]:
            holders = [row for row, other in self._rows.items() if block_id in other.table]
            assert len(holders) == 1, f"block {block_id} is written and held by rows {holders}"
        super()._write(state, start, tokens)

    def contents(self, block_id: int) -> list[int]:
        return self._kv[block_id].tolist()


@dataclass(eq=False)
class Client:
    """A request, what an undisturbed run gives, and what came back over all its calls."""

    name: str
    prompt: list[int]
    max_total: int
    expected: list[int]
    expected_reason: int
    temperature: float
    seed: int
    salt: str
    priority: int
    stop_after: int | None
    received: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    error: ServingError | None = None
    has_left: bool = False
    plane: Plane | None = None
    request: Request | None = None
    reader: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        return self.has_left or self.reason is not None or self.error is not None


@dataclass(eq=False)
class Plane:
    """A control plane process. `is_cut`: alone with its store, and it does not know yet."""

    name: str
    cluster: Cluster
    store: FakeStore
    is_alive: bool = True
    is_cut: bool = False
    has_stepped_back: bool = False
    ghosts: list[Request] = field(default_factory=list)

    @property
    def takes_requests(self) -> bool:
        return self.is_alive and not self.is_cut


class Connection:
    """One Attach stream: both queues, and what either side knows of its end."""

    def __init__(self, worker: Worker, plane: Plane, number: int) -> None:
        self.worker = worker
        self.plane = plane
        self.stream_id = f"{plane.name}-{number}"
        self.engine: Engine | None = None
        self.is_ended = False  # by the control plane
        self.is_left = False  # by the worker
        self.to_worker: deque[worker_pb2.ControlMessage | ServingError | None] = deque()
        self.to_control: deque[worker_pb2.WorkerMessage] = deque()

    # What the engine uses.

    def send(self, message: worker_pb2.ControlMessage) -> None:
        if not self.is_ended:
            self._put(message)

    def end(self, error: ServingError | None) -> None:
        if not self.is_ended:
            self._put(error)
            self.is_ended = True

    def _put(self, item: worker_pb2.ControlMessage | ServingError | None) -> None:
        if not self.is_left and self.plane.takes_requests:
            self.to_worker.append(item)


class Worker(StepwiseWorker):
    """A worker process of the world; `crash` makes it a new one."""

    def __init__(self, index: int, num_blocks: int, max_num_seqs: int, budget: int) -> None:
        self.name = f"w{index}"
        self.connection: Connection | None = None
        self.is_hung = False
        self.has_exited = False
        self.is_draining = False
        super().__init__(
            CheckingRunner(num_blocks=num_blocks, block_size=BLOCK_SIZE, vocab_size=VOCAB_SIZE),
            worker_id=self.name,
            replica_id=f"r{index}",
            model_fingerprint=FINGERPRINT,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
        )

    def crash(self) -> None:
        super().crash()
        self.is_hung = self.has_exited = self.is_draining = False
