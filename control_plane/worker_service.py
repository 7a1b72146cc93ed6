"""Serves Attach: one handler per worker's stream, between grpc and the fleet.

Owns: the greeting's order and time, the queue towards a worker, how a stream ends. Does not know
what messages mean once a worker is attached.

Add it to a server of its own port, made with `WORKER_SERVER_OPTIONS` and `port_options`; clients
never reach it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from typing import TYPE_CHECKING

from grpc_status import rpc_status as grpc_rpc_status

from control_plane.errors import Code, InvariantError, ProtocolError, ServingError
from control_plane.plan import malformed
from control_plane.replica import read_hello
from control_plane.rpc_status import to_status
from protos.pagewire.v1 import worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import grpc

    from control_plane.cluster import Cluster
    from control_plane.engine import Engine
    from control_plane.fleet import Fleet
    from control_plane.tokens import WorkerTokens

logger = logging.getLogger(__name__)

# What a worker sends is small: results of one step, chunks of generations. What it gets can carry
# the prompts of many sequences that start at once.
WORKER_SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.max_send_message_length", -1),
    # Workers heartbeat by messages; their transport may ping as often as it likes.
    ("grpc.http2.max_ping_strikes", 0),
)

# A greeting is one message; a peer that does not send it must not hold a stream.
_HELLO_TIMEOUT_S = 10.0
# A status is queued behind what the worker has not read. One that does not read will not get it.
_END_TIMEOUT_S = 1.0


class _Stream:
    """The control plane's end of one worker's stream: a queue towards it, and its end.

    The queue needs no bound: the window bounds the plans in it, Resets only answer messages, and a
    heartbeat is only put into an empty one.
    """

    def __init__(self, stream_id: str) -> None:
        self.stream_id = stream_id
        self.ended: asyncio.Future[ServingError | None] = asyncio.get_running_loop().create_future()
        self._queue: deque[worker_pb2.ControlMessage] = deque()
        self._has_news = asyncio.Event()

    def send(self, message: worker_pb2.ControlMessage) -> None:
        """Queue a message; ignored once ended."""
        if self._queue and message.HasField("heartbeat"):
            # A worker that does not read, and is given nothing to do, would collect them for ever.
            return
        if not self.ended.done():
            self._queue.append(message)
            self._has_news.set()

    def end(self, error: ServingError | None) -> None:
        """End the stream; the first call decides how."""
        if not self.ended.done():
            self.ended.set_result(error)
            self._has_news.set()

    async def messages(self) -> AsyncIterator[worker_pb2.ControlMessage]:
        """What was queued, in order, until the end."""
        while not self.ended.done():
            if self._queue:
                yield self._queue.popleft()
            else:
                self._has_news.clear()
                await self._has_news.wait()


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """The control stream's server. Whatever a peer sends, it can only cost that peer its stream."""

    def __init__(self, cluster: Cluster, tokens: WorkerTokens | None = None) -> None:
        """Serve workers for this cluster, those that bring a token if there are `tokens`."""
        self._tokens = tokens
        self._fleet: Fleet = cluster.fleet
        self._hello_timeout_s = min(_HELLO_TIMEOUT_S, cluster.config.lease_s)
        self._stream_numbers = itertools.count(1)

    async def Attach(  # noqa: N802 - the method's name in the proto
        self,
        request_iterator: AsyncIterator[worker_pb2.WorkerMessage],
        context: grpc.aio.ServicerContext[worker_pb2.WorkerMessage, worker_pb2.ControlMessage],
    ) -> None:
        """One worker's stream, from its Hello to its end."""
        peer = str(context.peer())
        stream = _Stream(f"s{next(self._stream_numbers)}")
        engine: Engine | None = None
        tasks: list[asyncio.Task[None]] = []
        try:
            if self._tokens is not None:
                # Before anything that a stranger sends is read.
                self._tokens.check(context.invocation_metadata() or ())
            facts = read_hello(await self._read_hello(request_iterator), peer=peer)
            engine = await self._fleet.attach(facts, stream)
            tasks = [
                asyncio.create_task(self._write(stream, context), name=f"{stream.stream_id} write"),
                asyncio.create_task(
                    self._read(request_iterator, engine, stream), name=f"{stream.stream_id} read"
                ),
            ]
            # Shielded: a cancelled handler must not turn the stream's end into a cancelled future.
            error = await asyncio.shield(stream.ended)
        except ServingError as refusal:
            logger.warning(
                "worker refused: peer=%s stream=%s reason=%s message=%s",
                peer,
                stream.stream_id,
                refusal.reason,
                refusal.message,
            )
            error = refusal
        except InvariantError:
            raise
        except Exception as unplanned:
            logger.exception("unplanned failure: peer=%s stream=%s", peer, stream.stream_id)
            error = ProtocolError("INTERNAL", to_status(unplanned).message, code=Code.INTERNAL)
        finally:
            # First of all nothing more is read, however the handler came here.
            stream.end(None)
            for task in tasks[1:]:
                task.cancel()
            if engine is not None:
                self._fleet.stream_closed(engine, stream)
        if tasks:
            # gRPC goes on with a write that is cancelled, and takes no status beside it.
            await asyncio.wait(tasks, timeout=_END_TIMEOUT_S)
            tasks[0].cancel()
            await asyncio.wait(tasks)
        await self._end(context, error)

    async def _read_hello(
        self, request_iterator: AsyncIterator[worker_pb2.WorkerMessage]
    ) -> worker_pb2.Hello:
        try:
            async with asyncio.timeout(self._hello_timeout_s):
                message = await anext(request_iterator)
        except TimeoutError:
            raise ProtocolError(
                "HELLO_TIMEOUT",
                f"No Hello within {self._hello_timeout_s:g} s.",
                code=Code.DEADLINE_EXCEEDED,
                limit_s=self._hello_timeout_s,
            ) from None
        except StopAsyncIteration:
            raise ProtocolError(
                "HELLO_EXPECTED",
                "The stream ended before its Hello.",
                code=Code.INVALID_ARGUMENT,
                kind="none",
            ) from None
        except Exception as error:
            raise malformed("message", f"not a WorkerMessage ({type(error).__name__})") from None
        kind = message.WhichOneof("message")
        if kind != "hello":
            raise ProtocolError(
                "HELLO_EXPECTED",
                f"The first message must be a Hello, got {kind or 'an unknown kind'}.",
                code=Code.INVALID_ARGUMENT,
                kind=kind or "unknown",
            )
        return message.hello

    async def _read(
        self,
        request_iterator: AsyncIterator[worker_pb2.WorkerMessage],
        engine: Engine,
        stream: _Stream,
    ) -> None:
        try:
            async for message in request_iterator:
                if stream.ended.done():
                    return
                self._fleet.receive(engine, stream, message)
        except InvariantError:
            raise
        except Exception as error:
            # Bytes that are no message, or one above the size limit. A stream that just broke ends
            # the handler instead.
            if not stream.ended.done():
                refusal = malformed("message", f"not a WorkerMessage ({type(error).__name__})")
                self._fleet.lose(engine, refusal, lost=True)
            return
        stream.end(None)

    async def _write(
        self,
        stream: _Stream,
        context: grpc.aio.ServicerContext[worker_pb2.WorkerMessage, worker_pb2.ControlMessage],
    ) -> None:
        try:
            async for message in stream.messages():
                await context.write(message)
        except Exception as error:
            # The transport is gone; grpc cancels the handler too, but perhaps later.
            logger.info("write failed: stream=%s error=%s", stream.stream_id, type(error).__name__)
            stream.end(None)

    async def _end(
        self,
        context: grpc.aio.ServicerContext[worker_pb2.WorkerMessage, worker_pb2.ControlMessage],
        error: ServingError | None,
    ) -> None:
        if error is None:
            return
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                await context.abort_with_status(grpc_rpc_status.to_status(to_status(error)))
        except TimeoutError:
            logger.info("stream end unread: reason=%s", error.reason)
