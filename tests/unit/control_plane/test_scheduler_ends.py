"""Scheduler: aborts, stops, and resumed sequences that go on or end."""

from __future__ import annotations

import pytest
from scheduler_driver import Driver, prompt

from control_plane.request import FinishReason


def test_abort_frees_blocks_for_the_next_plan_and_drops_late_tokens():
    driver = Driver()
    request = driver.add(prompt(0, 8))
    steps = [driver.must_order(), driver.must_order()]
    driver.scheduler.abort(request)
    assert request.sequences[0].finish_reason is FinishReason.ABORT
    assert driver.scheduler.num_free_blocks == driver.scheduler.num_usable_blocks
    updates = [driver.answer(step) for step in steps]
    # The first also computed the prompt, which later requests may hit.
    assert [(u.num_wasted, u.is_wasted) for u in updates] == [(1, False), (1, True)]
    assert request.sequences[0].output_token_ids == []


def test_abort_takes_a_waiting_request_out_of_the_queue():
    driver = Driver()
    request = driver.add(prompt(0, 8))
    driver.scheduler.abort(request)
    driver.scheduler.abort(request)
    assert driver.order() is None
    assert not driver.scheduler.has_work


def test_finish_truncates_the_log_and_drops_what_was_computed_past_it():
    driver = Driver()
    request = driver.add(prompt(0, 3))
    driver.run(4)
    late = driver.must_order()
    sequence = request.sequences[0]
    driver.scheduler.finish(sequence, num_output_tokens=2, reason=FinishReason.STOP)
    assert sequence.output_token_ids == [7, 7]
    assert driver.answer(late).num_wasted == 1
    driver.scheduler.finish(sequence, num_output_tokens=1, reason=FinishReason.STOP)
    assert sequence.output_token_ids == [7]
    with pytest.raises(ValueError, match="cannot end at output token 2"):
        driver.scheduler.finish(sequence, num_output_tokens=2, reason=FinishReason.STOP)


def test_resumed_sequence_without_room_for_a_token_ends_at_once():
    driver = Driver()
    request = driver.add(prompt(0, 3), max_tokens=2, resume={0: [7, 7]})
    assert request.sequences[0].finish_reason is FinishReason.LENGTH
    assert not driver.scheduler.has_work


def test_resumed_sequence_goes_on_after_its_known_tokens():
    driver = Driver()
    request = driver.add(prompt(0, 3), max_tokens=4, resume={0: [5, 6]})
    step = driver.must_order()
    assert step.added[0].token_ids.tolist() == [0, 1, 2, 5, 6]
    driver.answer(step)
    driver.answer(driver.must_order(), {0: FinishReason.LENGTH})
    assert request.sequences[0].output_token_ids == [5, 6, 7, 7]
