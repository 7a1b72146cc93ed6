"""The load: lanes of streams and batches through the client, one after the other each.

Owns: what each request received, how it ended, and whether that end is one that may be. Does not
know: which tokens are right (the verifier does), faults.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from chaos.live_calls import LiveCalls
from chaos.load_requests import PlannedBatch, PlannedRequest
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
    from chaos.live_calls import LiveCall
    from pagewire_client import AsyncClient, AsyncGeneration, BatchResult, Chunk, Usage

_DOOR_PAUSE_S = 0.2


@dataclass(slots=True)
class StreamRecord:
    """What one request received.

    Attributes:
        request: What was asked.
        positions: The last faults before its beginning and its end.
        finish_reason: None if it did not get to its end.
        stop_string: That ended it.
        resumed_at: Of each continuation, how many ids and characters were there before it.
        num_resumes: Of its call; of a batch, until its answer came.
    """

    request: PlannedRequest
    positions: tuple[str, str]
    token_ids: list[int] = field(default_factory=list[int])
    text: str = ""
    seed: int = 0
    finish_reason: str | None = None
    stop_string: str | None = None
    usage: Usage | None = None
    resumed_at: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    num_resumes: int = 0

    @property
    def is_complete(self) -> bool:
        return self.finish_reason is not None


class StreamLoad:
    """All lanes.

    Attributes:
        calls: Those under way.
        counts: Ends by name, and resumes, replays, cached tokens.
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
            on_end: Gets every request that received something, in whatever way it ended.
            stall_limit_s: Without news for longer, a call counts as stalled.
        """
        self.counts: Counter[str] = Counter()
        self.calls = LiveCalls(findings, stall_limit_s=stall_limit_s)
        self._findings = findings
        self._on_end = on_end
        self._is_closing = False

    def close(self) -> None:
        """Begin nothing new."""
        self._is_closing = True

    async def run_lane(
        self,
        client: AsyncClient,
        requests: Iterator[PlannedRequest | PlannedBatch],
        limit: int | None = None,
    ) -> None:
        """Send one request or batch after the other, until `close` or for `limit` of them."""
        for number, planned in enumerate(requests):
            if self._is_closing or number == limit:
                return
            await self._send(client, planned)

    async def _send(self, client: AsyncClient, planned: PlannedRequest | PlannedBatch) -> None:
        """Until it was begun, which a server that is away prevents; then to its end."""
        while not self._is_closing:
            if isinstance(planned, PlannedBatch):
                has_begun = await self._try_batch(client, planned)
            else:
                has_begun = await self._try_stream(client, planned)
            if has_begun:
                return
            self.counts["refused at the door"] += 1
            await asyncio.sleep(_DOOR_PAUSE_S)

    # Streams.

    async def _try_stream(self, client: AsyncClient, request: PlannedRequest) -> bool:
        record = self._record(request)
        generation = client.start(
            build_request(request.prompt, request.options), timeout_s=request.timeout_s
        )
        live = self.calls.begin(request.name, generation)
        end = "complete"
        try:
            async with asyncio.timeout(request.leave_after_s), generation:
                async for chunk in generation:
                    self._note_chunk(live, record, chunk)
                    if request.cancel_after and len(record.token_ids) >= request.cancel_after:
                        break
        except TimeoutError:
            end = "complete" if record.is_complete else "cancelled"
        except PagewireError as error:
            if not generation.log.has_begun and request.timeout_s is None and _is_door(error):
                return False
            end = self._judge(live, request, error)
        finally:
            self.calls.end(live)
        if end == "complete" and not record.is_complete:
            end = "cancelled"
            if not request.cancel_after or len(record.token_ids) < request.cancel_after:
                self._report("lost", request, "ended without its last message")
        self._note_end(record, generation, end)
        return True

    def _note_chunk(self, live: LiveCall, record: StreamRecord, chunk: Chunk) -> None:
        self.calls.news(live, len(chunk.token_ids))
        if record.is_complete:
            self._report("doubled", record.request, "news after its end")
        if record.num_resumes != live.num_resumes:
            record.num_resumes = live.num_resumes
            record.resumed_at.append((len(record.token_ids), len(record.text)))
        record.token_ids += chunk.token_ids
        record.text += chunk.text
        record.finish_reason = chunk.finish_reason
        record.stop_string = chunk.stop_string

    def _note_end(self, record: StreamRecord, generation: AsyncGeneration, end: str) -> None:
        record.seed = generation.log.seed or 0
        record.usage = generation.log.usage
        record.num_resumes = generation.num_resumes
        self.counts["resumes"] += generation.num_resumes
        self._count(record, end)
        if generation.log.has_begun:
            self._on_end(record)

    # Batches.

    async def _try_batch(self, client: AsyncClient, planned: PlannedBatch) -> bool:
        # Without ids of their own they are "0", "1", ...
        records = {str(i): self._record(request) for i, request in enumerate(planned.requests)}
        unanswered = dict(records)
        batch = client.batch([build_request(r.prompt, r.options) for r in planned.requests])
        live = self.calls.begin(planned.name, batch)
        has_left = False
        try:
            async with batch:
                async for result in batch:
                    record = unanswered.pop(result.request_id, None)
                    if record is None:
                        # Of one that was not asked too.
                        again = records.get(result.request_id, records["0"])
                        self._report("doubled", again.request, f"answer {result.request_id} again")
                        continue
                    record.num_resumes = batch.num_resumes
                    self._note_answer(live, record, result)
                    if has_left := len(records) - len(unanswered) == planned.leave_after:
                        break
        except PagewireError as error:
            if not batch.num_resumes and len(unanswered) == len(records) and _is_door(error):
                return False
            self._judge(live, planned.requests[0], error)
        else:
            for record in unanswered.values():
                if has_left:
                    self.counts["cancelled"] += 1
                else:
                    self._report("lost", record.request, "its batch ended without its answer")
        finally:
            self.calls.end(live)
        self.counts["batches"] += 1
        self.counts["batch resumes"] += batch.num_resumes
        return True

    def _note_answer(self, live: LiveCall, record: StreamRecord, result: BatchResult) -> None:
        completion = result.completion
        if completion is None:
            assert result.error is not None
            self.counts[self._judge(live, record.request, result.error)] += 1
            return
        [output] = completion.outputs
        self.calls.news(live, len(output.token_ids))
        record.token_ids, record.text = output.token_ids, output.text
        record.finish_reason, record.stop_string = output.finish_reason, output.stop_string
        record.seed, record.usage = completion.seed, completion.usage
        if not record.is_complete:
            self._report("lost", record.request, "its answer has no end")
        self._count(record, "complete")
        self._on_end(record)

    # Both.

    def _record(self, request: PlannedRequest) -> StreamRecord:
        position = self._findings.position
        return StreamRecord(request, (position, position))

    def _count(self, record: StreamRecord, end: str) -> None:
        record.positions = (record.positions[0], self._findings.position)
        self.counts[end] += 1
        if record.usage is not None:
            self.counts["replays"] += record.usage.replays
            self.counts["cached tokens"] += record.usage.cached_tokens
            self.counts["prompt tokens"] += record.usage.prompt_tokens

    def _judge(self, live: LiveCall, request: PlannedRequest, error: PagewireError) -> str:
        """Name an end by an error; a finding unless it was asked for."""
        if request.timeout_s is not None and isinstance(
            # An outage that outlasts the deadline is reported as what it is.
            error,
            DeadlineError | UnavailableError | CancelledError | OverloadedError,
        ):
            return "deadline"
        seconds = time.monotonic() - live.last_news_s
        name = error.reason or error.code.name
        self._report(
            "failed",
            request,
            f"{live.name} with {live.num_tokens} tokens, {seconds:.1f} s after its last news, "
            f"{live.num_resumes} resumes, exposure {live.exposure}: {name}: {error.message}",
        )
        if isinstance(error, InvalidRequestError):
            return "refused"
        return f"failed with {name}"

    def _report(self, kind: str, request: PlannedRequest, text: str) -> None:
        self._findings.add(kind, f"{request.name}: {text}", request_kind=request.kind)


def _is_door(error: PagewireError) -> bool:
    """Whether nobody took the request: the caller of a call that never began tries again."""
    return isinstance(error, UnavailableError | OverloadedError)
