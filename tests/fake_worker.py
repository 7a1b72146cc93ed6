"""Workers without tensors: the real RowTable, protocol and control stream over a FakeModelRunner.

- `StepwiseWorker` has no I/O: feed it ControlMessages, get WorkerMessages, run steps when you say.
- `FakeWorker` dials a real port with the real control stream.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
from collections import deque
from typing import TYPE_CHECKING, Self

from fake_model import FakeModelRunner, expected_output

from data_plane.control_stream import ControlStream, StreamOptions
from data_plane.step_loop import as_step_error
from data_plane.step_work import StepError, StepWork
from data_plane.stream_protocol import (
    Phase,
    Reaction,
    StreamProtocol,
    WorkerIdentity,
    generation_messages,
)
from data_plane.stream_session import StreamEnd

if TYPE_CHECKING:
    from protos.pagewire.v1 import worker_pb2
    from protos.tls_files import TlsContents

__all__ = ["FakeModelRunner", "FakeWorker", "StepwiseWorker", "expected_output", "fake_identity"]

FAKE_FINGERPRINT = hashlib.sha256(b"fake model").digest()


def fake_identity(
    runner: FakeModelRunner,
    *,
    worker_id: str = "w0",
    replica_id: str = "r0",
    model_fingerprint: bytes = FAKE_FINGERPRINT,
    epoch: bytes | None = None,
    max_num_seqs: int = 8,
    max_model_len: int = 128,
    max_num_batched_tokens: int = 256,
    rank: int = 0,
    tp_size: int = 1,
) -> WorkerIdentity:
    """Describe a FakeModelRunner; a fresh random epoch unless one is given."""
    return WorkerIdentity(
        worker_id=worker_id,
        replica_id=replica_id,
        rank=rank,
        tp_size=tp_size,
        epoch=epoch or os.urandom(16),
        model_fingerprint=model_fingerprint,
        num_layers=1,
        num_kv_heads=1,
        head_size=8,
        kv_dtype="float32",
        block_size=runner.block_size,
        num_blocks=runner.num_blocks,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        vocab_size=runner.vocab_size,
        backend="fake",
        device="fake",
        software_version="test",
    )


class StepwiseWorker:
    """A worker that does nothing by itself.

    `hello()` opens a stream, `feed(message)` takes what the control plane sent, `run_step()`
    executes the oldest ordered step; each returns the messages the worker sends in answer.
    `disconnect()` loses the stream; `crash()` makes it a new process with a new epoch.
    Violations by the control plane raise ProtocolViolation from `feed`.
    """

    def __init__(self, runner: FakeModelRunner | None = None, **identity: object) -> None:
        self.runner = runner or FakeModelRunner()
        self._identity_arguments = identity
        self.protocol = StreamProtocol(fake_identity(self.runner, **identity))  # type: ignore[arg-type]
        self.ordered: deque[StepWork] = deque()
        # What its results say of the time that their plans waited; None: nothing.
        self.waited_us: int | None = None
        self._has_failed = False

    @property
    def num_ordered(self) -> int:
        """Steps that were ordered and have not run."""
        return len(self.ordered)

    @property
    def is_attached(self) -> bool:
        return self.protocol.phase is not Phase.DISCONNECTED

    def hello(self) -> worker_pb2.WorkerMessage:
        return self.protocol.hello()

    def feed(self, message: worker_pb2.ControlMessage) -> list[worker_pb2.WorkerMessage]:
        reaction: Reaction = self.protocol.receive(message)
        messages = list(reaction.messages)
        if reaction.welcome is not None and reaction.welcome.send_generations:
            generations = self.runner.generations[: reaction.welcome.num_blocks]
            messages += generation_messages(generations)
        if reaction.reset_version is not None:
            self.ordered.clear()
            self._has_failed = False
            self.runner.reset()
        self.ordered.extend(reaction.works)
        return messages

    def run_step(self) -> list[worker_pb2.WorkerMessage]:
        """Execute the oldest ordered step, if any."""
        if not self.ordered:
            return []
        work = self.ordered.popleft()
        if self._has_failed:
            return []
        try:
            output = self.runner.launch(work).wait()
        except StepError as error:
            self._has_failed = True
            return self.protocol.step_failed(work, as_step_error(error))
        return self.protocol.step_done(work, output, waited_us=self.waited_us)

    def run_all(self) -> list[worker_pb2.WorkerMessage]:
        messages: list[worker_pb2.WorkerMessage] = []
        while self.ordered:
            messages += self.run_step()
        return messages

    def disconnect(self) -> None:
        """Lose the stream: ordered steps are dropped, KV, epoch and versions stay."""
        self.ordered.clear()
        self._has_failed = False
        self.protocol.stream_lost()

    def crash(self) -> None:
        """Become a new process under the same worker_id: new epoch, empty KV."""
        old = self.runner
        self.runner = type(old)(
            num_blocks=old.num_blocks, block_size=old.block_size, vocab_size=old.vocab_size
        )
        self.ordered.clear()
        self._has_failed = False
        self.protocol = StreamProtocol(fake_identity(self.runner, **self._identity_arguments))  # type: ignore[arg-type]


class FakeWorker:
    """A worker on the running event loop: the real control stream over a FakeModelRunner.

    `async with FakeWorker("127.0.0.1:1234") as worker:` attaches and, at the end, kills it. `kill`
    is a lost process (the stream breaks off), `drain` is SIGTERM; `exit_code` is that of the
    process, once it has one.
    """

    def __init__(
        self,
        address: str,
        *,
        runner: FakeModelRunner | None = None,
        grace_s: float = 10.0,
        keepalive_s: float = 5.0,
        tls: TlsContents | None = None,
        token: str | None = None,
        **identity: object,
    ) -> None:
        self.runner = runner or FakeModelRunner()
        self.protocol = StreamProtocol(fake_identity(self.runner, **identity))  # type: ignore[arg-type]
        self.stream = ControlStream(
            StreamOptions(
                address=address,
                grace_s=grace_s,
                backoff_min_s=0.01,
                backoff_max_s=0.1,
                keepalive_s=keepalive_s,
                tls=tls,
                token=token,
            ),
            protocol=self.protocol,
            runner=self.runner,
            rng=random.Random(0),
        )
        self._task: asyncio.Task[int] | None = None

    @property
    def is_serving(self) -> bool:
        """Whether it is attached and was reset."""
        return self.protocol.phase is Phase.SERVING

    @property
    def exit_code(self) -> int | None:
        task = self._task
        return task.result() if task and task.done() and not task.cancelled() else None

    def start(self) -> None:
        self._task = asyncio.create_task(self.stream.run())

    def drain(self) -> None:
        self.stream.begin_drain()

    def break_stream(self) -> None:
        """Lose the stream, as over a network that is cut; the process dials again."""
        session = self.stream._session
        if session is not None:
            session.fail(StreamEnd(code=None, reason="CUT", message="cut by the test"))

    async def exited(self) -> int:
        """Wait for the exit code."""
        assert self._task is not None
        return await asyncio.shield(self._task)

    async def kill(self) -> None:
        """Break off whatever it does."""
        self.runner.gate.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()
