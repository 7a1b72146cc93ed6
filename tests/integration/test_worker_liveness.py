"""A worker that says it lives, and notices that its control plane or the network does not."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self

from fake_worker import FakeWorker
from scripted_control_plane import ScriptedControlPlane, heartbeat, plan, start_row, until


async def test_heartbeats_go_on_during_a_long_step() -> None:
    async with ScriptedControlPlane() as control, FakeWorker(control.address) as worker:
        stream = await control.accept()
        await stream.attach(1, lease_s=0.3)
        worker.runner.gate.clear()
        await stream.send(plan(2))
        for _ in range(3):
            assert (await stream.receive(heartbeats=True)).HasField("heartbeat")
            await stream.send(heartbeat())
        worker.runner.gate.set()
        assert (await stream.receive()).step_result.version == 2


async def test_control_plane_that_is_silent_for_a_lease_counts_as_gone() -> None:
    # The process lives and its transport answers pings; only its own messages count.
    async with ScriptedControlPlane() as control, FakeWorker(control.address):
        stream = await control.accept()
        await stream.attach(1, lease_s=0.3)
        for _ in range(3):
            await stream.receive(heartbeats=True)
            await stream.send(heartbeat())
        await stream.receive_end()
        stream = await control.accept()
        await stream.attach(2)
        await start_row(stream, 3)


class CuttableNetwork:
    """A TCP proxy that, once cut, keeps its connections open and forwards nothing more."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._pipes: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []
        self.is_cut = False

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        if self.is_cut:
            return
        target_reader, target_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        self._writers.append(target_writer)
        self._pipes += [
            asyncio.create_task(self._pipe(reader, target_writer)),
            asyncio.create_task(self._pipe(target_reader, writer)),
        ]

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                if not self.is_cut:
                    writer.write(data)
            if not self.is_cut:
                writer.close()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for pipe in self._pipes:
            pipe.cancel()
        await asyncio.gather(*self._pipes, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()


async def test_idle_stream_over_a_network_that_was_cut_ends_and_comes_back() -> None:
    async with (
        ScriptedControlPlane() as control,
        CuttableNetwork(control.port) as network,
        FakeWorker(network.address, keepalive_s=0.3) as worker,
    ):
        stream = await control.accept()
        await stream.attach(1)
        await start_row(stream, 2)
        network.is_cut = True
        await until(lambda: not worker.is_serving)
        network.is_cut = False
        stream = await control.accept()
        assert (await stream.attach(9)).applied_version == 2
