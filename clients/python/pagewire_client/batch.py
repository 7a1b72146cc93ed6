"""The book-keeping of one batch over all its streams, the same for both clients.

Owns: ids, what is not answered yet and is sent again after a break, what a server says of a stream
before any answer. Does not know: calls, pauses.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import deque
from typing import TYPE_CHECKING

from pagewire_client.errors import PagewireError, from_status
from pagewire_client.results import BatchResult, GenerationLog
from protos.pagewire.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

# The server goes away and has not run the request to its end: not an answer to pass on.
_SHUTTING_DOWN = "SHUTTING_DOWN"
# What was taken before a break was not too much then; now everybody comes back at once.
_OVERLOADED = "OVERLOADED"
# Comes before any answer, in the header of a stream that a Pagewire server has begun to serve.
_STREAM_HEADER = "pagewire-stream"


def is_served(initial_metadata: Any) -> bool:
    """Whether the header of a stream comes from a server that reads it.

    A call that reached nobody, or that was refused, has none.
    """
    return any(key == _STREAM_HEADER for key, _ in initial_metadata or ())


class BatchLog:
    """Gives requests their ids, turns responses into results, and knows what to send again.

    Requests without an id are "0", "1", ... to the caller; what travels is unique, since ids of
    two batches at one server must not meet.
    """

    def __init__(
        self, requests: Iterable[inference_pb2.GenerateRequest], *, resumes: bool = True
    ) -> None:
        self._requests = iter(requests)
        self._resumes = resumes
        self._numbers = itertools.count()
        self._prefix = f"batch-{secrets.token_hex(6)}-"
        # gRPC reads requests on a thread of each stream, and that of a broken one can still be
        # waiting for the caller's next request when its successor begins.
        self._reading = threading.Lock()
        self._state = threading.Lock()
        self._attempt = 0
        self._is_leaving = False
        self._unanswered: list[inference_pb2.GenerateBatchRequest] = []
        self._to_send: deque[inference_pb2.GenerateBatchRequest] = deque()
        self._sent_before = set[str]()

    @property
    def has_unanswered(self) -> bool:
        return bool(self._unanswered)

    @property
    def num_resumes(self) -> int:
        """Streams after the first one."""
        return max(0, self._attempt - 1)

    def messages(self) -> Iterator[inference_pb2.GenerateBatchRequest]:
        """The messages of the next stream: what is unanswered first, then what the caller has."""
        with self._state:
            self._attempt += 1
            self._is_leaving = False
            # What the thread of the stream before may still bring was never sent.
            sent_before = list(self._unanswered)
            self._to_send = deque(sent_before)
            self._sent_before = {message.request.request_id for message in sent_before}
        for message in sent_before:
            if not message.request.resume:
                # Whatever of it still runs at a server is replaced.
                message.request.resume.add(index=0)
        return self._feed(self._attempt)

    def result(self, response: inference_pb2.GenerateBatchResponse) -> BatchResult | PagewireError:
        """One answer, or the error of a request that is to be sent again."""
        request_id = response.request_id
        error = None
        if response.WhichOneof("result") == "error":
            error = from_status(response.error)
            if self._resumes and self._comes_again(request_id, error):
                return error
        with self._state:
            for i, message in enumerate(self._unanswered):
                if message.request.request_id == request_id:
                    del self._unanswered[i]
                    break
        own_id = request_id.removeprefix(self._prefix)
        if error is not None:
            return BatchResult(own_id, None, error)
        log = GenerationLog(inference_pb2.GenerateRequest())
        log.add(response.response)
        log.request_id = own_id
        return BatchResult(own_id, log.completion(), None)

    def _comes_again(self, request_id: str, error: PagewireError) -> bool:
        if error.reason == _SHUTTING_DOWN:
            # It would say so to all others too, and the caller has them until they are sent.
            self._is_leaving = True
            return True
        return error.reason == _OVERLOADED and request_id in self._sent_before

    def _feed(self, attempt: int) -> Iterator[inference_pb2.GenerateBatchRequest]:
        while True:
            with self._reading:
                message = self._next(attempt)
            if message is None:
                return
            yield message

    def _next(self, attempt: int) -> inference_pb2.GenerateBatchRequest | None:
        with self._state:
            if attempt != self._attempt or self._is_leaving:
                return None
            if self._to_send:
                return self._to_send.popleft()
        request = next(self._requests, None)
        if request is None:
            return None
        message = inference_pb2.GenerateBatchRequest(request=request)
        number = next(self._numbers)
        if not message.request.request_id:
            message.request.request_id = f"{self._prefix}{number}"
        with self._state:
            self._unanswered.append(message)
            if attempt == self._attempt:
                return message
            # The stream broke while the caller was asked: its successor sends this one.
            self._to_send.append(message)
            return None
