"""Scheduler: who is admitted, who waits, who is refused, and which limits can work."""

from __future__ import annotations

import pytest
from scheduler_driver import Driver, prompt

from control_plane.errors import RequestTooLongError
from control_plane.scheduler_config import SchedulerConfig


def test_request_that_can_never_fit_is_refused():
    driver = Driver(num_blocks=5)
    assert driver.scheduler.fits(17)
    assert not driver.scheduler.fits(18)
    assert not driver.scheduler.fits(9, num_sequences=3)
    with pytest.raises(RequestTooLongError) as caught:
        driver.add(prompt(0, 10), max_tokens=8)
    assert caught.value.metadata["max_total_tokens"] == "18"
    assert not driver.scheduler.has_work


def test_nobody_passes_a_request_that_does_not_fit_more_often_than_allowed():
    driver = Driver(num_blocks=11, max_num_seqs=8, max_bypass=2)
    driver.add(prompt(0, 15))
    driver.run(1)
    large = driver.add(prompt(20, 28))
    small = [driver.add(prompt(100 + 5 * i, 3), max_tokens=1) for i in range(4)]
    step = driver.must_order()
    assert [one.sequence.request for one in step.added] == small[:2]
    assert large in driver.scheduler._waiting
    assert driver.must_order().added == []


def test_group_is_admitted_whole_or_not_at_all():
    driver = Driver(max_num_seqs=3)
    driver.add(prompt(0, 3))
    driver.add(prompt(10, 3))
    driver.run(1)
    group = driver.add(prompt(20, 3), n=2)
    assert driver.must_order().added == []
    assert group in driver.scheduler._waiting
    driver = Driver(max_num_seqs=3)
    driver.add(prompt(0, 3))
    group = driver.add(prompt(20, 3), n=2)
    assert [one.sequence for one in driver.must_order().added[1:]] == group.sequences


def test_request_with_two_losses_runs_alone_until_it_has_got_somewhere():
    driver = Driver()
    suspect = driver.add(prompt(0, 3))
    suspect.num_losses = 2
    other = driver.add(prompt(10, 3))
    for _ in range(8):
        step = driver.must_order()
        assert step.sampled_rows.tolist() == [0]
        driver.answer(step)
    assert [one.sequence for one in driver.must_order().added] == other.sequences


def test_request_with_two_losses_waits_until_nobody_runs():
    driver = Driver()
    other = driver.add(prompt(10, 3))
    suspect = driver.add(prompt(0, 3))
    suspect.num_losses = 2
    steps = [driver.must_order(), driver.must_order()]
    driver.scheduler.abort(other)
    assert driver.order() is None, "steps of others are in flight"
    for step in steps:
        driver.answer(step)
    assert [one.sequence for one in driver.must_order().added] == suspect.sequences


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": 3},
        {"max_model_len": 1},
        {"max_bypass": -1},
    ],
)
def test_config_refuses_limits_that_cannot_work(wrong: dict[str, int]):
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 8, **wrong}
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SchedulerConfig(**limits)
