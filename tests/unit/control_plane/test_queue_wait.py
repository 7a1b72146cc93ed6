from __future__ import annotations

import pytest

from control_plane.queue_wait import QueueWait


def test_nobody_waits_where_there_is_no_queue() -> None:
    wait = QueueWait()
    for second in range(10):
        wait.observe(5, 0, float(second))
    assert wait.expected_s(3, 10.0) == 0


def test_starts_before_there_was_a_queue_do_not_tell_how_fast_it_is() -> None:
    wait = QueueWait()
    # One request a second came, and each got its row at once.
    for second in range(10):
        wait.observe(1, 0, float(second))
    wait.observe(8, 100, 10.0)
    assert wait.expected_s(100, 10.0) == 0
    # A burst: fifty rows get free each second.
    wait.observe(50, 50, 11.0)
    assert wait.expected_s(50, 11.0) == pytest.approx(0.5)


@pytest.mark.parametrize("burst", [1, 10, 100])
def test_the_estimate_follows_the_speed_whatever_the_bursts(burst: int) -> None:
    wait = QueueWait()
    wait.observe(0, 500, 0.0)
    # Ten a second.
    now = 0.0
    for _ in range(2000 // burst):
        now += burst / 10
        wait.observe(burst, 500, now)
        wait.observe(0, 500, now)
        # Right after a burst and right before the next.
        assert 20.0 <= wait.expected_s(400, now) <= 40.0
        assert 20.0 <= wait.expected_s(400, now + burst / 10) <= 40.0 + 1e-6
    assert wait.expected_s(400, now) == pytest.approx(40.0, rel=0.5)


def test_only_the_last_minute_counts() -> None:
    wait = QueueWait()
    wait.observe(0, 500, 0.0)
    for second in range(1, 101):
        wait.observe(1, 500, float(second))
    for tenth in range(1, 1000):
        wait.observe(1, 500, 100.0 + tenth / 10)
    assert wait.expected_s(100, 199.9) == pytest.approx(10.0, rel=0.1)


def test_a_queue_that_does_not_move_will_hardly_be_over_sooner_than_it_has_lasted() -> None:
    wait = QueueWait()
    wait.observe(8, 3, 5.0)
    assert wait.expected_s(3, 5.0) == 0
    assert wait.expected_s(3, 65.0) == 60.0
    wait.observe(3, 0, 66.0)
    assert wait.expected_s(0, 66.0) == 0
    wait.observe(0, 1, 70.0)
    assert wait.expected_s(1, 71.0) == 1.0
