"""Scheduler: steps, their rows, and blocks that sequences share."""

from __future__ import annotations

import pytest
from scheduler_driver import Driver, prompt

from control_plane.errors import InvariantError
from control_plane.request import FinishReason, Version


def test_row_computes_chunk_by_chunk_and_samples_with_the_last_known_token():
    driver = Driver(max_num_seqs=2, max_num_batched_tokens=6)
    request = driver.add(prompt(0, 10))
    first, second, third = (driver.must_order() for _ in range(3))
    assert first.added[0].block_ids.size == 3
    assert [s.chunk_num_tokens.tolist() for s in (first, second, third)] == [[6], [4], []]
    assert [s.sampled_rows.tolist() for s in (first, second, third)] == [[], [0], [0]]
    assert [s.num_tokens for s in (first, second, third)] == [6, 4, 1]
    for step in (first, second, third):
        driver.answer(step)
    assert request.sequences[0].output_token_ids == [7, 7]


def test_block_is_appended_when_the_next_token_needs_it():
    driver = Driver()
    driver.add(prompt(0, 3))
    driver.add(prompt(50, 4))
    driver.run(1)
    step = driver.must_order()
    assert step.appended_rows.tolist() == [1]
    assert step.appended_counts.tolist() == [1]
    step = driver.must_order()
    assert step.appended_rows.tolist() == [0]


def test_row_stops_at_its_length_limit_before_results_come():
    driver = Driver()
    request = driver.add(prompt(0, 3), max_tokens=3)
    steps = [driver.must_order() for _ in range(3)]
    assert driver.order() is None
    driver.answer(steps[0])
    driver.answer(steps[1])
    update = driver.answer(steps[2], {0: FinishReason.LENGTH})
    assert update.finished == request.sequences
    assert request.sequences[0].output_token_ids == [7, 7, 7]
    assert not driver.scheduler.has_work


def test_one_token_request_samples_once():
    driver = Driver()
    driver.add(prompt(0, 3), max_tokens=1)
    step = driver.must_order()
    assert driver.order() is None
    driver.answer(step, {0: FinishReason.LENGTH})
    assert not driver.scheduler.has_work


def test_rows_after_the_end_are_reported_empty_and_removed_with_the_next_work():
    driver = Driver()
    driver.add(prompt(0, 3))
    first, late = driver.must_order(), driver.must_order()
    driver.answer(first, {0: FinishReason.STOP})
    update = driver.answer(late, silent=[0])
    assert (update.sequences, update.finished) == ([], [])
    assert (update.num_wasted, update.is_wasted) == (1, True)
    assert driver.order() is None
    driver.add(prompt(9, 3))
    step = driver.must_order()
    assert step.removed_rows.tolist() == [0]
    assert step.added[0].row == 0


def test_decoding_rows_go_before_prefills_and_prefills_before_waiting_requests():
    driver = Driver(max_num_seqs=3, max_num_batched_tokens=8)
    driver.add(prompt(0, 4))
    driver.run(1)
    driver.add(prompt(20, 10))
    driver.add(prompt(40, 4))
    step = driver.must_order()
    assert (step.num_tokens, step.chunk_rows.tolist()) == (8, [1])
    step = driver.must_order()
    assert step.sampled_rows.tolist() == [0, 1, 2]
    assert step.chunk_num_tokens.tolist() == [3, 4]


def test_versions_only_go_up():
    driver = Driver()
    driver.add(prompt(0, 3))
    driver.run(2)
    with pytest.raises(InvariantError, match="plan 2 follows plan 2"):
        driver.scheduler.schedule(Version(2))


# Sharing.


def test_request_waits_for_the_next_plan_when_this_one_computes_its_prefix():
    driver = Driver()
    driver.add(prompt(0, 9))
    twin = driver.add(prompt(0, 9))
    other = driver.add(prompt(30, 3))
    assert [one.sequence.request for one in driver.must_order().added] != [twin]
    step = driver.must_order()
    assert twin.sequences[0] in [one.sequence for one in step.added]
    assert twin.sequences[0].num_cached_tokens == 8
    assert other.sequences[0].num_cached_tokens == 0


def test_whatever_a_sequence_decoded_is_found_by_the_next():
    driver = Driver()
    request = driver.add(prompt(0, 3), max_tokens=10)
    driver.run(9)
    driver.scheduler.finish(request.sequences[0], num_output_tokens=9, reason=FinishReason.STOP)
    again = driver.add([0, 1, 2] + [7] * 9)
    assert driver.scheduler.count_cached_tokens(again) == 8
    driver.must_order()
    assert again.sequences[0].num_cached_tokens == 8


def test_other_salt_or_adapter_shares_nothing():
    driver = Driver()
    driver.add(prompt(0, 9))
    driver.run(1)
    for fields in ({"cache_salt": "x"}, {"adapter": "a"}, {"adapter_version": "2"}):
        request = driver.add(prompt(0, 9), **fields)
        assert driver.scheduler.count_cached_tokens(request) == 0


def test_values_that_cannot_be_trusted_lose_their_names():
    driver = Driver()
    driver.add(prompt(0, 9))
    step = driver.must_order()
    assert driver.scheduler.num_cached_blocks == 2
    update = driver.answer(step, {0: FinishReason.ERROR}, silent=[0])
    assert update.finished[0].finish_reason is FinishReason.ERROR
    assert driver.scheduler.num_cached_blocks == 0
    assert driver.pool.take_changes() in ({}, {1: None, 2: None})
