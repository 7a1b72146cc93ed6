"""The load: lanes of streams through the resumable client, one request after the other each.

Owns: what each stream received, how it ended, and whether that end is one that may be. Does not
know: which tokens are right (the verifier does), faults.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagewire_client import (
    CancelledError,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    PagewireError,
    UnavailableError,
    build_request,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from chaos.findings import Findings
    from chaos.load_requests import PlannedRequest
    from pagewire_client import AsyncClient, AsyncGeneration, Usage

# Faults that may each lose a worker, in the life of one request at the server: a third one would
# rightly end it with REPLAY_LIMIT.
_MAX_EXPOSURE = 2
# A third of what clients wait for news before they give up.
_SERVED_WITHIN_S = 20.0
_DOOR_PAUSE_S = 0.2
_LOOK_S = 1.0


@dataclass(slots=True)
class StreamRecord:
    """What one stream received.

    Attributes:
        request: What was asked.
        positions: The last faults before its beginning and its end.
        finish_reason: None if it did not get to its end.
        stop_string: That ended it.
        prompt_token_ids: Filled in when they are needed.
    """

    request: PlannedRequest
    positions: tuple[str, str]
    token_ids: list[int] = field(default_factory=list[int])
    text: str = ""
    seed: int = 0
    finish_reason: str | None = None
    stop_string: str | None = None
    usage: Usage | None = None
    num_resumes: int = 0

    @property
    def is_complete(self) -> bool:
        return self.finish_reason is not None


@dataclass(eq=False, slots=True)
class _Live:
    """A stream under way."""

    request: PlannedRequest
    generation: AsyncGeneration
    record: StreamRecord
    last_news_s: float
    exposure: int = 0
    exposed_resumes: int = 0


class StreamLoad:
    """All lanes.

    Attributes:
        counts: Ends by name, and resumes, replays, cached tokens.
        num_tokens: Received so far.
    """

    def __init__(
        self,
        findings: Findings,
        on_end: Callable[[StreamRecord], None],
        *,
        stall_limit_s: float,
    ) -> None:
        """Wire it up.

        Args:
            findings: Where bad ends go.
            on_end: Gets every stream that received something, in whatever way it ended.
            stall_limit_s: Without news for longer, a stream counts as stalled.
        """
        self.counts: Counter[str] = Counter()
        self.num_tokens = 0
        self._findings = findings
        self._on_end = on_end
        self._stall_limit_s = stall_limit_s
        self._live: set[_Live] = set()
        self._is_closing = False

    # For the faults.

    @property
    def num_active(self) -> int:
        return sum(bool(live.record.token_ids) for live in self._live)

    def may_lose_a_worker(self) -> bool:
        return all(self._exposure(live) < _MAX_EXPOSURE for live in self._live)

    def is_served(self) -> bool:
        oldest = time.monotonic() - _SERVED_WITHIN_S
        return all(live.last_news_s > oldest for live in self._live)

    def note_loss(self) -> None:
        for live in self._live:
            live.exposure = self._exposure(live) + 1

    def _exposure(self, live: _Live) -> int:
        if live.exposed_resumes != live.generation.num_resumes:
            # A new request to the server, which has lost nothing yet.
            live.exposed_resumes, live.exposure = live.generation.num_resumes, 0
        return live.exposure

    # Lanes.

    def close(self) -> None:
        """Begin nothing new."""
        self._is_closing = True

    async def run_lane(
        self, client: AsyncClient, requests: Iterator[PlannedRequest], limit: int | None = None
    ) -> None:
        """Stream one request after the other, until `close` or for `limit` requests."""
        for number, request in enumerate(requests):
            if self._is_closing or number == limit:
                return
            await self._stream(client, request)

    async def watch(self) -> None:
        """Report streams without news."""
        while True:
            await asyncio.sleep(_LOOK_S)
            now = time.monotonic()
            for live in list(self._live):
                if now - live.last_news_s > self._stall_limit_s:
                    live.last_news_s = now
                    self._findings.add(
                        "stalled",
                        f"stream {live.request.name} with {len(live.record.token_ids)} tokens had "
                        f"no news for {self._stall_limit_s:.0f} s, "
                        f"{live.generation.num_resumes} resumes",
                    )

    async def _stream(self, client: AsyncClient, request: PlannedRequest) -> None:
        """Until it was begun, which a server that is away prevents; then to its end."""
        while not self._is_closing:
            if await self._try(client, request):
                return
            self.counts["refused at the door"] += 1
            await asyncio.sleep(_DOOR_PAUSE_S)

    async def _try(self, client: AsyncClient, request: PlannedRequest) -> bool:
        position = self._findings.position
        record = StreamRecord(request, (position, position))
        generation = client.start(
            build_request(request.prompt, request.options), timeout_s=request.timeout_s
        )
        live = _Live(request, generation, record, time.monotonic())
        self._live.add(live)
        end = "complete"
        try:
            async with generation:
                async for chunk in generation:
                    live.last_news_s = time.monotonic()
                    self.num_tokens += len(chunk.token_ids)
                    record.token_ids += chunk.token_ids
                    record.text += chunk.text
                    if record.is_complete:
                        self._findings.add("doubled", f"{request.name}: news after its end")
                    record.finish_reason = chunk.finish_reason
                    record.stop_string = chunk.stop_string
                    if request.cancel_after and len(record.token_ids) >= request.cancel_after:
                        break
        except PagewireError as error:
            if not generation.log.has_begun and request.timeout_s is None and _is_door(error):
                return False
            end = self._judge(live, error)
        finally:
            self._live.discard(live)
        if end == "complete" and not record.is_complete:
            end = "cancelled"
            if not request.cancel_after or len(record.token_ids) < request.cancel_after:
                self._findings.add("lost", f"{request.name}: ended without its last message")
        self._note_end(live, end)
        return True

    def _judge(self, live: _Live, error: PagewireError) -> str:
        """Name an end by an error; a finding unless it was asked for."""
        if live.request.timeout_s is not None and isinstance(
            # An outage that outlasts the deadline is reported as what it is.
            error,
            DeadlineError | UnavailableError | CancelledError | OverloadedError,
        ):
            return "deadline"
        seconds = time.monotonic() - live.last_news_s
        name = error.reason or error.code.name
        self._findings.add(
            "failed",
            f"{live.request.name} with {len(live.record.token_ids)} tokens, {seconds:.1f} s after "
            f"its last news, {live.generation.num_resumes} resumes, exposure "
            f"{self._exposure(live)}: {name}: {error.message}",
        )
        if isinstance(error, InvalidRequestError):
            return "refused"
        return f"failed with {name}"

    def _note_end(self, live: _Live, end: str) -> None:
        record, generation = live.record, live.generation
        record.positions = (record.positions[0], self._findings.position)
        record.seed = generation.log.seed or 0
        record.usage = generation.log.usage
        record.num_resumes = generation.num_resumes
        self.counts[end] += 1
        self.counts["resumes"] += generation.num_resumes
        if record.usage is not None:
            self.counts["replays"] += record.usage.replays
            self.counts["cached tokens"] += record.usage.cached_tokens
            self.counts["prompt tokens"] += record.usage.prompt_tokens
        if generation.log.has_begun:
            self._on_end(record)


def _is_door(error: PagewireError) -> bool:
    """Whether nobody took the request: the caller of a call that never began tries again."""
    return isinstance(error, UnavailableError | OverloadedError)
