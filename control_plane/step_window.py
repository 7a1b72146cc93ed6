"""The steps of one stream that are ordered and not confirmed, and how many there should be.

A plan has to be at the worker before the step ahead of it ends, or the device idles. So beyond the
step whose result is awaited, as much work is kept ordered as covers the round trip: more steps
where they are short or the link is long, and never more than needed, because whoever is admitted
queues behind what is ordered, and what is ordered behind an end is computed in vain.

Owns: their versions in order, since when the oldest can be running, the round trip and the time of
steps as results tell them. Does not know: what steps compute, messages, clocks (time is an
argument).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

# Nothing is learned from a device that claims to be faster: messages bound such steps.
_SHORTEST_STEP_S = 0.0005
# As in TCP's estimate: shares of a new sample, and how much of the deviation is covered.
_MEAN_SHARE = 1 / 8
_DEVIATION_SHARE = 1 / 4
_NUM_DEVIATIONS = 3.0
# A sample counts as twice what is known plus this, at most: a hiccup is not the link's length.
_LEAP_S = 0.005
# A step that became faster has to be followed at once, or the device idles.
_FASTER_SHARE = 1 / 2
_SLOWER_SHARE = 1 / 16
# Share of a step that a plan should be there before it is needed: it has to be launched, too.
_LEAD = 0.25
# Distances between results waver with the link; only their average tells anything.
_OVERHEAD_SHARE = 1 / 64


@dataclass(frozen=True, slots=True)
class _Step:
    version: int
    sent_at: float
    num_chunk_tokens: int


class RoundTrip:
    """Time that a step takes beyond its execution: both ways, and everything in between."""

    def __init__(self) -> None:
        self.mean_s: float | None = None
        self._deviation_s = 0.0

    @property
    def reach_s(self) -> float:
        """What nearly every round trip stays below."""
        if self.mean_s is None:
            return 0.0
        return self.mean_s + _NUM_DEVIATIONS * self._deviation_s

    def observe(self, seconds: float) -> None:
        """Take one step's."""
        seconds = max(0.0, seconds)
        if self.mean_s is None:
            self.mean_s, self._deviation_s = seconds, seconds / 4
            return
        error = min(seconds, 2 * self.mean_s + _LEAP_S) - self.mean_s
        self.mean_s += _MEAN_SHARE * error
        self._deviation_s += _DEVIATION_SHARE * (abs(error) - self._deviation_s)


class StepTimes:
    """Time of steps to come: that of a decode step, and more per token of prefill."""

    def __init__(self) -> None:
        self._decode_s: float | None = None
        self._token_s = 0.0
        self._overhead_s = 0.0

    def expected_s(self, num_steps: int, num_chunk_tokens: int) -> float:
        """Of so many steps with so many tokens of prefill in them; infinite if nothing is known."""
        if not num_steps:
            return 0.0
        if self._decode_s is None:
            return math.inf
        step_s = self._decode_s + max(0.0, self._overhead_s)
        return num_steps * step_s + num_chunk_tokens * self._token_s

    def observe(self, device_s: float, num_chunk_tokens: int) -> None:
        """Take what the device spent on a step."""
        device_s = max(_SHORTEST_STEP_S, device_s)
        known = self._decode_s
        if not num_chunk_tokens:
            if known is None:
                self._decode_s = device_s
            else:
                share = _FASTER_SHARE if device_s < known else _SLOWER_SHARE
                self._decode_s = known + share * (min(device_s, 2 * known + _LEAP_S) - known)
        elif known is not None:
            token_s = max(0.0, device_s - known) / num_chunk_tokens
            share = _FASTER_SHARE if token_s < self._token_s else _MEAN_SHARE
            self._token_s += share * (token_s - self._token_s)

    def observe_overhead(self, seconds: float) -> None:
        """Take what a step took beyond its device time, of steps that follow each other at once."""
        known = self._overhead_s
        limit = 2 * abs(known) + _LEAP_S
        self._overhead_s += _OVERHEAD_SHARE * (max(-limit, min(limit, seconds)) - known)


class StepWindow:
    """At most `most + 1` steps, confirmed in the order in which they were sent.

    Attributes:
        round_trip: As results told it; outlives the stream.
    """

    def __init__(self, least: int, most: int) -> None:
        """Build an empty window.

        Args:
            least: Steps beyond the awaited one that may always be ordered.
            most: Steps beyond it that may be ordered if the round trip asks for them; no more than
                the worker was promised.
        """
        self.round_trip = RoundTrip()
        self._least = least
        self._most = max(least, most)
        # Grows by one per result at most, so that one hiccup does not fill the device's queue.
        self._limit = least
        self._times = StepTimes()
        self._steps: deque[_Step] = deque()
        # Tokens of prefill in all steps but the oldest.
        self._num_queued_tokens = 0
        self._since = 0.0

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def has_room(self) -> bool:
        """Whether the next step should be ordered now."""
        num_queued = len(self._steps) - 1
        if num_queued < self._least:
            return True
        if num_queued >= self._limit:
            return False
        queued_s = self._times.expected_s(num_queued, self._num_queued_tokens)
        return queued_s < self.round_trip.reach_s + _LEAD * self._times.expected_s(1, 0)

    @property
    def lookahead(self) -> int:
        """Steps beyond the awaited one in steady decode, as far as is known."""
        step_s = self._times.expected_s(1, 0)
        if step_s == math.inf:
            return self._least
        num_steps = math.ceil(self.round_trip.reach_s / step_s + _LEAD)
        return max(self._least, min(self._most, num_steps))

    @property
    def oldest(self) -> int | None:
        """Version of the plan whose result comes next."""
        return self._steps[0].version if self._steps else None

    @property
    def since(self) -> float | None:
        """When the worker could begin the oldest step; None if there is none."""
        return self._since if self._steps else None

    def sent(self, version: int, now: float, *, num_chunk_tokens: int = 0) -> None:
        """A plan left, with so many tokens of prefill."""
        if self._steps:
            self._num_queued_tokens += num_chunk_tokens
        else:
            self._since = now
        self._steps.append(_Step(version, now, num_chunk_tokens))

    def confirm(self, now: float, *, device_s: float = 0.0, waited_s: float | None = None) -> None:
        """The oldest step's result came: the next one is what the worker runs now.

        Args:
            now: Monotonic seconds.
            device_s: What the device spent on the step.
            waited_s: How long its plan waited at the worker for the step before it; None: unknown.
        """
        step = self._steps.popleft()
        since, self._since = self._since, now
        if self._steps:
            self._num_queued_tokens -= self._steps[0].num_chunk_tokens
        if waited_s is None:
            return
        device_s, waited_s = max(0.0, device_s), max(0.0, waited_s)
        self._times.observe(device_s, step.num_chunk_tokens)
        if waited_s:
            self._times.observe_overhead(now - since - device_s)
        self.round_trip.observe(now - step.sent_at - device_s - waited_s)
        self._limit += (self.lookahead > self._limit) - (self.lookahead < self._limit)

    def clear(self) -> None:
        """None of them counts any longer."""
        self._steps.clear()
        self._num_queued_tokens = 0
