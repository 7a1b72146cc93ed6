"""Which replica takes a request. Pure.

Owns the cost. Does not know streams, time, or how a replica finds a prefix.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

    from control_plane.request import Request


class Candidate(Protocol):
    """A ready replica, as far as the choice is concerned."""

    @property
    def replica_id(self) -> str: ...

    @property
    def is_doubtful(self) -> bool:
        """Whether it shows signs of being sick, so that others should get the work first."""
        ...

    @property
    def queued_tokens(self) -> int:
        """Tokens to compute before a new request's turn: those of requests without any output."""
        ...

    @property
    def num_live(self) -> int:
        """Requests it holds, running or waiting."""
        ...

    def fits(self, num_total_tokens: int, num_sequences: int) -> bool:
        """Whether so many sequences of this length can ever run there together."""
        ...

    def num_hit_tokens(self, request: Request) -> int:
        """Tokens of the request whose KV is there already. Changes nothing."""
        ...


C = TypeVar("C", bound=Candidate)


def choose(request: Request, candidates: Iterable[C]) -> C | None:
    """The replica with the least to compute until the request's next token.

    cost = uncached tokens of the request + queued tokens; equal costs go to the less loaded, then
    to the first by id, so that the choice is the same in every run. Where its last step failed a
    request goes back to only if it fits nowhere else; the same holds for replicas in doubt.

    Returns:
        None if it fits nowhere.
    """
    able = fitting(request, candidates)
    if len(able) <= 1:
        return able[0] if able else None
    num_tokens = sum(sequence.num_tokens for sequence in request.live_sequences)
    best, least = able[0], (True, True, math.inf)
    for candidate in able:
        cost = (
            candidate.replica_id == request.avoid,
            candidate.is_doubtful,
            num_tokens - candidate.num_hit_tokens(request) + candidate.queued_tokens,
        )
        # Who has less to do matters, and is asked, only among equals.
        if cost < least or (cost == least and _load(candidate) < _load(best)):
            best, least = candidate, cost
    return best


def _load(candidate: Candidate) -> tuple[int, str]:
    return candidate.num_live, candidate.replica_id


def fitting(request: Request, candidates: Iterable[C]) -> list[C]:
    """The replicas that could ever run the request."""
    num_sequences = len(request.live_sequences)
    return [c for c in candidates if c.fits(request.max_total_tokens, num_sequences)]


def resolve_length(request: Request, candidates: Iterable[Candidate]) -> None:
    """Lower the limit of a request whose output was left open to the longest that fits anywhere.

    Anew at each placing: a shorter replica must not cut it for ever. Where not even what is known
    of it fits, the limit is the model's, and it waits for a longer replica.
    """
    if request.open_limit is None:
        return
    live = request.live_sequences
    longest = longest_fit(candidates, len(live), limit=request.open_limit)
    has_room = longest > max(sequence.num_tokens for sequence in live)
    request.max_total_tokens = longest if has_room else request.open_limit


def longest_fit(candidates: Iterable[Candidate], num_sequences: int, *, limit: int) -> int:
    """The most tokens, up to `limit`, that so many sequences can have on some candidate; or 0."""
    longest = 0
    for candidate in candidates:
        if candidate.fits(limit, num_sequences):
            return limit
        low, high = longest, limit
        while low < high:
            middle = (low + high + 1) // 2
            if candidate.fits(middle, num_sequences):
                low = middle
            else:
                high = middle - 1
        longest = low
    return longest
