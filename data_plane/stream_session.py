"""One Attach stream from Hello to its end: reader, writer, heartbeat and drain around the protocol.

Owns: the tasks of one stream and the order of what it sends. Does not know: dialling, retrying, or
what an end means for the process; `control_stream` does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from google.rpc import status_pb2

from data_plane.plan_refused import status_reason
from data_plane.step_work import StepError
from data_plane.stream_protocol import Phase, ProtocolViolation, generation_messages
from protos.connection_hints import connection_hint, is_other_service
from protos.pagewire.v1 import worker_pb2

if TYPE_CHECKING:
    from data_plane.step_loop import Outcome, StepLoop
    from data_plane.step_work import StepRunner, StepWork
    from data_plane.stream_protocol import Reaction, StreamProtocol

    AttachCall = grpc.aio.StreamStreamCall[worker_pb2.WorkerMessage, worker_pb2.ControlMessage]

logger = logging.getLogger(__name__)

_STATUS_DETAILS_KEY = "grpc-status-details-bin"
# How long a half-closed stream may take to end before it is cancelled.
_HALF_CLOSE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEnd:
    """Why a stream ended.

    Attributes:
        code: The status the control plane (or the transport) ended it with; None if this side did.
        reason: Upper-case name: ErrorInfo's where there is one.
        message: For people.
    """

    code: grpc.StatusCode | None
    reason: str
    message: str


class StreamSession:
    """Runs one stream. All methods are called on the event loop.

    Args:
        call: The open call.
        protocol: Its `hello()` has not been called for this stream.
        steps: Executes what the protocol orders.
        runner: Asked for generations, while no step runs.
        drain_requested: Once set, the worker says Drain and leaves when its rows are finished.
        grace_s: How long it waits for that.
    """

    def __init__(
        self,
        call: AttachCall,
        *,
        protocol: StreamProtocol,
        steps: StepLoop,
        runner: StepRunner,
        drain_requested: asyncio.Event,
        grace_s: float,
    ) -> None:
        self._call = call
        self._protocol = protocol
        self._steps = steps
        self._runner = runner
        self._drain_requested = drain_requested
        self._grace_s = grace_s
        self._loop = asyncio.get_running_loop()
        # Bounded by the window: a result per unconfirmed step, one Nack, one heartbeat. None asks
        # for the half-close.
        self._outgoing: asyncio.Queue[worker_pb2.WorkerMessage | None] = asyncio.Queue()
        self._welcome: asyncio.Future[float] = self._loop.create_future()
        self._drained = asyncio.Event()
        self._failed: asyncio.Future[StreamEnd] = self._loop.create_future()
        self._last_sent_s = self._loop.time()
        self._last_step_s = self._loop.time()
        # When the plans of steps under way came, and when the last outcome did. Not by the loop's
        # clock: uvloop's counts milliseconds, and a step may take less.
        self._came_s: dict[tuple[int, int], float] = {}
        self._last_outcome_s = time.monotonic()
        self._last_heard_s = self._loop.time()

    @property
    def was_welcomed(self) -> bool:
        return self._welcome.done() and not self._welcome.cancelled()

    async def run(self) -> StreamEnd:
        """Say Hello and serve until the stream ends, for whatever reason."""
        self._outgoing.put_nowait(self._protocol.hello())
        writer = asyncio.create_task(self._write_forever())
        enders = [
            asyncio.create_task(self._read_forever()),
            asyncio.create_task(self._keep_alive()),
            asyncio.create_task(self._leave_when_drained()),
        ]
        try:
            await asyncio.wait([*enders, self._failed], return_when=asyncio.FIRST_COMPLETED)
            # The most telling end first: what the control plane said beats what followed from it.
            for ended in (self._failed, *enders):
                if ended.done():
                    return ended.result()
            raise AssertionError("unreachable: one of them is done")
        finally:
            # At once, not when the next stream is dialled.
            self._steps.drop_unexecuted()
            self._protocol.stream_lost()
            tasks: list[asyncio.Task[StreamEnd | None]] = [writer, *enders]
            for task in tasks:
                task.cancel()
            self._call.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def take_outcome(self, work: StepWork, outcome: Outcome) -> None:
        """Report a step's outcome, if it still counts."""
        now_s = time.monotonic()
        came_s = self._came_s.pop((work.version, work.step), now_s)
        waited_s = max(0.0, self._last_outcome_s - came_s)
        self._last_outcome_s = now_s
        self._last_step_s = self._loop.time()
        if isinstance(outcome, StepError):
            messages = self._protocol.step_failed(work, outcome)
            logger.error(
                "step failed: worker=%s version=%d step=%d reason=%s message=%s",
                self._protocol.identity.worker_id,
                work.version,
                work.step,
                outcome.reason,
                outcome.message,
            )
        else:
            messages = self._protocol.step_done(work, outcome, waited_us=int(waited_s * 1e6))
        for message in messages:
            self._outgoing.put_nowait(message)
        self._note_progress()

    def fail(self, end: StreamEnd) -> None:
        """End the stream from within this process."""
        if not self._failed.done():
            self._failed.set_result(end)

    async def _read_forever(self) -> StreamEnd:
        try:
            while True:
                message = await self._call.read()
                if message is grpc.aio.EOF:
                    return StreamEnd(
                        code=grpc.StatusCode.OK,
                        reason="CLOSED",
                        message="the control plane closed the stream",
                    )
                assert isinstance(message, worker_pb2.ControlMessage)
                self._last_heard_s = self._loop.time()
                self._react(self._protocol.receive(message))
        except ProtocolViolation as violation:
            return StreamEnd(code=None, reason=violation.reason, message=violation.message)
        except grpc.aio.AioRpcError as error:
            return _end_of(error)

    def _react(self, reaction: Reaction) -> None:
        if reaction.welcome is not None:
            self._take_welcome(reaction.welcome)
        if reaction.reset_version is not None:
            self._take_reset(reaction.reset_version)
        for work in reaction.works:
            self._came_s[work.version, work.step] = time.monotonic()
            self._steps.submit(work)
        for message in reaction.messages:
            if message.HasField("nack"):
                logger.warning(
                    "plan refused: worker=%s version=%d applied_version=%d reason=%s message=%s",
                    self._protocol.identity.worker_id,
                    message.nack.version,
                    self._protocol.row_table.applied_version,
                    status_reason(message.nack.status),
                    message.nack.status.message,
                )
            self._outgoing.put_nowait(message)
        if reaction.works:
            self._last_step_s = self._loop.time()
        self._note_progress()

    def _take_welcome(self, welcome: worker_pb2.Welcome) -> None:
        lease_s = welcome.lease.ToNanoseconds() / 1e9
        logger.info(
            "attached: worker=%s replica=%s stream=%s term=%d num_blocks=%d lookahead=%d "
            "lease_s=%g applied_version=%d",
            self._protocol.identity.worker_id,
            self._protocol.identity.replica_id,
            welcome.stream_id,
            welcome.term,
            welcome.num_blocks,
            welcome.lookahead,
            lease_s,
            self._protocol.row_table.applied_version,
        )
        if welcome.send_generations:
            # Copied into messages here: the first step after the Reset changes them.
            for message in generation_messages(self._runner.generations[: welcome.num_blocks]):
                self._outgoing.put_nowait(message)
        self._welcome.set_result(lease_s)

    def _take_reset(self, version: int) -> None:
        logger.info("reset: worker=%s version=%d", self._protocol.identity.worker_id, version)
        self._came_s.clear()
        asyncio.wrap_future(self._steps.reset()).add_done_callback(self._reset_ended)

    def _reset_ended(self, reset: asyncio.Future[None]) -> None:
        if not reset.cancelled() and (error := reset.exception()) is not None:
            self.fail(
                StreamEnd(code=None, reason="RESET_FAILED", message=f"the reset failed: {error!r}")
            )

    async def _write_forever(self) -> None:
        try:
            while (message := await self._outgoing.get()) is not None:
                await self._call.write(message)
                self._last_sent_s = self._loop.time()
            await self._call.done_writing()
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            # The stream has ended; the reader learns why.
            return

    async def _keep_alive(self) -> StreamEnd:
        """Send heartbeats, and end a stream on which nothing came for a lease."""
        lease_s = await asyncio.shield(self._welcome)
        interval_s = lease_s / 3
        due_s = self._loop.time()
        while True:
            now_s = self._loop.time()
            # If this process did not run for a while, what was said to it waits to be read.
            self._last_heard_s = min(now_s, self._last_heard_s + now_s - due_s)
            if now_s - self._last_heard_s > lease_s:
                return StreamEnd(
                    code=None,
                    reason="SILENT",
                    message=f"no message within the lease of {lease_s:g} s",
                )
            if now_s - self._last_sent_s >= interval_s:
                # A message in the queue will renew the lease once the transport takes it.
                if self._outgoing.empty():
                    self._outgoing.put_nowait(
                        worker_pb2.WorkerMessage(heartbeat=worker_pb2.Heartbeat())
                    )
                self._last_sent_s = now_s
            # A row that the control plane ended by a stop string stays until the next plan, which
            # a drained control plane has no reason to send.
            if self._protocol.num_unconfirmed == 0 and now_s - self._last_step_s > lease_s:
                self._drained.set()
            due_s = max(now_s, self._last_sent_s + interval_s)
            await asyncio.sleep(due_s - now_s)

    async def _leave_when_drained(self) -> StreamEnd:
        await self._drain_requested.wait()
        # Before the Welcome, too: behind it there may be plans already, and without this word they
        # would be lost instead of given back.
        drain = worker_pb2.Drain()
        drain.grace.FromNanoseconds(int(self._grace_s * 1e9))
        self._outgoing.put_nowait(worker_pb2.WorkerMessage(drain=drain))
        if self._protocol.phase is not Phase.AWAITING_WELCOME:
            self._drained.clear()
            self._note_progress()
            try:
                async with asyncio.timeout(self._grace_s):
                    await self._drained.wait()
            except TimeoutError:
                logger.warning(
                    "grace period over: worker=%s live_rows=%d",
                    self._protocol.identity.worker_id,
                    self._protocol.row_table.num_live_rows,
                )
        self._outgoing.put_nowait(None)
        # Normally the control plane answers the half-close by ending the stream before this.
        await asyncio.sleep(_HALF_CLOSE_S)
        return StreamEnd(code=None, reason="DRAINED", message="the worker has drained")

    def _note_progress(self) -> None:
        if self._drain_requested.is_set() and self._protocol.is_idle:
            self._drained.set()


def _end_of(error: grpc.aio.AioRpcError) -> StreamEnd:
    reason = error.code().name
    message = error.details() or reason
    if is_other_service(message):
        message = (
            "a gRPC server answers there, but none for workers: a control plane's public port does "
            "so, workers dial its --worker-port, 50052 by default"
        )
    elif (hint := connection_hint(message)) is not None:
        message = f"{hint} ({message})"
    for key, value in error.trailing_metadata() or ():
        if key == _STATUS_DETAILS_KEY and isinstance(value, bytes):
            status = status_pb2.Status.FromString(value)
            reason = status_reason(status) or reason
            message = status.message or message
    return StreamEnd(code=error.code(), reason=reason, message=message)
