"""Live requests, and those among them that no replica has taken yet.

Owns: how long a request waits for a replica. Does not know replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from control_plane.errors import UnavailableError
from control_plane.wake_timer import WakeTimer

if TYPE_CHECKING:
    from collections.abc import Callable

    from control_plane.engine import Engine
    from control_plane.errors import ServingError
    from control_plane.request import Request
    from control_plane.served_model import ServedModel
    from control_plane.token_stream import TokenStream


@dataclass(slots=True, eq=False)
class Live:
    """One live request and where it is.

    Attributes:
        since: When it was submitted, on the cluster's clock.
        deadline: On that clock; None for none.
        engine: None while it waits for a replica.
    """

    request: Request
    stream: TokenStream
    model: ServedModel
    since: float
    deadline: float | None
    engine: Engine | None = None


class WaitingRoom:
    """Requests without a replica, in order of arrival, each with its own end of patience."""

    def __init__(
        self,
        wait_s: float,
        give_up: Callable[[Live, ServingError], None],
        clock: Callable[[], float],
    ) -> None:
        """Build an empty one.

        Args:
            wait_s: Longest wait of a request, counted from each time it comes in.
            give_up: Called when a request has waited long enough; has to `remove` it.
            clock: Monotonic seconds.
        """
        self._wait_s = wait_s
        self._give_up = give_up
        self._clock = clock
        self._until: dict[str, tuple[Live, float]] = {}
        self._timer = WakeTimer(self._on_timer)
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._until)

    def add(self, live: Live) -> None:
        """Let a request wait."""
        until = self._clock() + self._wait_s
        if live.deadline is not None:
            until = min(until, live.deadline)
        self._until[live.request.req_id] = (live, until)
        self.num_tokens += live.request.num_prompt_tokens
        self._timer.arm(until - self._clock())

    def remove(self, live: Live) -> None:
        """Forget a request, waiting or not."""
        if self._until.pop(live.request.req_id, None) is not None:
            self.num_tokens -= live.request.num_prompt_tokens

    def take_all(self) -> list[Live]:
        """All of them, in arrival order; they no longer wait."""
        waiting = sorted((live for live, _ in self._until.values()), key=_arrival)
        self._until.clear()
        self.num_tokens = 0
        return waiting

    def close(self) -> None:
        """Stop the clock."""
        self._timer.cancel()

    def _on_timer(self) -> None:
        now = self._clock()
        for live, until in list(self._until.values()):
            if until <= now:
                self._give_up(live, self._no_replica(live))
        if self._until:
            self._timer.arm(min(until for _, until in self._until.values()) - now)

    def _no_replica(self, live: Live) -> UnavailableError:
        return UnavailableError(
            f"No replica of model {live.model.name} that fits the request came within "
            f"{self._wait_s:g} s or the deadline. Check that workers are running.",
            retry_after_s=max(1.0, self._wait_s / 4),
            model=live.model.name,
            wait_s=f"{self._wait_s:g}",
        )


def _arrival(live: Live) -> int:
    return live.request.arrival
