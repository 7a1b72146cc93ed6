"""The two ways to send a request, each as bytes made beforehand and a record filled in.

Owns: channels, stubs, what is read of a response. Does not know: when anything is sent.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import grpc
import grpc.aio

from pagewire_client.bench.config import BATCH_WINDOW
from pagewire_client.errors import from_rpc_error, from_status
from pagewire_client.options import call_metadata, channel_credentials, channel_options
from protos.pagewire.v1 import inference_pb2

if TYPE_CHECKING:
    from pagewire_client.bench.records import Gaps, RequestRecord
    from protos.tls_files import TlsFiles

_SERVICE = "/pagewire.v1.InferenceService"
UNFINISHED = "UNFINISHED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How to reach the server."""

    server: str
    tls: TlsFiles | None = None
    token: str | None = field(default=None, repr=False)


@dataclass(slots=True, kw_only=True)
class Meter:
    """Where calls report to. Times are seconds from `origin_s` on the monotonic clock.

    Attributes:
        keeps_times: Records keep the time of every message.
        keeps_output: Calls give what was said back.
    """

    origin_s: float
    gaps: Gaps
    tokens_by_second: dict[int, int] = field(default_factory=dict[int, int])
    num_tokens: int = 0
    keeps_times: bool = False
    keeps_output: bool = False

    def now(self) -> float:
        return time.monotonic() - self.origin_s

    def add_tokens(self, record: RequestRecord, count: int, now: float) -> None:
        """Tokens of a request have come."""
        if record.last_s is None:
            record.first_s = now
        else:
            self.gaps.add(now - record.last_s)
        record.last_s = now
        record.num_messages += 1
        if self.keeps_times:
            record.token_times.append((now, count))
        self.count(record, count, now)

    def count(self, record: RequestRecord, count: int, now: float) -> None:
        """Tokens whose time says nothing about their making have come."""
        record.output_tokens += count
        self.num_tokens += count
        second = int(now)
        self.tokens_by_second[second] = self.tokens_by_second.get(second, 0) + count


@dataclass(slots=True)
class Output:
    """What a request said, where somebody asked for it."""

    token_ids: list[int] = field(default_factory=list[int])
    text: str = ""


class Caller:
    """Sends requests over a few channels in turn. An async context manager."""

    def __init__(
        self, access: Access, meter: Meter, *, channels: int, via: str, timeout_s: float
    ) -> None:
        """Connect on the first call.

        Raises:
            ValueError: A TLS file or the token is not what it should be.
        """
        self._server = access.server
        self._meter = meter
        self._timeout_s = timeout_s
        self._via = via
        self._metadata = call_metadata(access.token)
        # Connections of their own: channels of one process share one otherwise.
        options = (*channel_options(access.server), ("grpc.use_local_subchannel_pool", 1))
        credentials = None if access.tls is None else channel_credentials(access.tls)
        self._channels = [
            grpc.aio.insecure_channel(access.server, options=options)
            if credentials is None
            else grpc.aio.secure_channel(access.server, credentials, options=options)
            for _ in range(channels)
        ]
        self._stubs: deque[Any] = deque(
            channel.unary_stream(
                f"{_SERVICE}/Generate",
                response_deserializer=inference_pb2.GenerateResponse.FromString,
            )
            for channel in self._channels
        )
        self._batches: list[_BatchStream] = []

    async def send(self, message: bytes, record: RequestRecord) -> Output:
        """Send a serialized GenerateRequest and fill in its record, whatever becomes of it.

        Raises:
            asyncio.CancelledError: The record says UNFINISHED.
        """
        output = Output()
        record.reason = UNFINISHED
        try:
            if self._via == "stream":
                await self._stream(message, record, output)
            else:
                await self._batch(message, record)
        except grpc.RpcError as error:
            failure = from_rpc_error(error, server=self._server)
            record.reason = failure.reason or failure.code.name
        except ConnectionError:
            record.reason = "STREAM_ENDED"
        except TimeoutError:
            record.reason = grpc.StatusCode.DEADLINE_EXCEEDED.name
        finally:
            record.end_s = self._meter.now()
        return output

    async def _stream(self, message: bytes, record: RequestRecord, output: Output) -> None:
        meter = self._meter
        stub = self._stubs[0]
        self._stubs.rotate(-1)
        call = stub(message, timeout=self._timeout_s, metadata=self._metadata)
        finish_reason = 0
        try:
            async for response in call:
                count = 0
                for news in response.outputs:
                    count += len(news.token_ids)
                    finish_reason = news.finish_reason or finish_reason
                    if meter.keeps_output:
                        output.token_ids += news.token_ids
                        output.text += news.text
                if count:
                    meter.add_tokens(record, count, meter.now())
                if response.HasField("usage"):
                    _take_usage(record, response.usage)
            record.reason = _reason_of(finish_reason)
        finally:
            call.cancel()

    async def _batch(self, message: bytes, record: RequestRecord) -> None:
        stream = next((stream for stream in self._batches if stream.has_room), None)
        if stream is None:
            channel = self._channels[len(self._batches) % len(self._channels)]
            stream = _BatchStream(channel, self._metadata)
            self._batches.append(stream)
        async with asyncio.timeout(self._timeout_s):
            answer = await stream.ask(record.index, message)
        if answer.WhichOneof("result") == "error":
            error = from_status(answer.error)
            record.reason = error.reason or error.code.name
            return
        finish_reason = 0
        for news in answer.response.outputs:
            self._meter.count(record, len(news.token_ids), self._meter.now())
            finish_reason = news.finish_reason or finish_reason
        _take_usage(record, answer.response.usage)
        record.reason = _reason_of(finish_reason)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for stream in self._batches:
            await stream.close()
        for channel in self._channels:
            await channel.close()


class _BatchStream:
    """One GenerateBatch call that is kept open."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Any) -> None:
        method: Any = channel.stream_stream(
            f"{_SERVICE}/GenerateBatch",
            response_deserializer=inference_pb2.GenerateBatchResponse.FromString,
        )
        self._call = method(metadata=metadata)
        self._answers: dict[str, asyncio.Future[inference_pb2.GenerateBatchResponse]] = {}
        self._writing = asyncio.Lock()
        self._error: Exception | None = None
        self._num_asked = 0
        self._reader = asyncio.create_task(self._read_forever())

    @property
    def has_room(self) -> bool:
        return self._error is None and self._num_asked < BATCH_WINDOW

    async def ask(self, index: int, message: bytes) -> inference_pb2.GenerateBatchResponse:
        """Send a request and wait for its answer.

        Raises:
            grpc.RpcError: The stream broke.
            ConnectionError: The server ended it.
        """
        request = inference_pb2.GenerateBatchRequest()
        request.request.ParseFromString(message)
        request_id = f"bench-{index}-{id(self):x}"
        request.request.request_id = request_id
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers[request_id] = answer
        self._num_asked += 1
        try:
            async with self._writing:
                if self._error is None:
                    await self._write(request.SerializeToString())
            if self._error is not None:
                raise self._error
            return await answer
        finally:
            self._num_asked -= 1
            self._answers.pop(request_id, None)
            # Nobody reads it after this; without a look asyncio would complain about an error.
            if answer.done() and not answer.cancelled():
                answer.exception()

    async def _write(self, message: bytes) -> None:
        try:
            await self._call.write(message)
        except (grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            # The stream has ended; the reader learns why.
            await asyncio.gather(self._reader, return_exceptions=True)

    async def _read_forever(self) -> None:
        error: Exception = ConnectionError("the server ended the stream")
        try:
            async for response in self._call:
                answer = self._answers.get(response.request_id)
                if answer is not None and not answer.done():
                    answer.set_result(response)
        except grpc.RpcError as broken:
            error = broken
        self._error = error
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)

    async def close(self) -> None:
        self._call.cancel()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)


def _take_usage(record: RequestRecord, usage: inference_pb2.Usage) -> None:
    record.prompt_tokens = usage.prompt_tokens
    record.cached_tokens = usage.cached_tokens


def _reason_of(finish_reason: int) -> str:
    if finish_reason in (inference_pb2.FINISH_REASON_STOP, inference_pb2.FINISH_REASON_LENGTH):
        return ""
    if finish_reason == inference_pb2.FINISH_REASON_UNSPECIFIED:
        return "NO_END"
    return inference_pb2.FinishReason.Name(finish_reason).removeprefix("FINISH_REASON_")
