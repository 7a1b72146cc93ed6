"""The protocol's state machine, step by step, without I/O."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_worker import FakeModelRunner, StepwiseWorker
from scripted_control_plane import added_row, plan, read_column, reset, welcome

from data_plane.plan_refused import Refusal, status_reason
from data_plane.step_work import StepOutput
from data_plane.stream_protocol import Phase, ProtocolViolation
from protos.pagewire.v1 import worker_pb2

OUTPUT = StepOutput(
    counts=np.array([1], np.uint8),
    token_ids=np.array([7], np.int32),
    finished_rows=np.empty(0, np.int32),
    finish_reasons=np.empty(0, np.uint8),
)


def serving_worker(**welcome_fields: Any) -> StepwiseWorker:
    worker = StepwiseWorker()
    worker.hello()
    assert worker.feed(welcome(**welcome_fields)) == []
    assert worker.feed(reset(10)) == []
    return worker


def worker_with_a_row(**welcome_fields: Any) -> StepwiseWorker:
    """Serving at version 11, row 0 decodes."""
    worker = serving_worker(**welcome_fields)
    worker.feed(
        plan(
            11,
            added_rows=[added_row(0, [5, 6, 7], list(range(1, 7)))],
            chunk_rows=[0],
            chunk_num_tokens=[3],
        )
    )
    worker.run_all()
    return worker


def test_hello_says_who_the_worker_is() -> None:
    worker = StepwiseWorker(worker_id="w7", replica_id="r3", epoch=bytes(range(16)))
    hello = worker.hello().hello
    assert hello.protocol_version == 1
    assert (hello.worker_id, hello.replica_id, hello.rank, hello.tp_size) == ("w7", "r3", 0, 1)
    assert hello.epoch == bytes(range(16))
    assert (hello.applied_version, hello.highest_term) == (0, 0)
    assert (hello.num_blocks, hello.max_num_seqs, hello.max_model_len) == (64, 8, 128)
    assert hello.kv_geometry.dtype == "float32"


def test_result_carries_what_the_step_produced() -> None:
    worker = serving_worker()
    worker.feed(
        plan(
            11,
            added_rows=[
                added_row(0, [5, 6, 7], [1], max_total_tokens=4),
                added_row(2, [5, 6, 7], [2]),
                added_row(3, [5, 6, 7], [3]),
            ],
            chunk_rows=[0, 2, 3],
            chunk_num_tokens=[3, 3, 1],
        )
    )
    [message] = worker.run_step()
    result = message.step_result
    assert (result.version, result.step) == (11, 0)
    # Row 3 is in the middle of its prefill and not among the rows that ran.
    assert list(result.counts) == [1, 1]
    assert len(read_column(result.token_ids)) == 2
    assert read_column(result.finished_rows) == [0]
    assert list(result.finish_reasons) == [2]


def test_row_that_stopped_on_the_device_reports_count_zero_until_it_is_removed() -> None:
    worker = serving_worker()
    worker.feed(
        plan(
            11,
            added_rows=[
                added_row(
                    0,
                    [5, 6, 7],
                    [1, 2, 3],
                    eos_token_ids=b"".join(i.to_bytes(4, "little") for i in range(512)),
                )
            ],
            chunk_rows=[0],
            chunk_num_tokens=[3],
        )
    )
    worker.feed(plan(12))
    first, second = worker.run_all()
    assert (list(first.step_result.counts), list(first.step_result.finish_reasons)) == ([1], [1])
    assert (list(second.step_result.counts), second.step_result.token_ids) == ([0], b"")


def test_plans_behind_a_refused_one_are_dropped_silently_and_results_before_it_count() -> None:
    worker = worker_with_a_row()
    assert worker.feed(plan(12)) == []
    [message] = worker.feed(plan(14))
    assert message.nack.version == 14
    assert status_reason(message.nack.status) == Refusal.BASE_VERSION_MISMATCH
    assert worker.feed(plan(13)) == []
    assert worker.feed(plan(14)) == []
    assert worker.protocol.phase is Phase.DISCARDING
    [message] = worker.run_all()
    assert message.step_result.version == 12
    assert worker.feed(reset(15)) == []
    assert worker.protocol.phase is Phase.SERVING
    assert worker.protocol.row_table.num_rows == 0


def test_results_at_or_below_a_reset_are_not_sent() -> None:
    worker = worker_with_a_row()
    worker.feed(plan(12))
    work = worker.ordered[0]
    worker.feed(reset(13))
    assert worker.num_ordered == 0
    # The step was running when the Reset came.
    assert worker.protocol.step_done(work, OUTPUT) == []


def test_plan_at_or_below_a_reset_is_a_leftover_and_ignored() -> None:
    worker = worker_with_a_row()
    worker.feed(reset(20))
    assert worker.feed(plan(12)) == []
    assert worker.feed(plan(20)) == []
    assert worker.protocol.phase is Phase.SERVING


def test_results_of_a_lost_stream_are_not_sent_on_the_next() -> None:
    worker = worker_with_a_row()
    worker.feed(plan(12))
    work = worker.ordered[0]
    worker.disconnect()
    assert worker.protocol.step_done(work, OUTPUT) == []
    hello = worker.hello().hello
    assert (hello.applied_version, hello.highest_term) == (12, 1)
    assert worker.protocol.step_done(work, OUTPUT) == []
    worker.feed(welcome())
    assert worker.protocol.step_done(work, OUTPUT) == []
    worker.feed(reset(13))
    assert worker.protocol.step_done(work, OUTPUT) == []


def test_window_counts_steps_whose_result_was_not_sent() -> None:
    worker = worker_with_a_row(lookahead=1)
    assert worker.feed(plan(12)) == []
    assert worker.feed(plan(13)) == []
    worker.run_step()
    assert worker.feed(plan(14)) == []
    [message] = worker.feed(plan(15))
    assert status_reason(message.nack.status) == Refusal.TOO_MANY_UNCONFIRMED
    worker.feed(reset(16))
    assert worker.protocol.num_unconfirmed == 0


def test_lookahead_zero_allows_one_step_at_a_time() -> None:
    worker = worker_with_a_row(lookahead=0)
    assert worker.feed(plan(12)) == []
    [message] = worker.feed(plan(13))
    assert status_reason(message.nack.status) == Refusal.TOO_MANY_UNCONFIRMED


def test_every_step_of_a_plan_counts_in_the_window() -> None:
    worker = worker_with_a_row(lookahead=2)
    assert worker.feed(plan(12, num_steps=3)) == []
    assert [message.step_result.step for message in worker.run_all()] == [0, 1, 2]
    [message] = worker.feed(plan(13, num_steps=4))
    assert status_reason(message.nack.status) == Refusal.TOO_MANY_UNCONFIRMED


@pytest.mark.parametrize("num_steps", [0, -3])
def test_plan_without_a_step_is_refused_as_such(num_steps: int) -> None:
    [message] = worker_with_a_row(lookahead=0).feed(plan(12, num_steps=num_steps))
    assert status_reason(message.nack.status) == Refusal.BAD_NUM_STEPS


def test_rank_above_zero_acknowledges_each_plan_once() -> None:
    worker = StepwiseWorker(rank=1, tp_size=2)
    worker.hello()
    worker.feed(welcome())
    worker.feed(reset(10))
    worker.feed(
        plan(
            11,
            added_rows=[added_row(0, [5, 6, 7], list(range(1, 7)))],
            chunk_rows=[0],
            chunk_num_tokens=[3],
        )
    )
    worker.feed(plan(12, num_steps=2))
    assert [message.ack.version for message in worker.run_all()] == [11, 12]


def test_failed_step_silences_what_ran_behind_it() -> None:
    worker = worker_with_a_row()
    worker.runner.fail_wait.add(12)
    worker.feed(plan(12))
    worker.feed(plan(13))
    behind = worker.ordered[1]
    [message] = worker.run_step()
    assert message.step_failed.version == 12
    assert worker.protocol.step_done(behind, OUTPUT) == []
    assert worker.run_all() == []
    assert worker.feed(plan(14)) == []
    assert worker.feed(reset(15)) == []


@pytest.mark.parametrize("version", [1, 11, 12])
def test_reset_that_does_not_exceed_what_was_applied_ends_the_stream(version: int) -> None:
    worker = worker_with_a_row()
    worker.feed(plan(12))
    with pytest.raises(ProtocolViolation, match="must exceed 12"):
        worker.feed(reset(version))


def test_reset_must_exceed_discarded_plans_too() -> None:
    worker = worker_with_a_row()
    worker.feed(plan(30))
    worker.feed(plan(31))
    with pytest.raises(ProtocolViolation, match="must exceed 31"):
        worker.feed(reset(31))
    worker.feed(reset(32))


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (welcome(term=4), "STALE_TERM"),
        (welcome(term=5, num_blocks=65), "NUM_BLOCKS_OUT_OF_RANGE"),
        (welcome(term=5, num_blocks=1), "NUM_BLOCKS_OUT_OF_RANGE"),
        (welcome(term=5, lookahead=-1), "BAD_WELCOME"),
        (welcome(term=5, lease_s=0), "BAD_WELCOME"),
        (plan(11), "UNEXPECTED_MESSAGE"),
        (reset(11), "UNEXPECTED_MESSAGE"),
        (worker_pb2.ControlMessage(), "UNKNOWN_MESSAGE"),
    ],
)
def test_greeting_that_breaks_a_rule_ends_the_stream(
    message: worker_pb2.ControlMessage, reason: str
) -> None:
    worker = serving_worker(term=5)
    worker.disconnect()
    worker.hello()
    with pytest.raises(ProtocolViolation) as violation:
        worker.feed(message)
    assert violation.value.reason == reason


@pytest.mark.parametrize("message", [plan(1), welcome()], ids=["plan", "second welcome"])
def test_message_between_welcome_and_reset_ends_the_stream(
    message: worker_pb2.ControlMessage,
) -> None:
    worker = StepwiseWorker()
    worker.hello()
    worker.feed(welcome())
    with pytest.raises(ProtocolViolation, match="awaiting_reset"):
        worker.feed(message)


def test_generations_name_the_plan_that_last_handed_out_each_block() -> None:
    worker = worker_with_a_row()
    worker.feed(plan(12, removed_rows=[0], added_rows=[added_row(1, [5], [3])]))
    worker.run_all()
    worker.disconnect()
    worker.hello()
    [message] = worker.feed(welcome(num_blocks=8, send_generations=True))
    generations = message.generations
    assert (generations.first_block_id, generations.is_last) == (0, True)
    assert memoryview(generations.generations).cast("q").tolist() == [0, 11, 11, 12, 11, 11, 11, 0]


def test_new_process_under_the_same_id_has_a_new_epoch_and_no_history() -> None:
    worker = worker_with_a_row()
    epoch = worker.protocol.identity.epoch
    worker.crash()
    hello = worker.hello().hello
    assert hello.epoch != epoch
    assert (hello.applied_version, hello.highest_term) == (0, 0)


def test_worker_is_idle_once_its_rows_are_finished_whether_or_not_they_are_removed() -> None:
    worker = serving_worker()
    assert worker.protocol.is_idle
    worker.feed(
        plan(
            11,
            added_rows=[added_row(0, [5, 6, 7], [1], max_total_tokens=4)],
            chunk_rows=[0],
            chunk_num_tokens=[3],
        )
    )
    assert not worker.protocol.is_idle
    worker.run_all()
    assert worker.protocol.is_idle
    assert worker.protocol.row_table.num_rows == 1


def test_fake_model_notices_a_wrong_prefix_hit() -> None:
    """The oracle of other tests has to see what it is there for."""
    tokens = {}
    for hit, prompt in (("right", [5, 6, 7, 8, 9]), ("wrong", [5, 6, 7, 1, 9])):
        worker = StepwiseWorker(FakeModelRunner())
        worker.hello()
        worker.feed(welcome())
        worker.feed(reset(10))
        worker.feed(
            plan(
                11,
                added_rows=[added_row(0, prompt, [1, 2])],
                chunk_rows=[0],
                chunk_num_tokens=[5],
            )
        )
        worker.feed(
            plan(
                12,
                added_rows=[
                    added_row(1, [5, 6, 7, 8, 9], [1, 3], num_hit_blocks=1, num_computed_tokens=4)
                ],
                chunk_rows=[1],
                chunk_num_tokens=[1],
            )
        )
        first, second = worker.run_all()
        tokens[hit] = (
            read_column(first.step_result.token_ids)[0],
            read_column(second.step_result.token_ids)[-1],
        )
    assert tokens["right"][0] == tokens["right"][1]
    assert tokens["wrong"][1] != tokens["right"][1]
