"""Scheduler: what happens to rows when blocks run out, and to all of them at a Reset."""

from __future__ import annotations

from scheduler_driver import Driver, prompt

from control_plane.request import FinishReason, Request


def full_pool() -> tuple[Driver, list[Request]]:
    """Three requests that fill all six blocks and need one more each."""
    driver = Driver(num_blocks=7)
    requests = [driver.add(prompt(20 * i, 8), max_tokens=8) for i in range(3)]
    return driver, requests


def test_youngest_is_preempted_and_nobody_admitted_in_that_step():
    driver, requests = full_pool()
    driver.run(1)
    late = driver.add(prompt(70, 1))
    step = driver.must_order()
    assert step.removed_rows.tolist() == [2]
    assert step.sampled_rows.tolist() == [0, 1]
    assert step.added == []
    assert driver.scheduler.num_preemptions == 1
    assert driver.scheduler.num_waiting == 2
    assert late.sequences[0].num_admissions == 0
    assert requests[2].sequences[0].output_token_ids == [7]


def test_lowest_priority_is_preempted_even_if_it_is_the_oldest():
    driver = Driver(num_blocks=7)
    low = driver.add(prompt(0, 8), max_tokens=8, priority=-1)
    driver.add(prompt(20, 8), max_tokens=8)
    driver.add(prompt(40, 8), max_tokens=8)
    driver.run(1)
    driver.must_order()
    assert driver.scheduler._batch.row_of(low.sequences[0]) is None
    assert driver.scheduler.num_running == 2


def test_tokens_of_steps_in_flight_are_kept_and_awaited_by_a_preempted_sequence():
    driver, requests = full_pool()
    first = driver.must_order()
    second = driver.must_order()
    assert second.removed_rows.tolist() == [2]
    driver.scheduler.abort(requests[0])
    third = driver.must_order()
    assert requests[2].sequences[0] not in [one.sequence for one in third.added]
    driver.answer(first)
    assert requests[2].sequences[0].output_token_ids == [7]
    fourth = driver.must_order()
    assert [one.sequence for one in fourth.added] == requests[2].sequences
    assert fourth.added[0].token_ids.tolist() == [*prompt(40, 8), 7]
    assert requests[2].sequences[0].num_replays == 1


def test_preempted_sequence_can_end_while_its_steps_come_back():
    driver, requests = full_pool()
    first = driver.must_order()
    driver.must_order()
    update = driver.answer(first, {2: FinishReason.STOP})
    assert update.finished == requests[2].sequences
    assert driver.scheduler.num_waiting == 0


def test_blocks_of_a_row_that_has_nothing_to_compute_go_before_a_preemption():
    driver = Driver(num_blocks=7)
    driver.add(prompt(0, 8), max_tokens=8)
    driver.add(prompt(20, 8), max_tokens=8)
    ending = driver.add(prompt(40, 8), max_tokens=1)
    first = driver.must_order()
    second = driver.must_order()
    assert second.removed_rows.tolist() == [2]
    assert second.appended_rows.tolist() == [0, 1]
    assert driver.scheduler.num_preemptions == 0
    update = driver.answer(first, {2: FinishReason.LENGTH})
    assert update.finished == ending.sequences
    assert ending.sequences[0].output_token_ids == [7]


def test_reset_forgets_pending_blocks_and_replays_confirmed_tokens():
    driver = Driver()
    request = driver.add(prompt(0, 9))
    driver.run(2)
    young = driver.add(prompt(30, 9))
    driver.must_order()
    driver.scheduler.reset()
    driver.scheduler.audit()
    assert driver.scheduler.num_in_flight_steps == 0
    assert driver.scheduler.num_free_blocks == driver.scheduler.num_usable_blocks
    step = driver.must_order()
    assert step.removed_rows.size == 0
    replayed, fresh = step.added
    assert replayed.token_ids.tolist() == [*range(9), 7, 7]
    assert (replayed.num_hit_blocks, replayed.num_computed_tokens) == (2, 8)
    assert fresh.num_hit_blocks == 0
    sequence = request.sequences[0]
    assert (sequence.num_cached_tokens, sequence.num_replays) == (0, 1)
    assert young.sequences[0].num_replays == 1


def test_evacuate_hands_back_every_live_request_in_order_of_arrival():
    driver, requests = full_pool()
    driver.must_order()
    driver.must_order()
    waiting = driver.add(prompt(60, 3))
    driver.scheduler.abort(requests[0])
    assert driver.scheduler.requests_in_flight() == requests[1:]
    assert driver.scheduler.evacuate() == [*requests[1:], waiting]
    assert not driver.scheduler.has_work
    driver.scheduler.audit()


def test_withdraw_waiting_leaves_those_who_run():
    driver = Driver(max_num_seqs=1)
    driver.add(prompt(0, 3))
    driver.run(1)
    waiting = driver.add(prompt(9, 3))
    assert driver.scheduler.withdraw_waiting() == [waiting]
    assert driver.scheduler.num_running == 1
    assert driver.scheduler.num_waiting == 0
