"""What a batch sends again after a break, without a server."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from pagewire_client import BatchResult, PagewireError, ResumePolicy, build_request
from pagewire_client import resume as resume_module
from pagewire_client.batch import BatchLog
from pagewire_client.errors import UnavailableError
from pagewire_client.resume import Outage

from protos.pagewire.v1 import inference_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest


def requests(count: int) -> list[pb.GenerateRequest]:
    return [build_request([5], {"request_id": str(i)}) for i in range(count)]


def refusal(request_id: str, reason: str) -> pb.GenerateBatchResponse:
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason=reason))
    return pb.GenerateBatchResponse(
        request_id=request_id, error=status_pb2.Status(code=8, details=[detail])
    )


def ids(messages: Iterator[pb.GenerateBatchRequest]) -> list[str]:
    return [message.request.request_id for message in messages]


def test_the_next_stream_brings_what_is_unanswered_first_and_takes_it_over() -> None:
    log = BatchLog(requests(4))
    first = log.messages()
    assert [next(first).request.request_id for _ in range(3)] == ["0", "1", "2"]
    assert isinstance(log.result(pb.GenerateBatchResponse(request_id="1")), BatchResult)
    again = list(log.messages())
    assert [message.request.request_id for message in again] == ["0", "2", "3"]
    assert [len(message.request.resume) for message in again] == [1, 1, 0]
    assert log.num_resumes == 1
    assert next(first, None) is None


def test_nothing_more_is_read_from_the_caller_for_a_server_that_goes_away() -> None:
    left = iter(requests(1000))
    log = BatchLog(left)
    stream = log.messages()
    assert next(stream).request.request_id == "0"
    assert isinstance(log.result(refusal("0", "SHUTTING_DOWN")), PagewireError)
    assert list(stream) == []
    assert next(left).request_id == "1"
    assert next(log.messages()).request.request_id == "0"


def test_what_was_taken_once_is_not_given_up_because_everybody_comes_back() -> None:
    log = BatchLog(requests(2))
    first = log.messages()
    next(first)
    next(first)
    # At first it is an answer like any other.
    refused = log.result(refusal("1", "OVERLOADED"))
    assert isinstance(refused, BatchResult)
    assert refused.error is not None
    assert ids(log.messages()) == ["0"]
    assert isinstance(log.result(refusal("0", "OVERLOADED")), PagewireError)
    assert ids(log.messages()) == ["0"]
    # For good is what is wrong with the request itself.
    assert isinstance(log.result(refusal("0", "INVALID_REQUEST")), BatchResult)
    assert not log.has_unanswered


def test_a_request_that_comes_while_the_next_stream_begins_is_in_it_once() -> None:
    """gRPC's thread of the broken stream waits for the caller while its successor begins."""
    count = 30_000
    may_go_on = threading.Event()

    def slow() -> Iterator[pb.GenerateRequest]:
        yield from requests(count)
        may_go_on.wait()
        yield build_request([5], {"request_id": "late"})

    log = BatchLog(slow())
    first = log.messages()
    for _ in range(count):
        next(first)
    thread = threading.Thread(target=lambda: next(first, None))
    thread.start()
    may_go_on.set()
    second = log.messages()
    thread.join()
    sent = ids(second)
    assert sent == [*map(str, range(count)), "late"]


def test_time_in_which_the_server_had_the_call_is_no_outage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(resume_module.time, "monotonic", lambda: now)
    outage = Outage(ResumePolicy(limit_s=10.0), None)
    gone = UnavailableError("gone", code=grpc.StatusCode.UNAVAILABLE)

    def pause_s() -> float | None:
        return outage.pause_s(gone, has_begun=True, has_tokens=True)

    assert pause_s() is not None
    now = 100.0
    outage.stood(99.0)
    assert pause_s() is not None
    # What is between such times adds up.
    now = 210.0
    outage.stood(100.0)
    assert pause_s() is None
