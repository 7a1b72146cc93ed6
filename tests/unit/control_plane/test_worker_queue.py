from __future__ import annotations

from control_plane.worker_service import _Stream
from protos.pagewire.v1 import worker_pb2

HEARTBEAT = worker_pb2.ControlMessage(heartbeat=worker_pb2.Heartbeat())


async def test_a_worker_that_does_not_read_collects_no_heartbeats() -> None:
    stream = _Stream("s1")
    stream.send(HEARTBEAT)
    plans = [worker_pb2.ControlMessage(plan=worker_pb2.Plan(version=i)) for i in range(3)]
    for plan in plans:
        for _ in range(100):
            stream.send(HEARTBEAT)
        stream.send(plan)
    messages = stream.messages()
    assert [await anext(messages) for _ in range(4)] == [HEARTBEAT, *plans]
    assert not stream._queue
    stream.send(HEARTBEAT)
    assert await anext(messages) == HEARTBEAT
    stream.end(None)
    stream.send(plans[0])
    assert not stream._queue
