"""The book-keeping of one batch stream, the same for both clients."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from pagewire_client.errors import from_status
from pagewire_client.results import BatchResult, GenerationLog
from protos.pagewire.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class BatchLog:
    """Gives requests their ids and turns responses into results."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def number(
        self, requests: Iterable[inference_pb2.GenerateRequest]
    ) -> Iterator[inference_pb2.GenerateBatchRequest]:
        """The messages to send; the caller's requests stay as they are."""
        for request in requests:
            yield self.message(request)

    def message(self, request: inference_pb2.GenerateRequest) -> inference_pb2.GenerateBatchRequest:
        """One message to send."""
        message = inference_pb2.GenerateBatchRequest(request=request)
        number = next(self._numbers)
        if not message.request.request_id:
            message.request.request_id = str(number)
        return message

    def result(self, response: inference_pb2.GenerateBatchResponse) -> BatchResult:
        """One answer."""
        if response.WhichOneof("result") == "error":
            return BatchResult(response.request_id, None, from_status(response.error))
        log = GenerationLog(inference_pb2.GenerateRequest(request_id=response.request_id))
        log.add(response.response)
        return BatchResult(response.request_id, log.completion(), None)
