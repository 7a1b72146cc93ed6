"""Many requests over one stream.

A request holds a slot from when it is read until its response is written. No further request is
read while all slots are taken, so HTTP/2 pushes back on a sender that is ahead, and what a stream
can hold of the server's memory is bounded by the window. Reading slowly is no offence here.

Owns: the slots of one stream. Does not know: how a request runs.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc.aio

from control_plane import rpc_status
from control_plane.call_errors import begin, write
from control_plane.errors import DuplicateRequestError, InvalidRequestError, ServingError
from control_plane.request_checks import check_request_id
from control_plane.responses import to_outputs
from protos.pagewire.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

    from control_plane.call_errors import CallGuard
    from control_plane.generation import GenerationService

_STREAM_HEADER = (("pagewire-stream", "open"),)


class BatchCall:
    """One GenerateBatch stream."""

    def __init__(
        self,
        context: Any,
        generations: GenerationService,
        guard: CallGuard,
        *,
        window: int,
        principal: Callable[[], str] = lambda: "",
    ) -> None:
        """Prepare to serve a stream.

        Args:
            context: The `grpc.aio.ServicerContext` of the call.
            generations: Admits requests.
            guard: Counts failures.
            window: Requests that are unfinished or whose response is unread.
            principal: Whose call it is. Asked for every request, as a stream may outlive its token.
        """
        self._context = context
        self._generations = generations
        self._guard = guard
        self._principal = principal
        self._slots = asyncio.Semaphore(window)
        self._writing = asyncio.Lock()
        self._unfinished: set[str] = set()
        self._client_is_gone = False

    async def run(self) -> None:
        """Serve the stream until the client has closed its side and every response is written.

        Raises:
            asyncio.CancelledError: The client went away before that.
        """
        # At once, before any answer: a client can send the rest again from here on.
        await begin(self._context, _STREAM_HEADER)
        # Leaving the group by cancellation cancels every request of the stream.
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._slots.acquire()
                message = await self._context.read()
                if message is grpc.aio.EOF:
                    break
                tasks.create_task(self._serve(message))
        if self._client_is_gone:
            raise asyncio.CancelledError

    async def _serve(self, message: inference_pb2.GenerateBatchRequest | ServingError) -> None:
        try:
            response = await self._answer(message)
            async with self._writing:
                await write(self._context, response)
        except asyncio.CancelledError:
            # To the group this task has merely ended.
            self._client_is_gone = True
            raise
        finally:
            self._slots.release()

    async def _answer(
        self, message: inference_pb2.GenerateBatchRequest | ServingError
    ) -> inference_pb2.GenerateBatchResponse:
        request_id = "" if isinstance(message, ServingError) else message.request.request_id
        try:
            if isinstance(message, ServingError):
                raise message
            check_request_id(request_id)
            self._claim(request_id)
        except ServingError as error:
            return self._error(request_id, error)
        try:
            return inference_pb2.GenerateBatchResponse(
                request_id=request_id, response=await self._generate(message.request)
            )
        except Exception as error:
            return self._error(request_id, error)
        finally:
            self._unfinished.discard(request_id)

    def _claim(self, request_id: str) -> None:
        if not request_id:
            raise InvalidRequestError(
                "request_id is empty, but responses of a batch are told apart by it. Give every "
                "request an id of its own.",
                field="request_id",
                value="",
                limit="unique within the stream",
            )
        if request_id in self._unfinished:
            raise DuplicateRequestError(
                f"request_id {request_id!r} is unfinished on this stream. Give every request an id "
                "of its own.",
                field="request_id",
                value=request_id,
                limit="unique within the stream",
            )
        self._unfinished.add(request_id)

    async def _generate(
        self, message: inference_pb2.GenerateRequest
    ) -> inference_pb2.GenerateResponse:
        async with self._generations.admit(
            message,
            timeout_s=self._context.time_remaining(),
            # Batches are for throughput, and their window bounds what they queue.
            is_patient=True,
            principal=self._principal(),
        ) as generation:
            response = inference_pb2.GenerateResponse(
                request_id=generation.request_id, seed=generation.seed
            )
            response.outputs.extend(to_outputs(await generation.gathered()))
            response.usage.CopyFrom(generation.usage())
            return response

    def _error(self, request_id: str, error: Exception) -> inference_pb2.GenerateBatchResponse:
        self._guard.record(error)
        # Half a megabyte of a bad id must not come back.
        return inference_pb2.GenerateBatchResponse(
            request_id=request_id[:256], error=rpc_status.to_status(error)
        )
