"""When a new request is refused, so that those who are in keep their latency.

The queue is bounded by requests, by prompt tokens, and by the time that a new request would wait in
it. Owns: those checks and what the refusal says. Does not know: where a request goes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from control_plane.errors import OverloadedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from control_plane.cluster_config import ClusterConfig
    from control_plane.request import Request

_RETRY_AFTER_S = 1.0
_LONGEST_RETRY_S = 60.0


class Queue(Protocol):
    """A replica's waiting requests."""

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        ...

    @property
    def unstarted_tokens(self) -> int:
        """Known tokens of requests without any output."""
        ...

    def expected_wait_s(self, request: Request) -> float:
        """Until the request would get a row there."""
        ...


def check_size(
    request: Request,
    queues: Iterable[Queue],
    *,
    num_unplaced: tuple[int, int],
    limits: ClusterConfig,
) -> None:
    """Refuse what would make the queue too large.

    Args:
        request: The new one.
        queues: Of all replicas.
        num_unplaced: Requests without a replica, and their prompt tokens.
        limits: What may wait.

    Raises:
        OverloadedError: Names what is too much.
    """
    num_requests, num_tokens = num_unplaced
    for queue in queues:
        num_requests += queue.num_waiting
        num_tokens += queue.unstarted_tokens
    if num_requests >= limits.max_queued_requests:
        what, queued, limit = "requests", num_requests, limits.max_queued_requests
    elif num_tokens and num_tokens + request.num_prompt_tokens > limits.max_queued_tokens:
        what, queued, limit = "prompt tokens", num_tokens, limits.max_queued_tokens
    else:
        return
    raise OverloadedError(
        f"The queue holds {queued} {what}; the limit is {limit}. Try again later.",
        retry_after_s=_RETRY_AFTER_S,
        queued=queued,
        limit=limit,
        unit=what,
    )


def check_wait(request: Request, queues: Iterable[Queue], *, limit_s: float) -> None:
    """Refuse what would wait for too long: its client is told now, not when it has given up.

    Args:
        request: The new one.
        queues: Of the replicas that could take it.
        limit_s: The longest acceptable wait.

    Raises:
        OverloadedError: Names the expected wait.
    """
    shortest_s = min((queue.expected_wait_s(request) for queue in queues), default=0.0)
    if shortest_s <= limit_s:
        return
    raise OverloadedError(
        f"The request would wait about {shortest_s:.1f} s for its turn; the limit is {limit_s:.3g} "
        "s. Try again later.",
        retry_after_s=min(_LONGEST_RETRY_S, max(_RETRY_AFTER_S, shortest_s - limit_s)),
        queued=f"{shortest_s:.1f}",
        limit=f"{limit_s:.3g}",
        unit="seconds",
    )
