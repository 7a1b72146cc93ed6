"""The window of unconfirmed steps, over a link and a device in virtual time."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import pytest

from control_plane.step_window import RoundTrip, StepWindow


def test_a_window_of_fixed_size_has_room_for_one_step_more_than_the_lookahead() -> None:
    window = StepWindow(1, 1)
    for version in (4, 5):
        assert window.has_room
        window.sent(version, now=0.0)
    assert not window.has_room
    assert (window.oldest, len(window)) == (4, 2)


def test_a_step_can_be_running_since_it_was_sent_or_its_predecessor_was_confirmed() -> None:
    window = StepWindow(2, 2)
    assert (window.oldest, window.since) == (None, None)
    window.sent(4, now=1.0)
    window.sent(5, now=2.0)
    assert window.since == 1.0
    window.confirm(now=7.0)
    assert (window.oldest, window.since) == (5, 7.0)
    window.confirm(now=8.0)
    assert window.since is None
    window.sent(6, now=9.0)
    assert window.since == 9.0
    window.clear()
    assert (window.oldest, window.since) == (None, None)


@dataclass
class Line:
    """A control plane that always has work, a link and a device: who waits for whom.

    Attributes:
        round_trip_s: Half of it each way.
        jitter_s: Up to so much more, each way, never out of order.
        steps_s: Device time of the steps, in turn.
        chunk_tokens: Tokens of prefill in the steps, in turn.
        overhead_s: What the worker takes for a step beyond its device time.
    """

    window: StepWindow
    round_trip_s: float = 0.0
    jitter_s: float = 0.0
    steps_s: tuple[float, ...] = (0.0025,)
    chunk_tokens: tuple[int, ...] = (0,)
    overhead_s: float = 0.0
    reports_waits: bool = True
    now: float = 0.0
    num_sent: int = 0
    num_confirmed: int = 0
    deepest: int = 0
    queued_s: float = 0.0
    _device_free_at: float = 0.0
    _last_down: float = 0.0
    _last_up: float = 0.0
    _results: list[tuple[float, int, float, float]] = field(default_factory=list)
    _random: random.Random = field(default_factory=lambda: random.Random(1))

    def _one_way(self) -> float:
        return self.round_trip_s / 2 + self._random.uniform(0, self.jitter_s)

    def run(self, seconds: float) -> float:
        """Let time pass; returns steps per second of that time."""
        before, end = self.num_confirmed, self.now + seconds
        while True:
            while self.window.has_room:
                self._send()
            self.deepest = max(self.deepest, len(self.window))
            if not self._results or self._results[0][0] > end:
                self.now = end
                return (self.num_confirmed - before) / seconds
            self.now, _, device_s, waited_s = heapq.heappop(self._results)
            self.window.confirm(
                self.now, device_s=device_s, waited_s=waited_s if self.reports_waits else None
            )
            self.num_confirmed += 1

    def _send(self) -> None:
        step_s = self.steps_s[self.num_sent % len(self.steps_s)]
        chunk = self.chunk_tokens[self.num_sent % len(self.chunk_tokens)]
        self.num_sent += 1
        self.window.sent(self.num_sent, self.now, num_chunk_tokens=chunk)
        came = self._last_down = max(self._last_down, self.now + self._one_way())
        waited_s = max(0.0, self._device_free_at - came)
        self.queued_s = waited_s
        self._device_free_at = max(came, self._device_free_at) + step_s + self.overhead_s
        self._last_up = max(self._last_up, self._device_free_at + self._one_way())
        heapq.heappush(self._results, (self._last_up, self.num_sent, step_s, waited_s))


@pytest.mark.parametrize("step_s", [0.0025, 0.008])
@pytest.mark.parametrize("round_trip_s", [0.0, 0.001, 0.005, 0.02, 0.1])
@pytest.mark.parametrize("jitter", [0.0, 0.2])
def test_the_device_hardly_waits_for_the_link_and_little_is_ordered_beyond_that(
    step_s: float, round_trip_s: float, jitter: float
) -> None:
    line = Line(
        StepWindow(1, 64),
        round_trip_s=round_trip_s,
        jitter_s=jitter * round_trip_s / 2,
        steps_s=(step_s,),
    )
    line.run(1.0)
    line.deepest = 0
    assert line.run(10.0) > 0.98 / step_s
    needed = round_trip_s * (1 + jitter) / step_s + 1
    assert line.deepest <= max(2, needed * 1.25 + 2)
    assert line.window.round_trip.mean_s == pytest.approx(
        round_trip_s * (1 + jitter / 2), abs=round_trip_s * 0.1 + 1e-6
    )
    assert line.window.lookahead == pytest.approx(line.deepest - 1, abs=1, rel=0.2)


def test_ten_steps_are_in_flight_at_a_twentieth_of_a_second_and_short_steps() -> None:
    line = Line(StepWindow(1, 16), round_trip_s=0.02)
    line.run(2.0)
    assert 9 <= line.deepest <= 11


def test_a_fast_link_keeps_the_queue_as_short_as_it_may_be() -> None:
    line = Line(StepWindow(1, 64), round_trip_s=0.0002, jitter_s=0.0002, steps_s=(0.008,))
    line.run(5.0)
    assert line.deepest == 2
    # Whoever comes now waits for a step at most before its own.
    assert line.queued_s <= 0.008


def test_the_window_follows_the_link_and_the_steps_both_ways() -> None:
    line = Line(StepWindow(1, 64), round_trip_s=0.02)
    line.run(2.0)
    line.round_trip_s = 0.08
    line.run(1.0)
    assert line.run(1.0) > 0.98 * 400
    assert line.window.lookahead >= 32
    line.round_trip_s = 0.005
    line.run(2.0)
    line.deepest = 0
    assert line.run(1.0) > 0.98 * 400
    assert line.deepest <= 5
    line.steps_s = (0.02,)
    line.run(2.0)
    line.deepest = 0
    assert line.run(1.0) > 0.98 * 50
    assert line.deepest == 2


def test_it_grows_by_one_step_per_result() -> None:
    line = Line(StepWindow(1, 64), round_trip_s=0.1)
    deepest = 0
    while line.num_confirmed < 50:
        before = line.num_confirmed
        line.run(0.001)
        assert line.deepest <= max(2, deepest + line.num_confirmed - before)
        deepest = line.deepest
    assert deepest > 30


def test_one_hiccup_does_not_fill_the_queue() -> None:
    line = Line(StepWindow(1, 64), round_trip_s=0.005)
    line.run(2.0)
    before = line.window.lookahead
    line._last_down = line.now + 3.0
    line.run(4.0)
    line.deepest = 0
    line.run(1.0)
    assert line.deepest <= before + 2


def test_long_prefills_are_not_queued_by_the_number_of_steps_but_by_their_time() -> None:
    # Chunks of a tenth of a second between runs of short steps.
    line = Line(
        StepWindow(1, 64),
        round_trip_s=0.02,
        steps_s=(0.1,) * 20 + (0.0025,) * 200,
        chunk_tokens=(8192,) * 20 + (0,) * 200,
    )
    line.run(5.0)
    longest = 0.0
    for _ in range(1000):
        line.run(0.005)
        longest = max(longest, line.queued_s)
    # The one that runs, and one behind it.
    assert longest < 0.25
    per_round = 20 * 0.1 + 200 * 0.0025
    assert line.run(per_round * 4) > 0.97 * 220 / per_round


def test_the_workers_own_overhead_counts_like_the_devices_time() -> None:
    line = Line(StepWindow(1, 64), round_trip_s=0.02, steps_s=(0.001,), overhead_s=0.003)
    line.run(2.0)
    line.deepest = 0
    assert line.run(5.0) > 0.98 * 250
    assert line.deepest <= 9


def test_a_worker_that_does_not_tell_keeps_the_least_window() -> None:
    line = Line(StepWindow(2, 64), round_trip_s=0.02, reports_waits=False)
    line.run(2.0)
    assert line.deepest == 3
    assert line.window.lookahead == 2
    assert line.window.round_trip.mean_s is None


def test_the_most_that_was_promised_is_never_exceeded() -> None:
    line = Line(StepWindow(1, 7), round_trip_s=1.0, jitter_s=0.5)
    line.run(60.0)
    assert line.deepest == 8


@pytest.mark.parametrize("lie", [-1e9, -1.0, 0.0, 1e9, 1e300])
def test_whatever_a_worker_claims_the_window_stays_within_its_bounds(lie: float) -> None:
    window = StepWindow(1, 7)
    for version in range(1, 500):
        while window.has_room:
            window.sent(version, now=version * 0.01)
        assert 2 <= len(window) <= 8
        window.confirm(version * 0.01 + 0.005, device_s=lie, waited_s=-lie)
    assert 1 <= window.lookahead <= 7


def test_round_trips_are_smoothed() -> None:
    round_trip = RoundTrip()
    assert round_trip.reach_s == 0
    for i in range(200):
        round_trip.observe(0.02 + 0.001 * (-1) ** i)
    assert round_trip.mean_s == pytest.approx(0.02, abs=0.001)
    assert 0.021 < round_trip.reach_s < 0.03
    round_trip.observe(100.0)
    assert round_trip.reach_s < 0.1
