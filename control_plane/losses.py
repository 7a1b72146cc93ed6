"""The mark that a loss leaves on a request, and when there are too many.

A request in flight while its worker is lost, or a step fails, may be the cause. It is retried from
its token log; from its second mark on alone, so that it can take nobody along; at its third it has
failed.

Owns: the limits, and what a request fails with. Does not know: workers, steps, who retries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from control_plane.errors import ReplayLimitError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from control_plane.request import Request

# A request fails at its third loss (of the worker, or StepFailed) while in flight.
MAX_LOSSES = 3
# From its second on it is retried alone: it may be their cause.
RETRY_ALONE_AT = 2


def mark_lost(requests: Iterable[Request]) -> list[tuple[Request, ReplayLimitError]]:
    """Count a loss for each request.

    Returns:
        Those that have reached their last one, and what they fail with.
    """
    failed: list[tuple[Request, ReplayLimitError]] = []
    for request in requests:
        request.num_losses += 1
        if request.num_losses >= MAX_LOSSES:
            failed.append((request, _replay_limit(request)))
    return failed


def _replay_limit(request: Request) -> ReplayLimitError:
    return ReplayLimitError(
        f"The request was in flight at {request.num_losses} lost workers or failed steps, which "
        f"is the limit; its last retry ran alone. Something in it seems to break the worker.",
        num_losses=request.num_losses,
        limit=MAX_LOSSES,
    )
