"""The asynchronous client: `Client`, with `await` and `async for`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Self, Unpack

import grpc
import grpc.aio

from pagewire_client.batch import BatchLog
from pagewire_client.errors import from_rpc_error
from pagewire_client.options import CHANNEL_OPTIONS, DEFAULT_SERVER
from pagewire_client.requests import (
    GenerateOptions,
    Prompt,
    build_detokenize_request,
    build_request,
    build_tokenize_request,
)
from pagewire_client.results import BatchResult, Chunk, Completion, GenerationLog, Model, to_model
from protos.pagewire.v1 import inference_pb2, inference_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Generator, Iterable, Mapping, Sequence


class AsyncGeneration:
    """A running request: iterate over it for chunks, or await `result`.

    Leaving the `async with` block, or `cancel`, ends the request and frees what it holds on the
    server.

    Attributes:
        log: What was received so far; `log.resume_request()` continues it after a broken stream.
    """

    def __init__(self, call: Any, request: inference_pb2.GenerateRequest, *, server: str) -> None:
        self._call = call
        self._server = server
        self.log = GenerationLog(request)

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        with _errors(self._server):
            async for response in self._call:
                for chunk in self.log.add(response):
                    yield chunk

    async def result(self) -> Completion:
        """Wait for the end; all of it.

        Raises:
            PagewireError: The request failed.
        """
        async for _ in self:
            pass
        return self.log.completion()

    def cancel(self) -> None:
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()


class AsyncClient:
    """A connection to one server, for one event loop.

        async with AsyncClient("127.0.0.1:50051") as client:
            async for chunk in client.generate("The capital of France is", max_tokens=8):
                print(chunk.text, end="")

    Every method raises a subclass of `PagewireError`.
    """

    def __init__(self, server: str = DEFAULT_SERVER, *, timeout_s: float | None = None) -> None:
        """Connect on the first call.

        Args:
            server: host:port of the public API.
            timeout_s: Limit of every call that does not bring its own.
        """
        self.server = server
        self._timeout_s = timeout_s
        self._channel = grpc.aio.insecure_channel(server, options=CHANNEL_OPTIONS)
        self._stub: Any = inference_pb2_grpc.InferenceServiceStub(self._channel)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncGeneration:
        """Start to continue a text, token ids or a conversation."""
        request = build_request(prompt, options)
        return self.start(request, timeout_s=options.get("timeout_s"))

    async def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """`generate`, to its end."""
        return await self.generate(prompt, **options).result()

    def chat(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[GenerateOptions]
    ) -> AsyncGeneration:
        """Start the next turn of a conversation."""
        return self.generate(messages, **options)

    def start(
        self, request: inference_pb2.GenerateRequest, *, timeout_s: float | None = None
    ) -> AsyncGeneration:
        """Start a request in its wire form, such as `GenerationLog.resume_request` returns."""
        call = self._stub.Generate(request, timeout=self._timeout(timeout_s))
        return AsyncGeneration(call, request, server=self.server)

    async def batch(
        self,
        requests: Iterable[inference_pb2.GenerateRequest],
        *,
        timeout_s: float | None = None,
    ) -> AsyncIterator[BatchResult]:
        """Run many requests over one stream; results come as they finish.

        Args:
            requests: From `build_request`. Read as fast as the server takes them; those without an
                id get one: "0", "1", ... in order.
            timeout_s: Limit of the whole batch.
        """
        log = BatchLog()
        call = self._stub.GenerateBatch(log.number(requests), timeout=self._timeout(timeout_s))
        try:
            with _errors(self.server):
                async for response in call:
                    yield log.result(response)
        finally:
            call.cancel()

    async def tokenize(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        model: str = "",
        add_special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> list[int]:
        """Ids of a text or conversation, as `generate` would see them."""
        request = build_tokenize_request(prompt, model, add_special_tokens)
        with _errors(self.server):
            response = await self._stub.Tokenize(request, timeout=self._timeout(timeout_s))
        return list(response.token_ids)

    async def detokenize(
        self,
        token_ids: Iterable[int],
        *,
        model: str = "",
        skip_special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> str:
        """The text of ids."""
        request = build_detokenize_request(token_ids, model, skip_special_tokens)
        with _errors(self.server):
            response = await self._stub.Detokenize(request, timeout=self._timeout(timeout_s))
        return response.text

    async def models(self, *, timeout_s: float | None = None) -> list[Model]:
        """The served models."""
        request = inference_pb2.ListModelsRequest()
        with _errors(self.server):
            response = await self._stub.ListModels(request, timeout=self._timeout(timeout_s))
        return [to_model(model) for model in response.models]

    async def stats(self, *, timeout_s: float | None = None) -> inference_pb2.GetStatsResponse:
        """A snapshot of replicas, blocks and queues."""
        request = inference_pb2.GetStatsRequest()
        with _errors(self.server):
            return await self._stub.GetStats(request, timeout=self._timeout(timeout_s))

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _timeout(self, timeout_s: float | None) -> float | None:
        return self._timeout_s if timeout_s is None else timeout_s


@contextlib.contextmanager
def _errors(server: str) -> Generator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error, server=server) from None
