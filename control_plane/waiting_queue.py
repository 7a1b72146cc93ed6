"""Requests that wait for a row, in the order in which they get one.

The order is: higher priority first; then those that had a row before (preempted or replayed),
oldest first, because somebody is reading their streams; then round robin over tenants; then
arrival.

Owns: that order. Does not know: whether a request fits, rows, blocks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from typing import TYPE_CHECKING

from control_plane.errors import InvariantError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from control_plane.request import Request


def _arrival(request: Request) -> int:
    return request.arrival


def _take_out(requests: list[Request], request: Request) -> None:
    """Remove a request from a list sorted by arrival."""
    at = bisect_left(requests, request.arrival, key=_arrival)
    while requests[at] is not request:
        at += 1
    del requests[at]


class _PriorityClass:
    """The waiting requests of one priority."""

    __slots__ = ("started", "tenants")

    def __init__(self) -> None:
        self.started: list[Request] = []
        # Who is first has waited longest for its turn. Every list is sorted by arrival, none empty.
        self.tenants: OrderedDict[str, list[Request]] = OrderedDict()

    def __iter__(self) -> Iterator[Request]:
        yield from tuple(self.started)
        turns = [(requests, 0) for requests in self.tenants.values()]
        while turns:
            going: list[tuple[list[Request], int]] = []
            for requests, at in turns:
                if at < len(requests):
                    request = requests[at]
                    yield request
                    # Unless the caller took it out, it still stands there and is passed by.
                    stays = at < len(requests) and requests[at] is request
                    going.append((requests, at + stays))
            turns = going


class WaitingQueue:
    """Requests by priority, tenant and arrival. Entering and leaving search in O(log n)."""

    def __init__(self) -> None:
        self._classes: dict[int, _PriorityClass] = {}
        self._priorities: list[int] = []  # ascending
        self._has_started: dict[Request, bool] = {}

    def __len__(self) -> int:
        return len(self._has_started)

    def __contains__(self, request: object) -> bool:
        return request in self._has_started

    def __iter__(self) -> Iterator[Request]:
        """All requests in order. The one just yielded may be taken out meanwhile."""
        for priority in reversed(tuple(self._priorities)):
            found = self._classes.get(priority)
            if found is not None:
                yield from found

    def count_ahead(self, request: Request) -> int:
        """Requests before a new one: its tenant waits for its own, the others take turns with it.

        Args:
            request: Not in the queue.
        """
        num_ahead = 0
        for priority in reversed(self._priorities):
            entry = self._classes[priority]
            if priority > request.priority:
                num_ahead += len(entry.started) + sum(map(len, entry.tenants.values()))
            elif priority == request.priority:
                own = len(entry.tenants.get(request.tenant, ()))
                num_ahead += len(entry.started) + own
                num_ahead += sum(
                    min(len(requests), own + 1)
                    for tenant, requests in entry.tenants.items()
                    if tenant != request.tenant
                )
            else:
                break
        return num_ahead

    def push(self, request: Request, *, has_started: bool) -> None:
        """Let a request wait; `has_started` if it had a row before."""
        if request in self._has_started:
            raise InvariantError(f"{request} waits already")
        self._has_started[request] = has_started
        entry = self._classes.get(request.priority)
        if entry is None:
            entry = self._classes[request.priority] = _PriorityClass()
            insort(self._priorities, request.priority)
        if has_started:
            insort(entry.started, request, key=_arrival)
        else:
            insort(entry.tenants.setdefault(request.tenant, []), request, key=_arrival)

    def admit(self, request: Request) -> None:
        """Remove a request because it gets a row: its tenant goes to the end of the round."""
        had_started = self._has_started[request]
        entry = self._classes[request.priority]
        self.remove(request)
        if not had_started and request.tenant in entry.tenants:
            entry.tenants.move_to_end(request.tenant)

    def remove(self, request: Request) -> None:
        """Remove a request for any other reason; it takes no turn."""
        entry = self._classes[request.priority]
        if self._has_started.pop(request):
            _take_out(entry.started, request)
        else:
            waiting = entry.tenants[request.tenant]
            _take_out(waiting, request)
            if not waiting:
                del entry.tenants[request.tenant]
        if not entry.started and not entry.tenants:
            del self._classes[request.priority]
            self._priorities.remove(request.priority)
