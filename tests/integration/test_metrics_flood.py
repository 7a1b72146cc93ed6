"""The metrics port while somebody holds more connections than it has."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import urllib.request
from typing import TYPE_CHECKING

import pytest

from control_plane.metrics import Metrics
from control_plane.metrics_server import MetricsServer
from control_plane.stats import ClusterSnapshot

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

SNAPSHOT = ClusterSnapshot(
    replicas=(),
    num_requests_unplaced=0,
    num_requests_live=0,
    term=0,
    started_at_s=0.0,
    prefix_store="memory",
    num_replicas_lost=0,
    num_replays=0,
    num_stalls=0,
    stalled_s=0.0,
)


@pytest.fixture
async def server() -> AsyncGenerator[MetricsServer]:
    server = MetricsServer(Metrics(), lambda: SNAPSHOT, host="127.0.0.1", port=0)
    yield server
    await server.close()


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as response:
        return response.read().decode()


@pytest.mark.parametrize("said", [b"", b"GET /heal"])
async def test_connections_that_say_little_or_nothing_keep_nobody_out(
    said: bytes, server: MetricsServer
) -> None:
    with contextlib.ExitStack() as held:
        for _ in range(40):
            address = ("127.0.0.1", server.port)
            connection = held.enter_context(contextlib.closing(socket.create_connection(address)))
            connection.sendall(said)
        assert await asyncio.to_thread(get, server.port, "/healthz") == "serving\n"
        assert "pagewire_term 0.0" in await asyncio.to_thread(get, server.port, "/metrics")


async def test_connections_that_were_ended_leave_room_for_as_many(server: MetricsServer) -> None:
    for _ in range(100):
        with socket.create_connection(("127.0.0.1", server.port)):
            pass
    answers = await asyncio.gather(
        *(asyncio.to_thread(get, server.port, "/healthz") for _ in range(8))
    )
    assert answers == ["serving\n"] * 8
