"""Calls under way, as faults and the watch over stalls need to know them.

Owns: when each last had news, how often each may have lost its worker. Does not know: what is asked
or received.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from chaos.findings import Findings

# Faults that may each lose a worker, in the life of one request at the server: a third one would
# rightly end it with REPLAY_LIMIT.
_MAX_EXPOSURE = 2
# A third of what clients wait for news before they give up.
_SERVED_WITHIN_S = 20.0
_LOOK_S = 1.0


class _Resumable(Protocol):
    @property
    def num_resumes(self) -> int: ...


class LiveCall:
    """One of them.

    Attributes:
        name: For people.
        num_tokens: Received by it.
        last_news_s: On the monotonic clock.
    """

    def __init__(self, name: str, call: _Resumable) -> None:
        self.name = name
        self.num_tokens = 0
        self.last_news_s = time.monotonic()
        self._call = call
        self._exposure = 0
        self._exposed_resumes = 0

    @property
    def num_resumes(self) -> int:
        return self._call.num_resumes

    @property
    def exposure(self) -> int:
        """Faults that may have lost its worker since the server has had it."""
        if self._exposed_resumes != self._call.num_resumes:
            # A new request to the server, which has lost nothing yet.
            self._exposed_resumes, self._exposure = self._call.num_resumes, 0
        return self._exposure

    def expose(self) -> None:
        self._exposure = self.exposure + 1


class LiveCalls:
    """All of them.

    Attributes:
        num_tokens: Received so far, by those that have ended too.
    """

    def __init__(self, findings: Findings, *, stall_limit_s: float) -> None:
        """Begin with none.

        Args:
            findings: Where stalls go.
            stall_limit_s: Without news for longer, a call counts as stalled.
        """
        self.num_tokens = 0
        self._findings = findings
        self._stall_limit_s = stall_limit_s
        self._calls: set[LiveCall] = set()

    def begin(self, name: str, call: _Resumable) -> LiveCall:
        live = LiveCall(name, call)
        self._calls.add(live)
        return live

    def end(self, live: LiveCall) -> None:
        self._calls.discard(live)

    def news(self, live: LiveCall, num_tokens: int) -> None:
        """A call has had an answer."""
        live.last_news_s = time.monotonic()
        live.num_tokens += num_tokens
        self.num_tokens += num_tokens

    # For the faults.

    @property
    def num_active(self) -> int:
        return sum(live.num_tokens > 0 for live in self._calls)

    def may_lose_a_worker(self) -> bool:
        return all(live.exposure < _MAX_EXPOSURE for live in self._calls)

    def is_served(self) -> bool:
        oldest = time.monotonic() - _SERVED_WITHIN_S
        return all(live.last_news_s > oldest for live in self._calls)

    def note_loss(self) -> None:
        for live in self._calls:
            live.expose()

    async def watch(self) -> None:
        """Report calls without news."""
        while True:
            await asyncio.sleep(_LOOK_S)
            now = time.monotonic()
            for live in list(self._calls):
                if now - live.last_news_s > self._stall_limit_s:
                    live.last_news_s = now
                    self._findings.add(
                        "stalled",
                        f"{live.name} with {live.num_tokens} tokens had no news for "
                        f"{self._stall_limit_s:.0f} s, {live.num_resumes} resumes",
                    )
