"""Every error that a client or a worker can be answered with, and its gRPC status code.

    ServingError
    ├── InvalidRequestError        INVALID_ARGUMENT     a value is outside its limit
    ├── RequestTooLongError        INVALID_ARGUMENT     prompt or total does not fit
    ├── UnauthenticatedError       UNAUTHENTICATED      no token, or one that nobody has
    ├── UnknownModelError          NOT_FOUND
    ├── DuplicateRequestError      ALREADY_EXISTS
    ├── UnsupportedFeatureError    UNIMPLEMENTED        known to the API, not built into this server
    ├── OverloadedError            RESOURCE_EXHAUSTED   carries RetryInfo
    ├── SlowClientError            RESOURCE_EXHAUSTED   the client does not read its stream
    ├── UnavailableError           UNAVAILABLE          carries RetryInfo
    ├── ShuttingDownError          UNAVAILABLE
    ├── AbortedError               ABORTED              taken over by a resume, or from within
    ├── DeadlineError              DEADLINE_EXCEEDED
    ├── ReplayLimitError           INTERNAL             a request at its third lost worker
    └── ProtocolError              (per reason)         a worker broke the control stream's rules

`InvariantError` is not among them: it says that this process is wrong about its own state, nobody
catches it, and the process ends.

Owns: reasons, codes, the shape of messages. Does not know: transports; `rpc_status` turns an error
into what travels.
"""

from __future__ import annotations

from enum import IntEnum


class Code(IntEnum):
    """The gRPC status codes in use, by their wire numbers, so that the pure core needs no grpc."""

    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


class InvariantError(RuntimeError):
    """This process contradicts itself; the message holds the state. Never caught."""


class ServingError(Exception):
    """An answer to bad input or to a known outage.

    Attributes:
        reason: Stable upper-case name for machines.
        code: The gRPC status code it travels with.
        metadata: The values and limits that the message names, as strings.
        retry_after_s: When trying again makes sense; None if it does not.
    """

    reason: str = "INTERNAL"
    code: Code = Code.INTERNAL

    def __init__(
        self, message: str, *, retry_after_s: float | None = None, **metadata: object
    ) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = {key: str(value) for key, value in metadata.items()}
        self.retry_after_s = retry_after_s


class InvalidRequestError(ServingError):
    """A field's value is outside its limits. `field` is always in the metadata."""

    reason = "INVALID_REQUEST"
    code = Code.INVALID_ARGUMENT

    def __init__(self, message: str, *, field: str, **metadata: object) -> None:
        super().__init__(message, retry_after_s=None, field=field, **metadata)


class RequestTooLongError(ServingError):
    """Prompt, or prompt and output together, fit neither the model nor any replica's pool."""

    reason = "REQUEST_TOO_LONG"
    code = Code.INVALID_ARGUMENT


class UnauthenticatedError(ServingError):
    """A call brings no valid token. `problem` is in the metadata, the token never."""

    reason = "UNAUTHENTICATED"
    code = Code.UNAUTHENTICATED


class UnknownModelError(ServingError):
    reason = "UNKNOWN_MODEL"
    code = Code.NOT_FOUND


class DuplicateRequestError(ServingError):
    reason = "DUPLICATE_REQUEST_ID"
    code = Code.ALREADY_EXISTS


class UnsupportedFeatureError(ServingError):
    reason = "UNSUPPORTED_FEATURE"
    code = Code.UNIMPLEMENTED


class OverloadedError(ServingError):
    reason = "OVERLOADED"
    code = Code.RESOURCE_EXHAUSTED


class SlowClientError(ServingError):
    reason = "SLOW_CLIENT"
    code = Code.RESOURCE_EXHAUSTED


class UnavailableError(ServingError):
    reason = "NO_REPLICA"
    code = Code.UNAVAILABLE


class ShuttingDownError(ServingError):
    reason = "SHUTTING_DOWN"
    code = Code.UNAVAILABLE


class AbortedError(ServingError):
    reason = "ABORTED"
    code = Code.ABORTED


class DeadlineError(ServingError):
    reason = "DEADLINE_EXCEEDED"
    code = Code.DEADLINE_EXCEEDED


class ReplayLimitError(ServingError):
    reason = "REPLAY_LIMIT"
    code = Code.INTERNAL


class ProtocolError(ServingError):
    """A worker's message breaks the rules of the control stream; its stream ends with this.

    The reason is the instance's, not the class's: protos/README.md lists them all.
    """

    code = Code.FAILED_PRECONDITION

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        code: Code = Code.FAILED_PRECONDITION,
        **metadata: object,
    ) -> None:
        super().__init__(message, retry_after_s=None, **metadata)
        self.reason = reason
        self.code = code
