"""When and how a call that broke goes on, the same for both clients.

Owns: what counts as broken, how long and how often it is tried again. Does not know: calls.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

if TYPE_CHECKING:
    from pagewire_client.errors import PagewireError

# The server itself says that there is no worker, after it has waited for one.
_NO_REPLICA = "NO_REPLICA"
# Everybody comes back at once; only an attempt to go on can hear this behind a first answer.
_OVERLOADED = "OVERLOADED"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePolicy:
    """How long an outage may last before a broken call fails with what broke it.

    A call's own timeout holds over all its attempts.

    Attributes:
        limit_s: Longest time without any progress, in seconds.
        backoff_min_s: First pause; it doubles with every attempt without progress.
        backoff_max_s: Longest pause. Each is shortened at random by up to half, so that clients
            that broke together do not come back together.
    """

    limit_s: float = 60.0
    backoff_min_s: float = 0.1
    backoff_max_s: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.backoff_min_s <= self.backoff_max_s:
            raise ValueError(
                f"backoff_min_s must be in (0, backoff_max_s], got {self.backoff_min_s} and "
                f"{self.backoff_max_s}"
            )
        if not self.limit_s > 0:
            raise ValueError(f"limit_s must be positive, got {self.limit_s}; None turns it off")


DEFAULT_RESUME = ResumePolicy()


@dataclass(slots=True)
class Reach:
    """Whether anybody ever answered at an address: where nobody did is a mistake, not an outage."""

    is_known: bool = False


class Outage:
    """The attempts of one call: whether to try again, and after how long."""

    def __init__(self, policy: ResumePolicy | None, timeout_s: float | None) -> None:
        self._policy = policy
        self._ends_at = None if timeout_s is None else time.monotonic() + timeout_s
        self._since: float | None = None
        self._num_attempts = 0

    def over(self) -> None:
        """Something came: the next break is a new outage."""
        self._since = None
        self._num_attempts = 0

    def stood(self, seconds: float) -> None:
        """Leave out the time in which the server had the call and nothing came yet.

        The pauses between such times add up.
        """
        if self._since is not None:
            self._since += seconds

    def remaining_s(self) -> float | None:
        """What is left of the call's own timeout, for the next attempt."""
        if self._ends_at is None:
            return None
        return max(0.0, self._ends_at - time.monotonic())

    def pause_s(self, error: PagewireError, *, has_begun: bool, has_tokens: bool) -> float | None:
        """How long to wait before the next attempt; None: the error is final.

        Args:
            error: What ended the call.
            has_begun: Whether the server had answered before: one that never did is no outage.
            has_tokens: Whether output was received.
        """
        policy = self._policy
        if policy is None or not has_begun or not _is_broken(error):
            return None
        if error.reason == _NO_REPLICA and not has_tokens:
            return None
        now = time.monotonic()
        if self._since is None:
            self._since = now
        longest = policy.backoff_min_s * 2.0 ** min(self._num_attempts, 30)
        self._num_attempts += 1
        pause_s = min(longest, policy.backoff_max_s) * random.uniform(0.5, 1.0)
        pause_s = max(pause_s, error.retry_after_s or 0.0)
        ends_at = self._since + policy.limit_s
        if self._ends_at is not None:
            ends_at = min(ends_at, self._ends_at)
        return pause_s if now + pause_s < ends_at else None


def _is_broken(error: PagewireError) -> bool:
    """Whether it was the connection or the server that went away, not the request that failed."""
    if error.code is grpc.StatusCode.UNAVAILABLE or error.reason == _OVERLOADED:
        return True
    # A server that ends in a hurry cancels its calls, without a word of its own.
    return error.code is grpc.StatusCode.CANCELLED and not error.reason
