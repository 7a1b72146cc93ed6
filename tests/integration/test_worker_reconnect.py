"""How a worker's stream ends, and whether it tries again, against a scripted control plane."""

from __future__ import annotations

import asyncio
import logging

import grpc
import pytest
from fake_worker import FakeWorker
from scripted_control_plane import (
    PROMPT,
    ScriptedControlPlane,
    added_row,
    plan,
    read_column,
    reset,
    rich_status,
    start_row,
    until,
    welcome,
)

from data_plane.control_stream import EXIT_REFUSED, EXIT_SUPERSEDED
from protos.pagewire.v1 import worker_pb2


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
