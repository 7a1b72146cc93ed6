"""Plans, Resets and results on a worker's stream, from a scripted control plane on a real port."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from fake_worker import FakeModelRunner, FakeWorker, expected_output
from scripted_control_plane import (
    PROMPT,
    ScriptedControlPlane,
    added_row,
    column,
    plan,
    read_column,
    reset,
    start_row,
    until,
)

from data_plane.control_stream import EXIT_DEVICE_LOST
from data_plane.plan_refused import Refusal, status_reason


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
