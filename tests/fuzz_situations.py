"""Moments of a replica's life at which a message comes in, to be met again and again.

A scenario is played by seed, a real `EngineCore` with a real worker, through plans in flight,
stops, aborts, resumes, Resets and a check of the index. At each message from either side the
receiver is frozen; thawed, it stands at exactly that moment.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import random
import struct
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fake_model import FakeModelRunner, expected_output
from fake_worker import FAKE_FINGERPRINT, StepwiseWorker

from control_plane.cluster_config import ClusterConfig
from control_plane.engine_config import EngineConfig
from control_plane.engine_core import EngineCore
from control_plane.replica import ReplicaShape, build_scheduler, read_hello
from control_plane.request import FinishReason, Request, SamplingParams
from control_plane.served_model import ServedModel
from data_plane.step_work import RowSampling
from protos.pagewire.v1 import worker_pb2

if TYPE_CHECKING:
    from google.protobuf.message import Message

VOCAB_SIZE, EOS, MAX_MODEL_LEN = 512, 2, 48
NUM_BLOCKS, BLOCK_SIZE, MAX_NUM_SEQS, BUDGET = 22, 4, 4, 24
MODEL = ServedModel(
    name="fake",
    base_fingerprint=FAKE_FINGERPRINT,
    max_model_len=MAX_MODEL_LEN,
    vocab_size=VOCAB_SIZE,
    eos_token_ids=(EOS,),
)

copyreg.pickle(struct.Struct, lambda one: (struct.Struct, (one.format,)))


@dataclass(eq=False)
class Output:
    """Where a core's messages and news go; frozen together with it."""

    sent: list[bytes] = field(default_factory=list)
    num_tokens: int = 0
    failed: list[str] = field(default_factory=list)

    def send(self, message: Message) -> None:
        self.sent.append(message.SerializeToString())

    def started(self, request: Request) -> None:
        pass

    def advance(self, update: Any) -> None:
        self.num_tokens += len(update.token_ids)

    def fail(self, request: Request, error: Exception) -> None:
        self.failed.append(request.req_id)

    def index_changed(self, changes: object) -> None:
        pass


def freeze(thing: object) -> bytes:
    """Everything that a thing knows, as bytes that are equal if nothing changed in it."""
    return pickle.dumps(thing, protocol=5)


@dataclass
class Situation:
    """One moment.

    Attributes:
        receiver: Frozen: (core, output), or the worker's protocol.
        message: What comes in.
        play: Number of the message in its scenario, to come here by playing.
    """

    receiver: bytes
    message: Message
    play: int


class _HereError(Exception):
    """The message at which a scenario was to stop is about to be delivered."""


class Scenario:
    """A replica at work, by seed. Messages are numbered in both directions together.

    Args:
        seed: Decides everything.
        is_recorded: Whether every message's moment is kept in `for_control` and `for_worker`.
        stop_at: The message before which `play` stops, with everything as it was then.
    """

    def __init__(self, seed: int, *, is_recorded: bool = False, stop_at: int | None = None) -> None:
        self.rng = random.Random(seed)
        self.output = Output()
        self.worker = StepwiseWorker(
            FakeModelRunner(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, vocab_size=VOCAB_SIZE),
            epoch=bytes(16),
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=BUDGET,
            max_model_len=MAX_MODEL_LEN,
        )
        facts = read_hello(self.worker.hello().hello, peer="test")
        config = EngineConfig(
            lookahead=2, lease_s=10.0, step_timeout_s=60.0,
            audit_interval_s=0.0,
            max_lookahead=0,
        )  # fmt: skip
        self._shape = ReplicaShape.of_ranks([facts])
        self._config = config
        self.core = self._new_core()
        self.requests: list[tuple[Request, list[int]]] = []
        self.to_worker: deque[worker_pb2.ControlMessage] = deque()
        self.to_control: deque[worker_pb2.WorkerMessage] = deque()
        self.num_messages = 0
        self.for_control: list[Situation] = []
        self.for_worker: list[Situation] = []
        self._is_recorded = is_recorded
        self._stop_at = stop_at
        self._attach(asks=False)

    def _new_core(self) -> EngineCore:
        scheduler = build_scheduler(self._shape, MODEL, ClusterConfig())
        return EngineCore(self._config, scheduler, self.output)

    def _attach(self, *, asks: bool) -> None:
        welcome = worker_pb2.Welcome(
            term=1, stream_id="s", num_blocks=NUM_BLOCKS, lookahead=2, send_generations=asks
        )
        welcome.lease.FromSeconds(10)
        self.to_worker.append(worker_pb2.ControlMessage(welcome=welcome))
        applied = self.worker.protocol.row_table.applied_version
        self.core.attach(applied, 0.0, hold_s=1.0 if asks else None)

    def play(self, num_messages: int) -> None:
        """Go on until so many messages have been delivered, or the one to stop at comes."""
        try:
            while self.num_messages < num_messages:
                self._happen()
                self.pump()
        except _HereError:
            self._stop_at = None

    def pump(self) -> None:
        """Let everything that is on its way arrive, step by step."""
        for _ in range(self.rng.randint(1, 4)):
            self.core.index.work()
            self.core.order_steps(10.0)
            self._collect()
            while self.to_worker:
                message = self.to_worker[0]
                self._note(self.for_worker, self.worker.protocol, message)
                self.to_worker.popleft()
                self.to_control.extend(self.worker.feed(message))
            self.to_control.extend(self.worker.run_step())
            while self.to_control:
                message = self.to_control[0]
                self._note(self.for_control, (self.core, self.output), message)
                self.to_control.popleft()
                self.core.receive(message, 0.0)
                self._collect()

    def _collect(self) -> None:
        for data in self.output.sent:
            self.to_worker.append(worker_pb2.ControlMessage.FromString(data))
        self.output.sent.clear()

    def _note(self, where: list[Situation], receiver: object, message: Message) -> None:
        if self.num_messages == self._stop_at:
            raise _HereError
        self.num_messages += 1
        if self._is_recorded:
            try:
                frozen = freeze(receiver)
            except TypeError:
                return  # In the midst of something that cannot be frozen, such as a generator.
            where.append(Situation(frozen, message, self.num_messages - 1))

    def _happen(self) -> None:
        rng = self.rng
        live = [one for one, _ in self.requests if not one.is_finished]
        roll = rng.random()
        if len(live) < 6 and roll < 0.6:
            self.submit()
        elif live and roll < 0.7:
            self.core.abort(rng.choice(live))
        elif roll < 0.75:
            self.to_control.append(worker_pb2.WorkerMessage(heartbeat=worker_pb2.Heartbeat()))
        elif roll < 0.8:
            self.to_worker.append(worker_pb2.ControlMessage(heartbeat=worker_pb2.Heartbeat()))
        elif roll < 0.85 and self.worker.ordered:
            self.worker.runner.fail_launch.add(self.worker.ordered[-1].version)
        elif roll < 0.9:
            self.core.order_steps(10.0)
            self._collect()
            # A plan that is lost: what follows it is refused.
            plans = [message for message in self.to_worker if message.HasField("plan")]
            if plans:
                self.to_worker.remove(plans[0])
        elif roll < 0.93:
            self._restart()

    def submit(self) -> Request:
        rng = self.rng
        prompt = [10 + i for i in range(rng.randint(0, 12))]
        prompt += [rng.randrange(10, VOCAB_SIZE) for _ in range(rng.randint(1, 8))]
        total = min(len(prompt) + rng.randint(1, 16), MAX_MODEL_LEN)
        expected, _ = expected_output(
            prompt,
            max_total_tokens=total,
            vocab_size=VOCAB_SIZE,
            sampling=RowSampling(temperature=0.0),
            eos_token_ids=(EOS,),
        )
        request = Request(
            req_id=f"q{len(self.requests)}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(temperature=0.0),
            seed=0,
            max_total_tokens=total,
            arrival=len(self.requests),
            eos_token_ids=(EOS,),
        )
        self.requests.append((request, expected))
        self.core.add(request)
        return request

    def _restart(self) -> None:
        """The stream breaks and another control plane asks for Generations."""
        stored = self.core.live_entries()
        requests = self.core.detach(lost=False)
        self.worker.disconnect()
        self.worker.hello()
        self.output.sent.clear()
        self.to_worker.clear()
        self.to_control.clear()
        self.core = self._new_core()
        self.core.expect_entries()
        self.core.offer_entries(stored)
        self._attach(asks=True)
        for request in requests:
            self.core.add(request)

    def finish(self) -> None:
        """Let everything end; every request must have got what it has to get."""
        self.worker.runner.fail_launch.clear()
        for number in range(400):
            self.pump()
            if self.core.is_idle and not self.to_control and not self.to_worker:
                break
            if number % 50 == 49:
                # The last plan was lost: what comes behind its timeout.
                self._restart()
        assert self.core.is_idle
        for request, expected in self.requests:
            log = request.sequences[0].output_token_ids
            reason = request.sequences[0].finish_reason
            if request.req_id in self.output.failed or reason is FinishReason.ABORT:
                assert log == expected[: len(log)]
            else:
                assert log == expected, (request, expected)
        scheduler = self.core.scheduler
        scheduler.audit()
        assert scheduler.num_free_blocks == scheduler.num_usable_blocks


def thaw(frozen: bytes) -> Any:
    return pickle.load(io.BytesIO(frozen))
