"""ServingError to google.rpc.Status, the form in which every failed call ends."""

from __future__ import annotations

from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from control_plane.errors import ServingError

DOMAIN = "pagewire"


def to_status(error: BaseException) -> status_pb2.Status:
    """Build the Status that a call is aborted with.

    Anything but a ServingError becomes INTERNAL with a fixed message: what an unplanned exception
    says may name internals or quote a prompt, and belongs in the log, not on the wire.
    """
    if not isinstance(error, ServingError):
        error = ServingError("Internal error; see the server's log.")
    details: list[any_pb2.Any] = []
    info = any_pb2.Any()
    info.Pack(
        error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    )
    details.append(info)
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        retry = any_pb2.Any()
        retry.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        details.append(retry)
    return status_pb2.Status(code=int(error.code), message=error.message, details=details)
