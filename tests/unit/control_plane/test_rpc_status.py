"""The status that a failed call ends with."""

from __future__ import annotations

from google.rpc import code_pb2, error_details_pb2

from control_plane.rpc_status import to_status


def test_what_nobody_planned_has_a_reason_and_none_of_its_own_words() -> None:
    status = to_status(KeyError("a prompt"))
    [detail] = status.details
    info = error_details_pb2.ErrorInfo()
    assert detail.Unpack(info)
    assert (info.reason, info.domain, dict(info.metadata)) == ("INTERNAL", "pagewire", {})
    assert status.code == code_pb2.INTERNAL
    assert "prompt" not in str(status)
