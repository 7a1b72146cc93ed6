"""The asynchronous client: `Client`, with `await` and `async for`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, Self, Unpack

import grpc
import grpc.aio

from pagewire_client.batch import BatchLog, is_served
from pagewire_client.errors import CancelledError, PagewireError, from_rpc_error
from pagewire_client.options import (
    DEFAULT_SERVER,
    call_metadata,
    channel_credentials,
    channel_options,
    check_server,
)
from pagewire_client.requests import (
    GenerateOptions,
    Prompt,
    build_detokenize_request,
    build_request,
    build_tokenize_request,
)
from pagewire_client.results import BatchResult, Chunk, Completion, GenerationLog, Model, to_model
from pagewire_client.resume import DEFAULT_RESUME, Outage, Reach, ResumePolicy
from protos.pagewire.v1 import inference_pb2, inference_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Callable,
        Generator,
        Iterable,
        Iterator,
        Mapping,
        Sequence,
    )

    from protos.tls_files import TlsFiles


class AsyncGeneration:
    """A running request: iterate over it for chunks, or await `result`.

    Leaving the `async with` block, or `cancel`, ends the request and frees what it holds on the
    server. When the stream breaks, it goes on where it was as the client's `ResumePolicy` says.

    Attributes:
        log: What was received so far; `log.resume_request()` continues it after a broken stream.
        num_resumes: How often it did that by itself.
    """

    def __init__(
        self,
        start: Callable[[inference_pb2.GenerateRequest, float | None], Any],
        request: inference_pb2.GenerateRequest,
        *,
        server: str,
        outage: Outage,
    ) -> None:
        self._start = start
        self._server = server
        self._outage = outage
        self._is_cancelled = asyncio.Event()
        self.log = GenerationLog(request)
        self.num_resumes = 0
        self._call = start(request, outage.remaining_s())

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        while True:
            try:
                with _errors(self._server, self._is_cancelled):
                    async for response in self._call:
                        chunks = self.log.add(response)
                        if chunks:
                            self._outage.over()
                        for chunk in chunks:
                            yield chunk
                return
            except PagewireError as error:
                await self._resume_after(error)

    async def _resume_after(self, error: PagewireError) -> None:
        """Send the rest of the request again, or raise the error."""
        log = self.log
        pause_s = self._outage.pause_s(error, has_begun=log.has_begun, has_tokens=log.has_tokens)
        if pause_s is None or self._is_cancelled.is_set():
            raise error
        try:
            # Waits for the cancellation, so that it is heard at once.
            async with asyncio.timeout(pause_s):
                await self._is_cancelled.wait()
        except TimeoutError:
            self.num_resumes += 1
            self._call = self._start(log.resume_request(), self._outage.remaining_s())
        else:
            raise error

    async def result(self) -> Completion:
        """Wait for the end; all of it.

        Raises:
            PagewireError: The request failed.
        """
        async for _ in self:
            pass
        return self.log.completion()

    def cancel(self) -> None:
        self._is_cancelled.set()
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()


class AsyncBatch:
    """A running batch: iterate over it, once, for results as they finish.

    Leaving the `async with` block, or `cancel`, ends what is not answered and frees what it holds
    on the server. After a break what is not answered is sent again over a new stream, as the
    client's `ResumePolicy` says.
    """

    def __init__(
        self,
        start: Callable[[Iterator[inference_pb2.GenerateBatchRequest], float | None], Any],
        log: BatchLog,
        *,
        server: str,
        outage: Outage,
        reach: Reach,
    ) -> None:
        self._start = start
        self._log = log
        self._server = server
        self._outage = outage
        self._reach = reach
        self._is_cancelled = asyncio.Event()
        self._call: Any = None
        self._results = self._run()

    @property
    def num_resumes(self) -> int:
        """How often it went on over a new stream."""
        return self._log.num_resumes

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> BatchResult:
        return await anext(self._results)

    async def _run(self) -> AsyncGenerator[BatchResult]:
        log, outage, reach = self._log, self._outage, self._reach
        while True:
            broken: PagewireError | None = None
            call = self._call = self._start(log.messages(), outage.remaining_s())
            served_since: float | None = None
            try:
                with _errors(self._server, self._is_cancelled):
                    # Before any answer, which may be long in coming.
                    if is_served(await call.initial_metadata()):
                        reach.is_known = True
                        served_since = time.monotonic()
                    async for response in call:
                        reach.is_known = True
                        result = log.result(response)
                        if isinstance(result, PagewireError):
                            broken = result
                        else:
                            outage.over()
                            yield result
                if broken is None or not log.has_unanswered:
                    return
            except PagewireError as error:
                broken = error
            finally:
                call.cancel()
            if served_since is not None:
                outage.stood(time.monotonic() - served_since)
            await self._pause(broken)

    async def _pause(self, broken: PagewireError) -> None:
        """Wait before the next attempt, or raise what ended the last one."""
        pause_s = self._outage.pause_s(broken, has_begun=self._reach.is_known, has_tokens=True)
        if pause_s is None or self._is_cancelled.is_set():
            raise broken
        try:
            # Waits for the cancellation, so that it is heard at once.
            async with asyncio.timeout(pause_s):
                await self._is_cancelled.wait()
        except TimeoutError:
            return
        raise broken

    def cancel(self) -> None:
        """End it: whoever iterates gets an error."""
        self._is_cancelled.set()
        if self._call is not None:
            self._call.cancel()

    async def aclose(self) -> None:
        """End it, and the iteration with it."""
        self.cancel()
        await self._results.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class AsyncClient:
    """A connection to one server, for one event loop.

        async with AsyncClient("127.0.0.1:50051") as client:
            async for chunk in client.generate("The capital of France is", max_tokens=8):
                print(chunk.text, end="")

    Every method raises a subclass of `PagewireError`.
    """

    def __init__(
        self,
        server: str = DEFAULT_SERVER,
        *,
        timeout_s: float | None = None,
        resume: ResumePolicy | None = DEFAULT_RESUME,
        tls: TlsFiles | None = None,
        token: str | None = None,
    ) -> None:
        """Connect on the first call.

        Args:
            server: host:port of the public API.
            timeout_s: Limit of every call that does not bring its own.
            resume: How calls go on when the server goes away in their midst; None: they fail.
            tls: Whom to trust, and the own certificate if the server asks for one; `TlsFiles()`
                trusts what the system trusts. None: plain text.
            token: Says who calls, to a server that asks. Without TLS whoever carries the
                connection can read it.

        Raises:
            ValueError: The address, a file of `tls` or the token is not what it should be.
        """
        check_server(server, has_tls=tls is not None)
        self.server = server
        self._resume = resume
        self._reach = Reach()
        self._timeout_s = timeout_s
        self._metadata = call_metadata(token)
        options = channel_options(server)
        self._channel = (
            grpc.aio.insecure_channel(server, options=options)
            if tls is None
            else grpc.aio.secure_channel(server, channel_credentials(tls), options=options)
        )
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
        return AsyncGeneration(
            lambda request, timeout_s: self._stub.Generate(
                request, timeout=timeout_s, metadata=self._metadata
            ),
            request,
            server=self.server,
            outage=Outage(self._resume, self._timeout(timeout_s)),
        )

    def batch(
        self,
        requests: Iterable[inference_pb2.GenerateRequest],
        *,
        timeout_s: float | None = None,
    ) -> AsyncBatch:
        """Run many requests over one stream; results come as they finish.

        After a break, what was not answered is sent again over a new stream; that needs a server
        that has answered before.

        Args:
            requests: From `build_request`. Read as fast as the server takes them; those without an
                id get one: "0", "1", ... in order.
            timeout_s: Limit of the whole batch.
        """
        return AsyncBatch(
            lambda messages, timeout_s: self._stub.GenerateBatch(
                messages, timeout=timeout_s, metadata=self._metadata
            ),
            BatchLog(requests, resumes=self._resume is not None),
            server=self.server,
            outage=Outage(self._resume, self._timeout(timeout_s)),
            reach=self._reach,
        )

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
        with self._answered():
            response = await self._stub.Tokenize(
                request, timeout=self._timeout(timeout_s), metadata=self._metadata
            )
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
        with self._answered():
            response = await self._stub.Detokenize(
                request, timeout=self._timeout(timeout_s), metadata=self._metadata
            )
        return response.text

    async def models(self, *, timeout_s: float | None = None) -> list[Model]:
        """The served models."""
        request = inference_pb2.ListModelsRequest()
        with self._answered():
            response = await self._stub.ListModels(
                request, timeout=self._timeout(timeout_s), metadata=self._metadata
            )
        return [to_model(model) for model in response.models]

    async def stats(self, *, timeout_s: float | None = None) -> inference_pb2.GetStatsResponse:
        """A snapshot of replicas, blocks and queues."""
        request = inference_pb2.GetStatsRequest()
        with self._answered():
            return await self._stub.GetStats(
                request, timeout=self._timeout(timeout_s), metadata=self._metadata
            )

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @contextlib.contextmanager
    def _answered(self) -> Generator[None]:
        with _errors(self.server):
            yield
            self._reach.is_known = True

    def _timeout(self, timeout_s: float | None) -> float | None:
        return self._timeout_s if timeout_s is None else timeout_s


@contextlib.contextmanager
def _errors(server: str, is_cancelled: asyncio.Event | None = None) -> Generator[None]:
    """Errors of a call as ours.

    Args:
        server: Its address.
        is_cancelled: Set when the call was cancelled by name, from whatever task.
    """
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error, server=server) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if is_cancelled is None or not is_cancelled.is_set() or (task and task.cancelling()):
            raise
        # grpc raises this in whoever reads, whose task nobody has cancelled.
        raise CancelledError(
            "The call was cancelled on this side.", code=grpc.StatusCode.CANCELLED
        ) from None
