"""What can go wrong with a call, as exceptions that programs can tell apart.

    PagewireError                    any failed call
    ├── InvalidRequestError          a field is outside its limit: do not retry
    │   └── UnsupportedFeatureError  the server does not have what a field asks for
    ├── UnauthenticatedError         no token, or not one of the server's
    ├── NotFoundError                no such model
    ├── DuplicateRequestError        the request id is live
    ├── OverloadedError              retry after `retry_after_s`
    ├── SlowClientError              the stream was not read: read faster or resume
    ├── UnavailableError             no server, no replica or shutting down: retry
    ├── AbortedError                 another call resumed the request
    ├── DeadlineError                the call's own timeout
    └── CancelledError               the call was cancelled

Owns: the mapping from statuses. Does not know: calls.
"""

from __future__ import annotations

import contextlib
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from protos.connection_hints import connection_hint, is_other_service

_DETAILS_KEY = "grpc-status-details-bin"


class PagewireError(Exception):
    """A call failed.

    Attributes:
        message: What happened, with values, limit and remedy, as the server says it.
        code: The gRPC status code.
        reason: Stable upper-case name, such as OVERLOADED; empty if no Pagewire server answered.
        metadata: Values and limits that the message names: `field`, `value`, `limit`, ...
        retry_after_s: When a retry makes sense, if the server said so.
    """

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode = grpc.StatusCode.UNKNOWN,
        reason: str = "",
        metadata: dict[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.reason = reason
        self.metadata = metadata or {}
        self.retry_after_s = retry_after_s


class InvalidRequestError(PagewireError):
    """A field's value is outside its limit."""


class UnsupportedFeatureError(InvalidRequestError):
    """A field asks for what this server does not have."""


class UnauthenticatedError(PagewireError):
    """The call brought no token, or one that the server does not know."""


class NotFoundError(PagewireError):
    """No such model."""


class DuplicateRequestError(PagewireError):
    """The request id is in use by a live request."""


class OverloadedError(PagewireError):
    """The server's queue is full."""


class SlowClientError(PagewireError):
    """The server gave up on a stream that was not read."""


class UnavailableError(PagewireError):
    """Nothing could take the request now."""


class AbortedError(PagewireError):
    """The request was ended from elsewhere."""


class DeadlineError(PagewireError):
    """The call took longer than its timeout."""


class CancelledError(PagewireError):
    """The call was cancelled on this side."""


_BY_REASON: dict[str, type[PagewireError]] = {"SLOW_CLIENT": SlowClientError}
_BY_CODE: dict[grpc.StatusCode, type[PagewireError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.UNIMPLEMENTED: UnsupportedFeatureError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: DuplicateRequestError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.ABORTED: AbortedError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.CANCELLED: CancelledError,
}
# What grpc says of a call that was cancelled on this side; no server of ours ever says CANCELLED.
_LOCALLY_CANCELLED = "Locally cancelled by application!"
_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def from_status(status: status_pb2.Status) -> PagewireError:
    """The exception for a status, such as a batch response carries."""
    reason, metadata, retry_after_s = "", dict[str, str](), None
    for detail in status.details:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    error_class = _BY_REASON.get(reason) or _BY_CODE.get(code, PagewireError)
    return error_class(
        status.message, code=code, reason=reason, metadata=metadata, retry_after_s=retry_after_s
    )


def from_rpc_error(error: grpc.RpcError, *, server: str) -> PagewireError:
    """The exception for a failed call.

    Args:
        error: What grpc raised, sync or async.
        server: The address, for the case that nobody answered.
    """
    call: Any = error
    for key, value in call.trailing_metadata() or ():
        if key == _DETAILS_KEY:
            # What is none comes from something in between, and counts for nothing.
            with contextlib.suppress(DecodeError):
                return from_status(status_pb2.Status.FromString(value))
    code: grpc.StatusCode = call.code()
    details = str(call.details() or "")
    if code is grpc.StatusCode.UNAVAILABLE:
        if (hint := connection_hint(details)) is not None:
            return UnavailableError(f"No connection to {server}. {hint} ({details})", code=code)
        return UnavailableError(
            f"Nothing answers at {server} ({details}). Start a control plane there, or name "
            "another server.",
            code=code,
        )
    if code is grpc.StatusCode.CANCELLED and details != _LOCALLY_CANCELLED:
        return UnavailableError(
            f"{server} ended the call without a reason, as a server does with what arrives while "
            "it closes. Try again, or resume.",
            code=code,
        )
    if code is grpc.StatusCode.UNIMPLEMENTED and is_other_service(details):
        return UnsupportedFeatureError(
            f"{server} speaks gRPC, but not the public API. A control plane's worker port does so: "
            "call its public port, 50051 by default.",
            code=code,
        )
    error_class = _BY_CODE.get(code, PagewireError)
    return error_class(details or code.name, code=code)


def not_encodable(error: Exception) -> InvalidRequestError:
    """The exception for arguments that no message can carry, lone surrogates above all."""
    return InvalidRequestError(
        f"The request cannot be encoded: {type(error).__name__}. Texts must be valid Unicode "
        "without lone surrogates, and numbers must fit their fields.",
        code=grpc.StatusCode.INVALID_ARGUMENT,
        reason="INVALID_REQUEST",
        metadata={"field": "request"},
    )
