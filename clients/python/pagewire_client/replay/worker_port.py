"""The worker's side of a replay: a port on loopback that one worker attaches to, and its process.

Owns: the worker port, one stream at a time, what came in on it, the child process. Does not know:
recordings, or whether a result is right.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import tempfile
from typing import TYPE_CHECKING, Self

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from protos.pagewire.v1 import worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from types import TracebackType

    Context = grpc.aio.ServicerContext[worker_pb2.WorkerMessage, worker_pb2.ControlMessage]

# The worker leaves a control plane that is silent for so long, and is left itself.
LEASE_S = 60.0
_OPTIONS = (
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.max_send_message_length", -1),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
)
_LOG_LINES = 12


class WorkerGoneError(Exception):
    """There is no worker to replay on; the message says what became of it."""


class Link:
    """One stream of the worker. Results are kept until they are asked for."""

    def __init__(self, hello: worker_pb2.Hello) -> None:
        """Begin with its Hello."""
        self.hello = hello
        self.is_open = True
        # Bounded: a recording that orders without end must not gather here.
        self.to_send: asyncio.Queue[worker_pb2.ControlMessage | None] = asyncio.Queue(64)
        self.end_status: status_pb2.Status | None = None
        self._results: dict[tuple[int, int], worker_pb2.StepResult] = {}
        self._failure: worker_pb2.WorkerMessage | None = None
        self._news = asyncio.Event()
        self._ignored_version = 0

    async def send(self, message: worker_pb2.ControlMessage) -> None:
        """Queue a message; dropped once the stream has ended."""
        if message.HasField("reset"):
            self._ignored_version = message.reset.version
            self._results.clear()
            self._failure = None
        if self.is_open:
            await self.to_send.put(message)

    def end(self, status: status_pb2.Status | None = None) -> None:
        """End the stream, with OK or a status; what was not sent yet is not."""
        self.end_status = status
        self._drop_unsent()
        self.to_send.put_nowait(None)

    def take(self, message: worker_pb2.WorkerMessage) -> None:
        """Keep what came in, if it is not from before a Reset."""
        kind = message.WhichOneof("message")
        if kind == "step_result":
            result = message.step_result
            if result.version > self._ignored_version:
                self._results[result.version, result.step] = result
        elif kind in ("nack", "step_failed"):
            version = message.nack.version or message.step_failed.version
            if version > self._ignored_version and self._failure is None:
                self._failure = message
        self._news.set()

    def close(self) -> None:
        """The worker's end is gone."""
        self.is_open = False
        self._drop_unsent()
        self._news.set()

    def _drop_unsent(self) -> None:
        while not self.to_send.empty():
            self.to_send.get_nowait()

    async def outcome(
        self, version: int, step: int
    ) -> worker_pb2.StepResult | worker_pb2.Nack | worker_pb2.StepFailed | None:
        """What became of a step; a refusal or failure of it or of one before it counts for it.

        Returns:
            None if the stream ended instead.
        """
        while True:
            result = self._results.pop((version, step), None)
            if result is not None:
                return result
            if self._failure is not None:
                if self._failure.HasField("nack") and self._failure.nack.version <= version:
                    return self._failure.nack
                if (
                    self._failure.HasField("step_failed")
                    and self._failure.step_failed.version <= version
                ):
                    return self._failure.step_failed
            if not self.is_open:
                return None
            self._news.clear()
            await self._news.wait()


class WorkerPort(worker_pb2_grpc.WorkerServiceServicer):
    """Takes one worker at a time: `async with WorkerPort(port) as port`."""

    def __init__(self, port: int = 0) -> None:
        """Listen once entered; 0 takes a free port."""
        self.port = port
        self._links: asyncio.Queue[Link] = asyncio.Queue()
        self._current: Link | None = None
        self._server = grpc.aio.server(options=_OPTIONS)

    @property
    def address(self) -> str:
        """host:port that a worker dials."""
        return f"127.0.0.1:{self.port}"

    async def next_link(self) -> Link:
        """The next stream that begins."""
        return await self._links.get()

    async def Attach(  # noqa: N802 - the method's name in the proto
        self, request_iterator: AsyncIterator[worker_pb2.WorkerMessage], context: Context
    ) -> None:
        """One stream from Hello to end."""
        message = await anext(aiter(request_iterator), None)
        if message is None or not message.HasField("hello"):
            text = "The first message must be a Hello."
            await _abort(context, "HELLO_EXPECTED", text, code=code_pb2.INVALID_ARGUMENT)
            return
        if self._current is not None:
            # It tries again, and may be the one to take over.
            text = "Another worker is attached to this replay."
            await _abort(context, "BUSY", text, code=code_pb2.UNAVAILABLE)
            return
        link = self._current = Link(message.hello)
        self._links.put_nowait(link)
        tasks = [
            asyncio.create_task(self._read(request_iterator, link)),
            asyncio.create_task(self._write(context, link)),
            asyncio.create_task(_beat(link)),
        ]
        try:
            await asyncio.wait(tasks[:2], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            self._current = None
            link.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        if link.end_status is not None:
            await context.abort_with_status(rpc_status.to_status(link.end_status))

    async def _read(
        self, request_iterator: AsyncIterator[worker_pb2.WorkerMessage], link: Link
    ) -> None:
        async for message in request_iterator:
            link.take(message)

    async def _write(self, context: Context, link: Link) -> None:
        while (message := await link.to_send.get()) is not None:
            await context.write(message)

    async def __aenter__(self) -> Self:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        try:
            self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        except RuntimeError:
            raise WorkerGoneError(
                f"cannot listen on 127.0.0.1:{self.port}: the port is taken; choose another --port"
            ) from None
        await self._server.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._current is not None:
            over = status("SHUTTING_DOWN", "The replay is over.", code=code_pb2.UNAVAILABLE)
            self._current.end(over)
        await self._server.stop(1.0)


class WorkerProcess:
    """A worker of our own; its log is shown only if it fails. An async context manager."""

    def __init__(self, command: str, args: Sequence[str]) -> None:
        """Prepare to run `command`, split as a shell does, with `args` behind it.

        Raises:
            WorkerGoneError: It cannot be split.
        """
        try:
            self.argv = [*shlex.split(command), *args]
        except ValueError as error:
            raise WorkerGoneError(f"--worker-command {command}: {error}") from None
        self._process: asyncio.subprocess.Process | None = None

    async def gone(self) -> WorkerGoneError:
        """Wait until it ends, and say how."""
        assert self._process is not None
        code = await self._process.wait()
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 16384))
        text = self._log.read().decode(errors="replace")
        tail = "\n".join(f"  {line}" for line in text.splitlines()[-_LOG_LINES:])
        return WorkerGoneError(f"the worker ended {how}:\n  $ {shlex.join(self.argv)}\n{tail}")

    async def __aenter__(self) -> Self:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __aexit__
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                # A terminal's Ctrl-C is for the replay, which then ends it.
                start_new_session=True,
            )
        except OSError as error:
            self._log.close()
            raise WorkerGoneError(f"cannot start {self.argv[0]}: {error.strerror}") from None
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            # All of its session: the command may be a wrapper.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        self._log.close()


def status(reason: str, message: str, *, code: int) -> status_pb2.Status:
    """A rich status, as a control plane sends it."""
    info = any_pb2.Any()
    info.Pack(error_details_pb2.ErrorInfo(reason=reason, domain="pagewire"))
    return status_pb2.Status(code=code, message=message, details=[info])


async def _abort(context: Context, reason: str, message: str, *, code: int) -> None:
    await context.abort_with_status(rpc_status.to_status(status(reason, message, code=code)))


async def _beat(link: Link) -> None:
    """Messages renew the lease, a replay that waits for a long step sends none."""
    await asyncio.sleep(LEASE_S / 3)
    while True:
        if link.to_send.empty():
            link.to_send.put_nowait(worker_pb2.ControlMessage(heartbeat=worker_pb2.Heartbeat()))
        await asyncio.sleep(LEASE_S / 3)
