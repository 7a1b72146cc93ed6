"""The launcher that demos and tests share, and the whole system through the Python client."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio
import pytest
import redis.asyncio
from conditions import until

from demo.leftovers import AlreadyRunningError, RunDirectory, end_process, start_time_of
from demo.link import Link, LinkConfig
from demo.ports import PortClaims, is_port_free
from demo.processes import (
    ManagedProcess,
    ProcessDiedError,
    ProcessGroup,
)
from demo.stack import ServingStack, StackConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

ROOT = Path(__file__).resolve().parents[2]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
SLEEP = [sys.executable, "-c", "import time; print('sleeping', flush=True); time.sleep(600)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print('stubborn', flush=True); time.sleep(600)",
]


@pytest.mark.slow
@pytest.mark.redis
async def test_answers_and_index_survive_a_restart_of_the_control_plane(tmp_path, model_dir):
    config = StackConfig(
        root=ROOT,
        base_dir=tmp_path,
        model_dir=model_dir,
        model_name="smol",
        python=sys.executable,
        environment=os.environ,
        random_ports=True,
        worker_args=("--max-model-len", "1024", "--kv-cache-memory", "128MiB"),
    )
    async with ServingStack(config) as stack:
        await stack.start_store()
        stack.start_control_plane()
        stack.start_worker("w0")
        await stack.wait_until_ready()
        async with stack.client() as client:
            first = await client.complete(QUESTION, temperature=0.0, max_tokens=24)
            assert "Paris" in first.text
            assert (await client.stats()).prefix_store == "redis: ok"
        assert stack.ports.store is not None
        async with redis.asyncio.Redis(port=stack.ports.store, protocol=2) as store:

            async def is_index_written() -> bool:
                keys = await store.keys("pagewire:1:blocks:*")
                # The prompt's two full blocks at least, and the writer's mark.
                return len(keys) == 1 and await store.hlen(keys[0]) >= 3

            await until(is_index_written)
        assert stack.control_plane is not None
        stack.control_plane.kill()
        await stack.control_plane.wait()
        stack.start_control_plane()
        await stack.wait_until_ready()
        async with stack.client() as client:
            again = await client.complete(QUESTION, temperature=0.0, max_tokens=24)
            assert again.token_ids == first.token_ids
            assert (await client.stats()).term == 2
        pids = [process.pid for process in stack.processes.processes]
    assert [start_time_of(pid) for pid in pids] == [None] * len(pids)


@pytest.fixture
async def group(tmp_path: Path) -> AsyncIterator[ProcessGroup]:
    async with ProcessGroup(log_dir=tmp_path, cwd=tmp_path, env=os.environ, grace_s=0.5) as group:
        yield group


async def until_logged(process: ManagedProcess, text: str) -> None:
    await until(lambda: text in process.log_tail())


async def test_group_stops_the_youngest_first_and_leaves_nobody(tmp_path):
    async with ProcessGroup(log_dir=tmp_path, cwd=tmp_path, env=os.environ, grace_s=0.5) as group:
        processes = [group.start(f"p{i}", SLEEP) for i in range(2)]
        processes.append(group.start("stubborn", STUBBORN))
        for process in processes:
            await until_logged(process, "s")
    assert [process.returncode for process in processes] == [-15, -15, -9]


async def test_group_ends_children_when_its_block_fails(tmp_path):
    started: list[ManagedProcess] = []

    async def fail() -> None:
        async with ProcessGroup(log_dir=tmp_path, cwd=tmp_path, env=os.environ) as group:
            started.append(group.start("p", SLEEP))
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        await fail()
    assert started[0].returncode is not None


async def test_guard_reports_a_death_with_the_end_of_the_log(group):
    group.start("p", [sys.executable, "-c", "print('last words'); raise SystemExit(3)"])
    with pytest.raises(ProcessDiedError, match=r"p ended with code 3 .*\n.*last words") as death:
        await group.guard(asyncio.Event().wait())
    assert "last words" in str(death.value)


async def test_guard_names_the_death_that_made_the_work_fail(group):
    process = group.start("p", [sys.executable, "-c", "import time; time.sleep(0.2)"])

    async def work() -> None:
        await until(lambda: not process.is_running)
        raise ConnectionError("broken pipe")

    with pytest.raises(ProcessDiedError):
        await group.guard(work())


async def test_guard_lets_a_wanted_kill_pass(group):
    group.start("p", SLEEP).kill()
    assert await group.guard(asyncio.sleep(0.3, "done")) == "done"


async def test_stop_that_is_interrupted_still_ends_the_child(group):
    process = group.start("stubborn", STUBBORN)
    await until_logged(process, "stubborn")
    stopping = asyncio.create_task(process.stop(grace_s=600))
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert process.returncode == -9


async def test_only_the_exact_process_is_ended(group):
    process = group.start("p", SLEEP)
    start_time = start_time_of(process.pid)
    assert start_time is not None
    assert not end_process(process.pid, start_time + "1")
    assert process.is_running
    assert end_process(process.pid, start_time)
    await process.wait(10)
    assert not end_process(process.pid, start_time)


def test_directory_is_held_by_one(tmp_path):
    with (
        RunDirectory(tmp_path, command="first"),
        pytest.raises(AlreadyRunningError, match=f"first, pid {os.getpid()}"),
        RunDirectory(tmp_path, command="second"),
    ):
        pass
    with RunDirectory(tmp_path, command="third"):
        pass


@pytest.mark.parametrize("content", ["", "{", "[1]", '[{"pid": 1}]', '[{"pid": -5}]', "null"])
def test_damaged_state_file_ends_nobody(tmp_path, content):
    (tmp_path / "processes.json").write_text(content)
    with RunDirectory(tmp_path, command="demo") as run:
        assert run.end_leftovers(print) == 0


@pytest.fixture
def claims() -> Iterator[PortClaims]:
    claims = PortClaims()
    yield claims
    claims.close()


async def test_a_port_that_something_listens_on_is_not_claimed(claims):
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert not is_port_free(port)
        assert claims.next_free(port) > port


async def test_a_claimed_port_is_for_its_server_alone(claims):
    port = claims.any_free()
    other = PortClaims()
    assert other.next_free(port) > port
    with socket.socket() as connection, pytest.raises(OSError):
        connection.bind(("127.0.0.1", port))
    for _ in range(2):  # a control plane that is started again
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        assert server.add_insecure_port(f"127.0.0.1:{port}") == port
        await server.start()
        assert not is_port_free(port)
        await server.stop(0)
    claims.close()
    other.close()
    assert other.next_free(port) == port
    other.close()


def test_two_stacks_of_one_moment_choose_different_ports(tmp_path):
    config = StackConfig(
        root=ROOT,
        base_dir=tmp_path,
        model_dir=tmp_path,
        model_name="m",
        python=sys.executable,
        environment={},
    )
    stacks = [ServingStack(config) for _ in range(2)]
    ports = [p for s in stacks for p in (s.ports.public, s.ports.worker, s.ports.metrics)]
    for stack in stacks:
        asyncio.run(stack.aclose())
    assert len(set(ports)) == 6


@pytest.fixture
async def echo_port() -> AsyncIterator[int]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_link_carries_every_byte_in_order(echo_port):
    sent = os.urandom(1_000_000)
    jittery = LinkConfig(delay_s=0.005, jitter_s=0.01, bandwidth=50e6)
    async with Link(echo_port, upstream=jittery, downstream=jittery) as link:
        reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
        writer.write(sent)
        assert await reader.readexactly(len(sent)) == sent
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()


async def test_a_connection_that_is_cut_before_it_began_is_closed_too(echo_port):
    async with Link(echo_port) as link:
        for _ in range(8):
            # Blocks, so that the link hears of it only now that it is being cut.
            with socket.create_connection(("127.0.0.1", link.port), timeout=30) as client:
                client.setblocking(False)
                end = asyncio.create_task(end_of(client))
                while not end.done():
                    await link.cut()
                    await asyncio.sleep(0)
                await end


async def end_of(client: socket.socket) -> None:
    """Wait until the other side has closed."""
    async with asyncio.timeout(30):
        with contextlib.suppress(ConnectionError):
            assert await asyncio.get_running_loop().sock_recv(client, 1) == b""


async def test_link_delays_bytes_without_holding_up_those_behind(echo_port):
    loop = asyncio.get_running_loop()
    async with Link(echo_port, upstream=LinkConfig(delay_s=0.3)) as link:
        reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
        started_at = loop.time()
        for number in range(5):
            writer.write(bytes([number]))
            await writer.drain()
            await until(lambda number=number: link.in_flight_bytes > number)
        # All of them are on their way before the first one arrives.
        assert await reader.readexactly(5) == bytes(range(5))
        assert loop.time() - started_at >= 0.3
        writer.close()
        await writer.wait_closed()


async def test_frozen_link_delivers_nothing_and_a_cut_ends_connections(echo_port):
    async with Link(echo_port) as link:
        reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
        link.freeze()
        writer.write(b"held")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await reader.read(1)
        link.thaw()
        assert await reader.readexactly(4) == b"held"
        await link.cut()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()


async def test_link_silences_one_direction_alone():
    arrived = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(5))
        arrived.set()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server, Link(server.sockets[0].getsockname()[1]) as link:
        reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
        link.freeze(upstream=False)
        writer.write(b"there")
        await arrived.wait()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await reader.read(1)
        link.thaw()
        assert await reader.readexactly(5) == b"there"
        writer.close()


async def test_link_that_is_cut_refuses_until_it_is_mended(echo_port):
    async with Link(echo_port) as link:
        await link.cut(refuse_new=True)
        reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()
        link.mend()
        reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
        writer.write(b"on")
        assert await reader.readexactly(2) == b"on"
        writer.close()
        await writer.wait_closed()
