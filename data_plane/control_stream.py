"""Keeps a worker attached to its control plane: dial, serve, reconnect, drain, or give up.

Owns: the life of the process as seen from the stream: which ends are retried, with what delay, and
which exit code the others give. Does not know: the protocol's rules (`stream_protocol`), what a
step is (`step_loop`).
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from data_plane.step_loop import StepLoop
from data_plane.step_work import StepError
from data_plane.stream_session import StreamEnd, StreamSession
from protos.pagewire.v1 import worker_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable

    from data_plane.step_loop import Outcome
    from data_plane.step_work import StepRunner, StepWork
    from data_plane.stream_protocol import StreamProtocol
    from protos.tls_files import TlsContents

logger = logging.getLogger(__name__)

EXIT_OK = 0
# The runner cannot be reset.
EXIT_FAILED = 1
# The control plane will never take this worker as it is: wrong model, protocol, block size, token.
EXIT_REFUSED = 3
# Another process attached with the same worker id.
EXIT_SUPERSEDED = 4
# The device context is lost; only a new process gets another one.
EXIT_DEVICE_LOST = 5

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

# Trying again would get the same answer.
_PERMANENT = {
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    # Typically the public port instead of the worker port.
    grpc.StatusCode.UNIMPLEMENTED,
}
_SUPERSEDED = "SUPERSEDED"
# A step that outlives its stream for longer is worth a line.
_LONG_STEP_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """How a worker stays attached.

    Attributes:
        address: host:port of the control plane's worker port.
        tls: What the control plane's certificate must descend from, and the worker's own; None:
            plain text.
        token: Says that this is a worker of the deployment.
        reread: What both are by now; asked before every attempt. Raises ValueError where files
            cannot be used, and then what was there before stays.
        grace_s: How long a draining worker waits for its rows.
        backoff_min_s: Delay before the first retry; it doubles, with jitter, until a Welcome.
        backoff_max_s: Its limit; a control plane that comes back waits this long for its workers.
        keepalive_s: Interval of HTTP/2 pings, and how long an answer may take. They find a dead
            peer or a cut network while nothing is to be said. The server has to allow them: see
            `grpc.http2.min_ping_interval_without_data_ms`.
    """

    address: str
    tls: TlsContents | None = None
    token: str | None = field(default=None, repr=False)
    reread: Callable[[], tuple[TlsContents | None, str | None]] | None = None
    grace_s: float = 30.0
    backoff_min_s: float = 0.1
    backoff_max_s: float = 1.0
    keepalive_s: float = 5.0

    def __post_init__(self) -> None:
        if not 0 < self.backoff_min_s <= self.backoff_max_s:
            raise ValueError(
                f"backoff_min_s must be in (0, backoff_max_s], got {self.backoff_min_s} and "
                f"{self.backoff_max_s}"
            )
        if self.grace_s < 0:
            raise ValueError(f"grace_s must be at least 0, got {self.grace_s}")

    def channel(self) -> grpc.aio.Channel:
        """A channel of its own for one attempt."""
        if self.tls is None:
            return grpc.aio.insecure_channel(self.address, options=self.channel_options())
        credentials = grpc.ssl_channel_credentials(self.tls.ca, self.tls.key, self.tls.cert)
        return grpc.aio.secure_channel(self.address, credentials, options=self.channel_options())

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes before the first message."""
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)

    def channel_options(self) -> list[tuple[str, int]]:
        """Arguments of the gRPC channel."""
        keepalive_ms = int(self.keepalive_s * 1000)
        return [
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.keepalive_time_ms", keepalive_ms),
            ("grpc.keepalive_timeout_ms", keepalive_ms),
            # With grpcio 1.85 it is this one that ends a connection whose ping is not answered;
            # the one above alone leaves it open for a minute.
            ("grpc.http2.ping_timeout_ms", keepalive_ms),
            ("grpc.http2.max_pings_without_data", 0),
            # Every attempt connects anew at once: the delay between attempts is ours, not the
            # back-off of a connection shared with the last attempt's channel.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_retries", 0),
            # The stream lives as long as the worker: no proxy for outgoing web traffic carries it.
            ("grpc.enable_http_proxy", 0),
        ]


class ControlStream:
    """Attaches one worker until it drains or gives up.

    Args:
        options: Where to and how patiently.
        protocol: State that outlives streams.
        runner: Warmed up.
        rng: Source of the jitter.
    """

    def __init__(
        self,
        options: StreamOptions,
        *,
        protocol: StreamProtocol,
        runner: StepRunner,
        rng: random.Random | None = None,
    ) -> None:
        self._options = options
        self._protocol = protocol
        self._runner = runner
        self._rng = rng or random.Random()
        self._steps = StepLoop(runner, self._post_outcome)
        self._drain_requested = asyncio.Event()
        self._session: StreamSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # Set when no later stream can be served.
        self._fatal_end: StreamEnd | None = None
        self._last_end = ""
        self._last_unread = ""
        self._num_failures = 0
        self._has_hung_step = False

    @property
    def has_hung_step(self) -> bool:
        """After `run`: whether a step is still running that may never end."""
        return self._has_hung_step

    @property
    def protocol(self) -> StreamProtocol:
        return self._protocol

    def begin_drain(self) -> None:
        """Leave once all rows are finished or the grace period is over. Call on the event loop."""
        if not self._drain_requested.is_set():
            logger.info("draining: worker=%s grace_s=%g", self._worker_id, self._options.grace_s)
            self._drain_requested.set()

    async def run(self) -> int:
        """Serve for as long as it takes; returns the exit code of the process."""
        self._loop = asyncio.get_running_loop()
        self._steps.start()
        try:
            while True:
                await self._until_idle()
                started_s = self._loop.time()
                end, was_welcomed = self._fatal_end, False
                if end is None and not self._drain_requested.is_set():
                    end, was_welcomed = await self._attach()
                # A drained worker leaves with 0 however its stream ended, but never hides that
                # its device is lost.
                if self._drain_requested.is_set() and self._fatal_end is None:
                    logger.info("drained: worker=%s", self._worker_id)
                    return EXIT_OK
                assert end is not None
                exit_code = self._judge(end, was_welcomed=was_welcomed)
                if exit_code is not None:
                    return exit_code
                # A control plane that welcomes and fails at once is not dialled in a tight loop.
                has_lasted = self._loop.time() - started_s > self._options.backoff_max_s
                self._num_failures = 0 if was_welcomed and has_lasted else self._num_failures + 1
                await self._back_off()
        finally:
            self._session = None
            self._has_hung_step = not await asyncio.to_thread(self._steps.stop)

    @property
    def _worker_id(self) -> str:
        return self._protocol.identity.worker_id

    async def _until_idle(self) -> None:
        """Drop what was not executed and wait for the running step, unless told to leave."""
        idle = asyncio.wrap_future(self._steps.drop_unexecuted())
        drain = asyncio.create_task(self._drain_requested.wait())
        done, _ = await asyncio.wait(
            [idle, drain], timeout=_LONG_STEP_S, return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            logger.warning(
                "not attached, a step of the last stream is still running: worker=%s",
                self._worker_id,
            )
            await asyncio.wait([idle, drain], return_when=asyncio.FIRST_COMPLETED)
        drain.cancel()

    async def _attach(self) -> tuple[StreamEnd, bool]:
        self._reread_secrets()
        options = self._options
        async with options.channel() as channel:
            session = StreamSession(
                worker_pb2_grpc.WorkerServiceStub(channel).Attach(metadata=options.metadata()),
                protocol=self._protocol,
                steps=self._steps,
                runner=self._runner,
                drain_requested=self._drain_requested,
                grace_s=options.grace_s,
            )
            self._session = session
            try:
                return await session.run(), session.was_welcomed
            finally:
                self._session = None

    def _reread_secrets(self) -> None:
        if self._options.reread is None:
            return
        try:
            tls, token = self._options.reread()
        except ValueError as error:
            if str(error) != self._last_unread:
                logger.warning(
                    "certificates and token not read again: worker=%s message=%s",
                    self._worker_id,
                    error,
                )
            self._last_unread = str(error)
        else:
            self._options = replace(self._options, tls=tls, token=token)
            self._last_unread = ""

    def _judge(self, end: StreamEnd, *, was_welcomed: bool) -> int | None:
        """Return the exit code that an end means; None if a new stream is to be tried."""
        if end.reason == _SUPERSEDED and end.code is grpc.StatusCode.ABORTED:
            logger.error(
                "superseded: worker=%s message=%s; give every worker process its own --worker-id",
                self._worker_id,
                end.message,
            )
            return EXIT_SUPERSEDED
        if end.reason in ("RESET_FAILED", "DEVICE_LOST"):
            logger.error(
                "giving up: worker=%s reason=%s message=%s",
                self._worker_id,
                end.reason,
                end.message,
            )
            return EXIT_DEVICE_LOST if end.reason == "DEVICE_LOST" else EXIT_FAILED
        if end.code in _PERMANENT:
            logger.error(
                "refused for good: worker=%s address=%s code=%s reason=%s message=%s",
                self._worker_id,
                self._options.address,
                end.code.name,
                end.reason,
                end.message,
            )
            return EXIT_REFUSED
        # One line per change of state: a control plane that stays away is named once.
        description = f"{end.reason} {end.message}" if end.code is None else end.reason
        if was_welcomed or description != self._last_end:
            logger.warning(
                "not attached, retrying: worker=%s address=%s reason=%s message=%s",
                self._worker_id,
                self._options.address,
                end.reason,
                end.message,
            )
        self._last_end = description
        return None

    async def _back_off(self) -> None:
        options = self._options
        # The exponent is bounded so that days of absence do not overflow a float.
        delay_s = min(
            options.backoff_max_s, options.backoff_min_s * 2.0 ** min(self._num_failures, 30)
        )
        try:
            async with asyncio.timeout(delay_s * self._rng.uniform(0.5, 1.0)):
                await self._drain_requested.wait()
        except TimeoutError:
            pass

    def _post_outcome(self, work: StepWork, outcome: Outcome) -> None:
        """Hand an outcome to the event loop. Called on the step loop's threads."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._take_outcome, work, outcome)
        except RuntimeError:
            # The loop is closed: nobody is left to report to.
            return

    def _take_outcome(self, work: StepWork, outcome: Outcome) -> None:
        session = self._session
        if isinstance(outcome, StepError) and outcome.is_fatal:
            self._fatal_end = StreamEnd(code=None, reason="DEVICE_LOST", message=outcome.message)
        if session is not None:
            session.take_outcome(work, outcome)
            if self._fatal_end is not None:
                session.fail(self._fatal_end)
