"""A control plane whose every message is written by the test, on a real port."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

import grpc
import grpc.aio
import numpy as np
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from protos.pagewire.v1 import inference_pb2, worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TIMEOUT_S = 20.0
PROMPT = [11, 12, 13, 14, 15, 16]


def column(*values: int) -> bytes:
    """A column of little-endian int32."""
    return np.array(values, "<i4").tobytes()


def read_column(data: bytes) -> list[int]:
    return np.frombuffer(data, "<i4").tolist()


def welcome(
    *,
    term: int = 1,
    num_blocks: int = 64,
    lookahead: int = 2,
    lease_s: float = 10.0,
    send_generations: bool = False,
) -> worker_pb2.ControlMessage:
    message = worker_pb2.Welcome(
        term=term,
        stream_id=f"stream-{term}",
        num_blocks=num_blocks,
        lookahead=lookahead,
        send_generations=send_generations,
    )
    message.lease.FromNanoseconds(int(lease_s * 1e9))
    return worker_pb2.ControlMessage(welcome=message)


def reset(version: int) -> worker_pb2.ControlMessage:
    return worker_pb2.ControlMessage(reset=worker_pb2.Reset(version=version))


def heartbeat() -> worker_pb2.ControlMessage:
    return worker_pb2.ControlMessage(heartbeat=worker_pb2.Heartbeat())


def plan(version: int, **fields: object) -> worker_pb2.ControlMessage:
    """A plan of one step on top of version - 1; rows and ids as lists become columns."""
    message = worker_pb2.Plan(base_version=version - 1, version=version, num_steps=1)
    for name, value in fields.items():
        if name in ("added_rows", "forks"):
            getattr(message, name).extend(value)
        elif name == "block_copies":
            message.block_copies.CopyFrom(value)
        elif isinstance(value, list):
            setattr(message, name, column(*value))
        else:
            setattr(message, name, value)
    return worker_pb2.ControlMessage(plan=message)


def added_row(
    row: int,
    tokens: list[int],
    block_ids: list[int],
    *,
    num_hit_blocks: int = 0,
    num_computed_tokens: int = 0,
    max_total_tokens: int = 24,
    **fields: object,
) -> worker_pb2.AddedRow:
    """A greedy row without EOS tokens unless told otherwise."""
    return worker_pb2.AddedRow(
        **{
            "row": row,
            "token_ids": column(*tokens),
            "num_prompt_tokens": len(tokens),
            "sampling": inference_pb2.SamplingParams(temperature=0.0),
            "max_total_tokens": max_total_tokens,
            "block_ids": column(*block_ids),
            "num_hit_blocks": num_hit_blocks,
            "num_computed_tokens": num_computed_tokens,
            **fields,
        }
    )


def rich_status(code: grpc.StatusCode, reason: str, message: str) -> status_pb2.Status:
    info = any_pb2.Any()
    info.Pack(error_details_pb2.ErrorInfo(reason=reason, domain="pagewire"))
    return status_pb2.Status(code=code.value[0], message=message, details=[info])


class ScriptedStream:
    """The server's end of one Attach call."""

    def __init__(
        self,
        requests: AsyncIterator[worker_pb2.WorkerMessage],
        context: grpc.aio.ServicerContext[worker_pb2.WorkerMessage, worker_pb2.ControlMessage],
    ) -> None:
        self._requests = requests
        self._context = context
        self.ending: asyncio.Future[status_pb2.Status | None] = (
            asyncio.get_running_loop().create_future()
        )
        self.ended = asyncio.Event()

    async def send(self, *messages: worker_pb2.ControlMessage) -> None:
        for message in messages:
            await self._context.write(message)

    async def receive(self, *, heartbeats: bool = False) -> worker_pb2.WorkerMessage:
        """The worker's next message, heartbeats left out unless asked for."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                message = await anext(self._requests)
                if heartbeats or not message.HasField("heartbeat"):
                    return message

    async def receive_end(self) -> None:
        """Wait until the worker half-closed or broke the stream off, dropping what comes before."""
        async with asyncio.timeout(TIMEOUT_S):
            try:
                async for _ in self._requests:
                    pass
            except asyncio.CancelledError:
                if not self._context.cancelled():
                    raise

    async def attach(self, version: int, **options: object) -> worker_pb2.Hello:
        """Take Hello, answer Welcome and Reset."""
        hello = (await self.receive()).hello
        await self.send(welcome(**options), reset(version))  # type: ignore[arg-type]
        return hello

    def end(self, status: status_pb2.Status | None = None) -> None:
        """End the call, with OK unless a status is given."""
        if not self.ending.done():
            self.ending.set_result(status)


class ScriptedControlPlane(worker_pb2_grpc.WorkerServiceServicer):
    """`async with ScriptedControlPlane() as control:` then `await control.accept()` per stream."""

    def __init__(self, port: int = 0) -> None:
        self.port = port
        self._accepted: asyncio.Queue[ScriptedStream] = asyncio.Queue()
        self._streams: list[ScriptedStream] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def Attach(self, request_iterator, context) -> None:  # type: ignore[no-untyped-def]  # noqa: N802
        stream = ScriptedStream(request_iterator, context)
        self._streams.append(stream)
        self._accepted.put_nowait(stream)
        try:
            status = await stream.ending
        finally:
            stream.ended.set()
        if status is not None:
            context.set_trailing_metadata(
                (("grpc-status-details-bin", status.SerializeToString()),)
            )
            code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
            await context.abort(code, status.message)

    async def accept(self, timeout_s: float = TIMEOUT_S) -> ScriptedStream:
        async with asyncio.timeout(timeout_s):
            return await self._accepted.get()

    async def stop(self) -> None:
        """Cut all streams."""
        await self._server.stop(grace=None)

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.http2.min_ping_interval_without_data_ms", 1000),
                ("grpc.max_receive_message_length", 64 * 1024 * 1024),
                ("grpc.max_send_message_length", 64 * 1024 * 1024),
            ]
        )
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


async def start_row(stream: ScriptedStream, version: int, *, row: int = 0) -> list[int]:
    """Add a row, compute its prompt, and return the sampled token."""
    first_block = 1 + 6 * row
    await stream.send(
        plan(
            version,
            added_rows=[added_row(row, PROMPT, list(range(first_block, first_block + 6)))],
            chunk_rows=[row],
            chunk_num_tokens=[len(PROMPT)],
        )
    )
    result = (await stream.receive()).step_result
    assert result.version == version
    return read_column(result.token_ids)


async def until(condition) -> None:  # type: ignore[no-untyped-def]
    """Wait until a condition over another task's or thread's state holds."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 - state of threads, no event to wait for
            await asyncio.sleep(0.002)
