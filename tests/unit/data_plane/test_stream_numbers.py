"""Versions and terms that leave no room for later ones are refused, and nothing has changed."""

from __future__ import annotations

import pytest
from fake_worker import FakeModelRunner, FakeWorker, StepwiseWorker
from scripted_control_plane import ScriptedControlPlane, added_row, plan, reset, welcome

from data_plane.plan_refused import Refusal, status_reason
from data_plane.stream_protocol import MAX_NUMBER, MAX_RESET_JUMP, Phase, ProtocolViolation

HIGHEST = 2**63 - 1


def serving_worker() -> StepwiseWorker:
    """At version 11, with a step ordered for row 0."""
    worker = StepwiseWorker()
    worker.hello()
    worker.feed(welcome())
    worker.feed(reset(10))
    new_row = added_row(0, [5, 6, 7], [1])
    worker.feed(plan(11, added_rows=[new_row], chunk_rows=[0], chunk_num_tokens=[3]))
    return worker


def state(worker: StepwiseWorker) -> tuple[object, ...]:
    protocol = worker.protocol
    table = protocol.row_table
    return (
        protocol.phase,
        protocol.highest_term,
        protocol.num_unconfirmed,
        table.applied_version,
        table.num_rows,
        table.num_live_rows,
        table.block_table(0).tolist(),
        worker.num_ordered,
    )


@pytest.mark.parametrize(
    "version", [HIGHEST, HIGHEST - 1, MAX_NUMBER + 1, MAX_NUMBER, 11 + MAX_RESET_JUMP + 1]
)
def test_a_reset_that_leaves_no_room_is_refused_and_changes_nothing(version: int) -> None:
    worker = serving_worker()
    before = state(worker)
    with pytest.raises(ProtocolViolation) as refusal:
        worker.feed(reset(version))
    assert refusal.value.reason == "RESET_TOO_HIGH"
    assert str(version) in refusal.value.message
    assert str(11 + MAX_RESET_JUMP) in refusal.value.message
    assert state(worker) == before


def test_the_reset_behind_a_refused_one_is_taken() -> None:
    worker = serving_worker()
    with pytest.raises(ProtocolViolation):
        worker.feed(reset(HIGHEST))
    worker.disconnect()
    assert worker.hello().hello.applied_version == 11
    worker.feed(welcome())
    worker.feed(reset(12))
    assert worker.protocol.row_table.applied_version == 12
    assert worker.feed(plan(13)) == []
    assert worker.protocol.phase is Phase.SERVING


def test_a_reset_may_go_as_far_as_that() -> None:
    worker = serving_worker()
    worker.feed(reset(11 + MAX_RESET_JUMP))
    assert worker.protocol.row_table.applied_version == 11 + MAX_RESET_JUMP
    worker.feed(reset(12 + MAX_RESET_JUMP))


def test_a_refused_plan_does_not_lift_how_far_a_reset_may_go() -> None:
    worker = serving_worker()
    [message] = worker.feed(plan(MAX_NUMBER - 1))
    assert status_reason(message.nack.status) == Refusal.BASE_VERSION_MISMATCH
    with pytest.raises(ProtocolViolation, match="must not exceed"):
        worker.feed(reset(MAX_NUMBER))
    assert worker.protocol.row_table.applied_version == 11


@pytest.mark.parametrize("term", [HIGHEST, MAX_NUMBER + 1])
def test_a_term_that_no_other_can_follow_is_refused_and_changes_nothing(term: int) -> None:
    worker = StepwiseWorker()
    worker.hello()
    with pytest.raises(ProtocolViolation, match=str(term)) as refusal:
        worker.feed(welcome(term=term))
    assert refusal.value.reason == "BAD_WELCOME"
    worker.disconnect()
    assert worker.hello().hello.highest_term == 0
    worker.feed(welcome(term=MAX_NUMBER))
    assert worker.protocol.highest_term == MAX_NUMBER


async def test_a_worker_dials_again_after_such_a_reset_and_serves() -> None:
    runner = FakeModelRunner()
    async with ScriptedControlPlane() as control, FakeWorker(control.address, runner=runner) as one:
        stream = await control.accept()
        assert (await stream.attach(HIGHEST)).applied_version == 0
        await stream.receive_end()
        stream = await control.accept()
        assert (await stream.attach(1)).applied_version == 0
        new_row = added_row(0, [5, 6, 7], [1])
        await stream.send(plan(2, added_rows=[new_row], chunk_rows=[0], chunk_num_tokens=[3]))
        assert (await stream.receive()).step_result.version == 2
        assert one.exit_code is None
