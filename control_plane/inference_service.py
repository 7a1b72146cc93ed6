"""The public service: one method per call of the API.

Owns: how updates become responses, how long a client may leave a response unread. Does not know:
what a request may hold (`request_builder`), how it runs (`cluster`), sockets (`server`).
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from control_plane.call_errors import CallGuard
from control_plane.errors import (
    InvalidRequestError,
    RequestTooLongError,
    ServingError,
    SlowClientError,
)
from control_plane.generate_batch import BatchCall
from control_plane.message_decoding import MessageDecoder
from control_plane.prompt_encoder import encode_prompt
from control_plane.request_checks import checked_ids
from control_plane.responses import to_outputs, to_stats
from control_plane.stream_writer import StreamWriter
from protos.pagewire.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from google.protobuf.message import Message

    from control_plane.cluster import Cluster
    from control_plane.encoding_pool import EncodingPool
    from control_plane.errors import InvariantError
    from control_plane.generation import GenerationService
    from control_plane.metrics import Metrics
    from control_plane.model_catalog import ModelCatalog
    from control_plane.service_limits import ServiceLimits
    from control_plane.tokens import ClientTokens

SERVICE_NAME = "pagewire.v1.InferenceService"

# Longest time in which gRPC cancels the handler of a call that it has ended.
_CANCELLATION_DELAY_S = 0.25
# As many as any output has, also of a model that is shorter.
_MIN_DETOKENIZE_IDS = 1 << 16


class InferenceService:
    """Answers clients. One per process."""

    def __init__(
        self,
        *,
        catalog: ModelCatalog,
        cluster: Cluster,
        generations: GenerationService,
        pool: EncodingPool,
        metrics: Metrics,
        limits: ServiceLimits,
        on_fatal: Callable[[InvariantError], None],
        tokens: ClientTokens | None = None,
    ) -> None:
        """Wire it up.

        Args:
            catalog: The served models.
            cluster: Where requests run.
            generations: Admits requests.
            pool: Encodes and decodes long texts.
            metrics: Counts failures.
            limits: What one call may cost.
            on_fatal: Ends the process.
            tokens: Say whose a call is. None: everybody is one and the same principal.
        """
        self._catalog = catalog
        self._cluster = cluster
        self._generations = generations
        self._pool = pool
        self._limits = limits
        self._tokens = tokens
        self._guard = CallGuard(metrics, on_fatal)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register every method, each with a deserializer that explains what it cannot read."""
        pb = inference_pb2
        methods: dict[str, tuple[Callable[[Any], Awaitable[None]], type[Message]]] = {
            "Generate": (self._streaming(self._generate), pb.GenerateRequest),
            "GenerateBatch": (self._generate_batch, pb.GenerateBatchRequest),
            "Tokenize": (self._unary(self._tokenize), pb.TokenizeRequest),
            "Detokenize": (self._unary(self._detokenize), pb.DetokenizeRequest),
            "ListModels": (self._unary(self._list_models), pb.ListModelsRequest),
            "GetStats": (self._unary(self._get_stats), pb.GetStatsRequest),
        }
        handlers = {
            # All of them as streams, which are the same on the wire: for a single message gRPC
            # would wait without end, and hold what has come of it.
            name: grpc.stream_stream_rpc_method_handler(
                self._guarded(method),
                request_deserializer=MessageDecoder(
                    message_class, max_bytes=self._limits.max_message_bytes
                ),
                response_serializer=_serialize,
            )
            for name, (method, message_class) in methods.items()
        }
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),)
        )

    def _guarded(self, method: Callable[[Any], Awaitable[None]]) -> Callable[[Any, Any], Any]:
        async def handle(requests: Any, context: Any) -> None:
            del requests  # read through the context
            await self._guard.run(context, method(context))

        return handle

    def _streaming(
        self, method: Callable[[Any, Any], Awaitable[None]]
    ) -> Callable[[Any], Awaitable[None]]:
        async def call(context: Any) -> None:
            await method(await self._read(context), context)

        return call

    def _unary(
        self, method: Callable[[Any, Any], Awaitable[Message]]
    ) -> Callable[[Any], Awaitable[None]]:
        async def call(context: Any) -> None:
            message = await self._read(context)
            # Until the client has read the response, which is as large as the message.
            with self._generations.holding(message.ByteSize()):
                await self._write(context, await method(message, context))

        return call

    async def _read(self, context: Any) -> Any:
        """The one message of a call.

        Raises:
            ServingError: It is none, or does not come.
        """
        limit_s = self._limits.read_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                message = await context.read()
        except TimeoutError:
            raise SlowClientError(
                f"The call's message did not arrive within {limit_s:g} seconds. Send it at once, "
                "or a shorter one.",
                limit_s=f"{limit_s:g}",
            ) from None
        if message is grpc.aio.EOF:
            # Of a call that went away too, a moment before gRPC cancels it.
            await asyncio.sleep(_CANCELLATION_DELAY_S)
            raise InvalidRequestError(
                "The call ended before its message. Send one.",
                field="message",
                value="none",
                limit="1 message",
            )
        if isinstance(message, ServingError):
            raise message
        return message

    async def _generate(self, message: inference_pb2.GenerateRequest, context: Any) -> None:
        async with (
            self._generations.admit(
                message, timeout_s=context.time_remaining(), principal=self._principal(context)
            ) as generation,
            self._writer(context) as writer,
            aclosing(generation.updates()) as all_updates,
        ):
            # At once, before any token: a client can resume from here on.
            await writer.write(
                inference_pb2.GenerateResponse(
                    request_id=generation.request_id, seed=generation.seed
                )
            )
            is_complete = False
            async for updates in all_updates:
                response = inference_pb2.GenerateResponse(outputs=to_outputs(updates))
                if is_complete := generation.is_finished:
                    response.usage.CopyFrom(generation.usage())
                await writer.write(response)
            if not is_complete:  # every end was known to the client
                await writer.write(inference_pb2.GenerateResponse(usage=generation.usage()))

    def _principal(self, context: Any) -> str:
        if self._tokens is None:
            return ""
        # `CallAuth` has looked already, but gRPC carries nothing from there to a method.
        return self._tokens.check(context.invocation_metadata() or ())

    async def _write(self, context: Any, response: Message) -> None:
        async with self._writer(context) as writer:
            await writer.write(response)

    def _writer(self, context: Any) -> StreamWriter:
        return StreamWriter(
            context, limit_s=self._limits.write_timeout_s, clock=self._cluster.clock
        )

    async def _generate_batch(self, context: Any) -> None:
        call = BatchCall(
            context,
            self._generations,
            self._guard,
            window=self._limits.batch_window,
            principal=lambda: self._principal(context),
        )
        await call.run()

    async def _tokenize(
        self, message: inference_pb2.TokenizeRequest, context: Any
    ) -> inference_pb2.TokenizeResponse:
        model = self._catalog.find(message.model)
        ids = await encode_prompt(message, model, self._pool, tenant=self._principal(context))
        return inference_pb2.TokenizeResponse(
            token_ids=ids.tolist(), max_model_len=model.served.max_model_len
        )

    async def _detokenize(
        self, message: inference_pb2.DetokenizeRequest, context: Any
    ) -> inference_pb2.DetokenizeResponse:
        model = self._catalog.find(message.model)
        skip = message.skip_special_tokens if message.HasField("skip_special_tokens") else True
        num_ids = len(message.token_ids)
        # Decoding holds the interpreter lock, some of the time in one piece.
        limit = max(_MIN_DETOKENIZE_IDS, model.served.max_model_len)
        if num_ids > limit:
            raise RequestTooLongError(
                f"The request has {num_ids} token ids, at most {limit} are accepted. Send them in "
                "pieces.",
                field="token_ids",
                value=num_ids,
                limit=limit,
            )

        def decode() -> str:
            ids = checked_ids(message.token_ids, "token_ids", model.served.vocab_size)
            return model.tokenizer.decode(ids.tolist(), skip_special_tokens=skip)

        text = await self._pool.run(num_ids, decode, tenant=self._principal(context))
        return inference_pb2.DetokenizeResponse(text=text)

    async def _list_models(
        self, message: inference_pb2.ListModelsRequest, context: Any
    ) -> inference_pb2.ListModelsResponse:
        del message, context
        return inference_pb2.ListModelsResponse(
            models=[
                inference_pb2.Model(
                    name=name,
                    fingerprint=model.served.base_fingerprint.hex(),
                    max_model_len=model.served.max_model_len,
                    vocab_size=model.served.vocab_size,
                    ready_replicas=self._cluster.num_ready(name),
                    has_chat_template=model.tokenizer.has_chat_template,
                )
                for name, model in self._catalog.models.items()
            ]
        )

    async def _get_stats(
        self, message: inference_pb2.GetStatsRequest, context: Any
    ) -> inference_pb2.GetStatsResponse:
        del message, context
        return to_stats(self._cluster.stats())


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
