"""The worker's control stream against a scripted control plane on a real port."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Self

import grpc
import numpy as np
import pytest
from fake_worker import FakeModelRunner, FakeWorker, expected_output
from scripted_control_plane import (
    ScriptedControlPlane,
    ScriptedStream,
    added_row,
    column,
    heartbeat,
    plan,
    read_column,
    reset,
    rich_status,
    until,
    welcome,
)

from data_plane.control_stream import (
    EXIT_DEVICE_LOST,
    EXIT_OK,
    EXIT_REFUSED,
    EXIT_SUPERSEDED,
)
from data_plane.plan_refused import Refusal, status_reason
from protos.pagewire.v1 import worker_pb2

PROMPT = [11, 12, 13, 14, 15, 16]


async def start_row(stream: ScriptedStream, version: int, *, row: int = 0) -> list[int]:
    """Add a row, compute its prompt, and return the sampled token."""
    first_block = 1 + 6 * row
    await stream.send(
        plan(
            version,
            added_rows=[added_row(row, PROMPT, list(range(first_block, first_block + 6)))],
            chunk_rows=[row],
            chunk_num_tokens=[len(PROMPT)],
        )
    )
    result = (await stream.receive()).step_result
    assert result.version == version
    return read_column(result.token_ids)


async def test_steps_ordered_ahead_come_back_in_order_with_the_models_tokens() -> None:
    async with ScriptedControlPlane() as control, FakeWorker(control.address) as worker:
        stream = await control.accept()
        hello = await stream.attach(10)
        assert hello.applied_version == 0
        assert hello.worker_id == "w0"
        assert hello.kv_geometry.block_size == worker.runner.block_size
        tokens = await start_row(stream, 11)
        await stream.send(plan(12), plan(13))
        next_version = 14
        while True:
            result = (await stream.receive()).step_result
            tokens += read_column(result.token_ids)
            if result.finished_rows:
                break
            await stream.send(plan(next_version))
            next_version += 1
        assert (tokens, result.finish_reasons[0]) == expected_output(
            PROMPT, max_total_tokens=24, eos_token_ids=()
        )


async def test_refused_plan_is_nacked_and_plans_behind_it_are_dropped_until_the_reset() -> None:
    async with ScriptedControlPlane() as control, FakeWorker(control.address) as worker:
        stream = await control.accept()
        await stream.attach(1)
        await start_row(stream, 2)
        # Version 3 removes an empty row; 4 would be fine on its own, 5 builds on it.
        await stream.send(plan(3, removed_rows=[5]), plan(4), plan(5), reset(6))
        nack = (await stream.receive()).nack
        assert nack.version == 3
        assert status_reason(nack.status) == Refusal.ROW_EMPTY
        assert nack.status.message == "removed_rows names row 5, which is empty"
        # Nothing else was said before the Reset, and the row is gone with it.
        await start_row(stream, 7)
        assert worker.protocol.row_table.num_rows == 1
        assert [version for version, _ in worker.runner.launched] == [2, 7]


async def test_reset_drops_ordered_steps_and_waits_for_the_running_one_only() -> None:
    async with ScriptedControlPlane() as control, FakeWorker(control.address) as worker:
        stream = await control.accept()
        await stream.attach(1)
        await start_row(stream, 2)
        worker.runner.gate.clear()
        worker.runner.in_step.clear()
        await stream.send(plan(3), plan(4), plan(5))
        await asyncio.to_thread(worker.runner.in_step.wait)
        await stream.send(reset(6))
        await until(lambda: worker.protocol.row_table.applied_version == 6)
        worker.runner.gate.set()
        await start_row(stream, 7)
        assert [version for version, _ in worker.runner.launched] == [2, 3, 7]


async def test_plan_past_the_window_is_nacked() -> None:
    async with ScriptedControlPlane() as control, FakeWorker(control.address) as worker:
        stream = await control.accept()
        await stream.attach(1, lookahead=1)
        await start_row(stream, 2)
        worker.runner.gate.clear()
        await stream.send(plan(3), plan(4), plan(5))
        nack = (await stream.receive()).nack
        assert nack.version == 5
        assert status_reason(nack.status) == Refusal.TOO_MANY_UNCONFIRMED
        worker.runner.gate.set()
        # What was accepted before it still runs and counts.
        assert (await stream.receive()).step_result.version == 3
        assert (await stream.receive()).step_result.version == 4


@pytest.mark.parametrize("where", ["fail_launch", "fail_wait"])
async def test_failed_step_is_reported_once_and_discards_until_the_reset(where: str) -> None:
    async with ScriptedControlPlane() as control, FakeWorker(control.address) as worker:
        stream = await control.accept()
        await stream.attach(1)
        await start_row(stream, 2)
        getattr(worker.runner, where).add(3)
        await stream.send(plan(3), plan(4), plan(5))
        failed = (await stream.receive()).step_failed
        assert (failed.version, failed.step) == (3, 0)
        assert status_reason(failed.status) == "STEP_FAILED"
        await stream.send(reset(6))
        await start_row(stream, 7)


async def test_worker_whose_device_is_lost_exits() -> None:
    async with ScriptedControlPlane() as control, FakeWorker(control.address) as worker:
        stream = await control.accept()
        await stream.attach(1)
        worker.runner.is_fatal = True
        worker.runner.fail_launch.add(2)
        await stream.send(plan(2))
        assert await worker.exited() == EXIT_DEVICE_LOST


@pytest.mark.parametrize(
    "message",
    [
        welcome(term=4),
        welcome(term=5, num_blocks=65),
        worker_pb2.ControlMessage(),
        plan(2),
        reset(2),
    ],
    ids=["stale term", "num_blocks above own", "unknown message", "plan first", "reset first"],
)
async def test_unacceptable_first_message_ends_the_stream_and_a_new_one_is_tried(
    message: worker_pb2.ControlMessage,
) -> None:
    async with ScriptedControlPlane() as control, FakeWorker(control.address) as worker:
        stream = await control.accept()
        await stream.attach(1, term=5)
        await until(lambda: worker.is_serving)
        stream.end()
        stream = await control.accept()
        hello = (await stream.receive()).hello
        assert (hello.highest_term, hello.applied_version) == (5, 1)
        await stream.send(message)
        await stream.receive_end()
        stream = await control.accept()
        assert (await stream.attach(9, term=5)).highest_term == 5
        await start_row(stream, 10)


async def test_worker_reconnects_to_a_restarted_control_plane_with_its_kv_and_version() -> None:
    async with ScriptedControlPlane() as control, FakeWorker(control.address) as worker:
        stream = await control.accept()
        epoch = (await stream.attach(1)).epoch
        tokens = await start_row(stream, 2)
        await control.stop()
        await until(lambda: not worker.is_serving)
        async with ScriptedControlPlane(control.port) as restarted:
            stream = await restarted.accept()
            hello = await stream.attach(100, term=2)
            assert hello.epoch == epoch
            assert hello.applied_version == 2
            # The prompt's full block is still there: a hit gives the same token.
            await stream.send(
                plan(
                    101,
                    added_rows=[
                        added_row(
                            3, PROMPT, [1, 20, 21, 22], num_hit_blocks=1, num_computed_tokens=4
                        )
                    ],
                    chunk_rows=[3],
                    chunk_num_tokens=[2],
                )
            )
            result = (await stream.receive()).step_result
            assert result.version == 101
            assert read_column(result.token_ids) == tokens


async def test_steps_of_a_lost_stream_are_dropped_and_hello_waits_for_the_running_one() -> None:
    async with ScriptedControlPlane() as control, FakeWorker(control.address) as worker:
        stream = await control.accept()
        await stream.attach(1)
        await start_row(stream, 2)
        worker.runner.gate.clear()
        worker.runner.in_step.clear()
        await stream.send(plan(3), plan(4))
        await asyncio.to_thread(worker.runner.in_step.wait)
        await until(lambda: worker.protocol.num_unconfirmed == 2)
        stream.end()
        await until(lambda: not worker.is_serving)
        assert control._accepted.empty()
        worker.runner.gate.set()
        stream = await control.accept()
        assert (await stream.attach(9)).applied_version == 4
        await start_row(stream, 10)
        assert [version for version, _ in worker.runner.launched] == [2, 3, 10]


async def test_generations_come_in_chunks_before_the_first_result_when_asked() -> None:
    runner = FakeModelRunner(num_blocks=70_000)
    async with (
        ScriptedControlPlane() as control,
        FakeWorker(control.address, runner=runner),
    ):
        stream = await control.accept()
        await stream.attach(1, num_blocks=70_000)
        await start_row(stream, 2)
        stream.end()
        stream = await control.accept()
        await stream.attach(5, num_blocks=69_000, send_generations=True)
        await stream.send(plan(6))
        chunks = [(await stream.receive()).generations for _ in range(2)]
        assert [(chunk.first_block_id, chunk.is_last) for chunk in chunks] == [
            (0, False),
            (65_536, True),
        ]
        generations = np.frombuffer(b"".join(chunk.generations for chunk in chunks), "<i8")
        assert generations.size == 69_000
        assert generations[:8].tolist() == [0, 2, 2, 2, 2, 2, 2, 0]
        assert (await stream.receive()).step_result.version == 6


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


async def test_superseded_worker_exits_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    async with ScriptedControlPlane() as control, FakeWorker(control.address) as worker:
        stream = await control.accept()
        await stream.attach(1)
        stream.end(rich_status(grpc.StatusCode.ABORTED, "SUPERSEDED", "another w0 attached"))
        assert await worker.exited() == EXIT_SUPERSEDED
        assert "another w0 attached" in caplog.text


async def test_other_aborts_are_retried() -> None:
    async with ScriptedControlPlane() as control, FakeWorker(control.address):
        stream = await control.accept()
        await stream.attach(1)
        stream.end(rich_status(grpc.StatusCode.ABORTED, "REPLICA_LOST", "rank 1 is gone"))
        assert (await (await control.accept()).attach(5)).applied_version == 1


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNAUTHENTICATED,
    ],
    ids=lambda code: code.name,
)
async def test_refusal_for_good_exits_with_its_message(
    code: grpc.StatusCode, caplog: pytest.LogCaptureFixture
) -> None:
    async with ScriptedControlPlane() as control, FakeWorker(control.address) as worker:
        stream = await control.accept()
        await stream.receive()
        stream.end(rich_status(code, "WRONG_MODEL", "this control plane serves another model"))
        assert await worker.exited() == EXIT_REFUSED
        assert "this control plane serves another model" in caplog.text
        assert "WRONG_MODEL" in caplog.text


async def test_draining_worker_serves_until_its_rows_are_finished() -> None:
    async with ScriptedControlPlane() as control, FakeWorker(control.address) as worker:
        stream = await control.accept()
        await stream.attach(1)
        tokens = await start_row(stream, 2)
        worker.drain()
        drain = (await stream.receive()).drain
        assert drain.grace.ToSeconds() == 10
        version = 3
        while True:
            await stream.send(plan(version))
            result = (await stream.receive()).step_result
            tokens += read_column(result.token_ids)
            version += 1
            if result.finished_rows:
                break
        await stream.receive_end()
        stream.end()
        assert await worker.exited() == EXIT_OK
        assert tokens == expected_output(PROMPT, max_total_tokens=24, eos_token_ids=())[0]


async def test_draining_worker_leaves_when_the_grace_period_ends() -> None:
    async with (
        ScriptedControlPlane() as control,
        FakeWorker(control.address, grace_s=0.1) as worker,
    ):
        stream = await control.accept()
        await stream.attach(1)
        await start_row(stream, 2)
        worker.drain()
        await stream.receive_end()
        assert await worker.exited() == EXIT_OK


async def test_draining_worker_leaves_when_the_control_plane_ends_its_stream() -> None:
    async with ScriptedControlPlane() as control, FakeWorker(control.address) as worker:
        stream = await control.accept()
        await stream.attach(1)
        await start_row(stream, 2)
        worker.drain()
        assert (await stream.receive()).HasField("drain")
        stream.end()
        assert await worker.exited() == EXIT_OK


async def test_worker_that_is_not_attached_drains_at_once() -> None:
    async with ScriptedControlPlane() as control:
        address = control.address
    async with FakeWorker(address) as worker:
        worker.drain()
        assert await worker.exited() == EXIT_OK


async def test_absent_control_plane_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "data_plane")
    async with ScriptedControlPlane() as control:
        port = control.port
    async with FakeWorker(control.address) as worker:
        await until(lambda: worker.stream._num_failures >= 4)
        assert caplog.text.count("not attached, retrying") == 1
        async with ScriptedControlPlane(port) as control:
            await (await control.accept()).attach(1)
            await until(lambda: worker.is_serving)
            assert caplog.text.count(" attached: worker=w0") == 1
        # Lost again, for the same reason as before: a change of state, hence a line.
        await until(lambda: caplog.text.count("not attached, retrying") == 2)


async def test_messages_of_many_mebibytes_pass_in_both_directions() -> None:
    runner = FakeModelRunner(num_blocks=1200, block_size=1024)
    async with (
        ScriptedControlPlane() as control,
        FakeWorker(
            control.address,
            runner=runner,
            max_model_len=1_200_000,
            max_num_batched_tokens=1_200_000,
        ),
    ):
        stream = await control.accept()
        await stream.attach(1, num_blocks=1200)
        tokens = [3] * 1_190_000
        row = added_row(0, tokens, list(range(1, 1164)), max_total_tokens=1_191_000)
        row.token_ids = column(*tokens)
        # 4.8 MB, above gRPC's default limit; one token of it is computed.
        await stream.send(plan(2, added_rows=[row], chunk_rows=[0], chunk_num_tokens=[1]))
        assert (await stream.receive()).step_result.version == 2
