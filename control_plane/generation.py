"""One request from its message to its end, for any kind of call.

Admission, the way through the cluster, what is visible when, and the release of everything in every
way a call can end. A call that goes away is an exception thrown into `updates`, so blocks are given
back in one place.

Owns: live client ids, defaults of ids. Does not know: gRPC, how responses are framed.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from control_plane.errors import AbortedError, InvariantError, OverloadedError, ServingError
from control_plane.live_requests import LiveRequests
from control_plane.request import FinishReason
from protos.pagewire.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator

    from control_plane.cluster import Cluster
    from control_plane.live_requests import Claim
    from control_plane.metrics import Metrics
    from control_plane.output_processor import OutputChunk
    from control_plane.request_builder import BuiltRequest, RequestBuilder
    from control_plane.stream_pace import StreamPace
    from control_plane.token_stream import StreamNews, TokenStream

_MAX_HELD_BYTES = 512 << 20


@dataclass(slots=True)
class Update:
    """What became visible of one sequence since the last one, gathered from chunks."""

    index: int
    texts: list[str] = field(default_factory=list[str])
    token_ids: list[int] = field(default_factory=list[int])
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    stop_token_id: int | None = None

    def add(self, chunk: OutputChunk) -> None:
        self.texts.append(chunk.text)
        self.token_ids += chunk.token_ids
        self.finish_reason = chunk.finish_reason
        self.stop_string = chunk.stop_string
        self.stop_token_id = chunk.stop_token_id


class GenerationService:
    """Admits requests. One per process."""

    def __init__(
        self,
        cluster: Cluster,
        builder: RequestBuilder,
        metrics: Metrics,
        pace: StreamPace,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wire it up.

        Args:
            cluster: Where requests run.
            builder: Checks and tokenizes.
            metrics: Counts requests and latencies.
            pace: Of streams whose clients leave it open.
            clock: Monotonic seconds, as a client counts them.
        """
        self._cluster = cluster
        self._builder = builder
        self._metrics = metrics
        self._clock = clock
        self._live = LiveRequests()
        self._pace = pace
        self._held_bytes = 0

    @asynccontextmanager
    async def admit(
        self,
        message: inference_pb2.GenerateRequest,
        *,
        timeout_s: float | None = None,
        is_patient: bool = False,
        principal: str = "",
    ) -> AsyncGenerator[Generation]:
        """Run a request for as long as the context is open; leaving it frees whatever it holds.

        Args:
            message: From the client.
            timeout_s: What is left until the client's deadline.
            is_patient: Would rather wait in the queue than be refused.
            principal: Whose it is; ids are unique within a principal.

        Raises:
            ServingError: It is refused.
        """
        with self.holding(message.ByteSize()):
            started = self._clock()
            # Internal ids are never a client's: two principals may use the same one.
            req_id = secrets.token_hex(8)
            built = await self._builder.build(message, req_id=req_id, tenant=principal)
            request = built.request
            request_id = message.request_id or f"req-{req_id}"
            claim = self._live.claim(
                principal,
                request_id,
                replace=bool(message.resume),
                on_replaced=lambda: self._cluster.abort(request),
            )
            try:
                stream: TokenStream | None = None
                if not request.is_finished:
                    left_s = None if timeout_s is None else timeout_s + started - self._clock()
                    stream = self._cluster.submit(
                        request,
                        timeout_s=left_s,
                        is_patient=is_patient,
                        model=built.model.served,
                    )
                generation = Generation(
                    built,
                    stream,
                    request_id,
                    claim,
                    self._cluster,
                    self._metrics,
                    self._pace,
                    started,
                    self._clock,
                )
                self._metrics.on_admitted(request.num_prompt_tokens)
                try:
                    yield generation
                finally:
                    generation.record_end()
            finally:
                # Idempotent; the one place where a call's end, of whatever kind, frees its blocks.
                self._cluster.abort(request)
                self._live.release(claim)

    @contextmanager
    def holding(self, num_bytes: int) -> Generator[None]:
        """Count a message, of whatever method, for as long as its call holds it.

        Tokens say little about that: a message may carry megabytes that no prompt is made of.

        Raises:
            OverloadedError: Too much is held already.
        """
        if self._held_bytes and self._held_bytes + num_bytes > _MAX_HELD_BYTES:
            raise OverloadedError(
                f"The messages of live calls hold {self._held_bytes} bytes; the limit is "
                f"{_MAX_HELD_BYTES}. Try again later.",
                retry_after_s=1.0,
                queued=self._held_bytes,
                limit=_MAX_HELD_BYTES,
                unit="bytes",
            )
        self._held_bytes += num_bytes
        try:
            yield
        finally:
            self._held_bytes -= num_bytes


class Generation:
    """An admitted request. `updates` is read to its end, by one reader."""

    def __init__(
        self,
        built: BuiltRequest,
        stream: TokenStream | None,
        request_id: str,
        claim: Claim,
        cluster: Cluster,
        metrics: Metrics,
        pace: StreamPace,
        started: float,
        clock: Callable[[], float],
    ) -> None:
        self.request_id = request_id
        self.seed = built.request.seed
        self._built = built
        self._stream = stream
        self._claim = claim
        self._cluster = cluster
        self._metrics = metrics
        self._pace = pace
        self._started = started
        self._clock = clock
        self._last_token_at: float | None = None
        self._has_early_token = False  # the first was timed, and comes with the next news
        self._finish_reasons: list[FinishReason] = []
        self._num_open = sum(
            not processor.is_finished and index not in built.ended
            for index, processor in enumerate(built.processors)
        )

    def usage(self) -> inference_pb2.Usage:
        """What it cost; final once `updates` has ended."""
        request = self._built.request
        return inference_pb2.Usage(
            prompt_tokens=request.num_prompt_tokens,
            completion_tokens=sum(p.num_tokens for p in self._built.processors),
            cached_tokens=request.sequences[0].num_cached_tokens,
            replays=sum(sequence.num_replays for sequence in request.sequences),
        )

    async def gathered(self) -> list[Update]:
        """Everything, once every sequence has ended. Instead of `updates`, for less.

        Raises:
            ServingError: The request failed.
        """
        updates = self._resumed_ends()
        if self.is_finished or (stream := self._stream) is None:
            return list(updates.values())
        has_stop = bool(self._built.request.sampling.stop)
        if not has_stop:
            # Nobody waits for the first token, but its time is measured.
            stream.watch(self._record_first_token)
        try:
            while not self.is_finished:
                with self._explaining_abort():
                    news = await (stream.read() if has_stop else stream.read_end())
                self._process(news, updates)
        finally:
            stream.unwatch()
        return list(updates.values())

    async def updates(self) -> AsyncGenerator[list[Update]]:
        """What becomes visible, as it does; ends when every sequence has ended.

        Raises:
            ServingError: The request failed; what came before was yielded.
        """
        updates = self._resumed_ends()
        with self._pace.open():
            flush_at = 0.0  # the first token is never held back
            while not self.is_finished and self._stream is not None:
                try:
                    news = await self._read(self._stream, flush_at)
                except ServingError:
                    if updates:
                        yield list(updates.values())
                    raise
                self._process(news, updates)
                if not updates or self.is_finished:
                    continue
                now = self._clock()
                if now >= flush_at:
                    yield list(updates.values())
                    updates = {}
                    flush_at = now + self._interval_s()
        if updates:
            yield list(updates.values())

    def _resumed_ends(self) -> dict[int, Update]:
        updates: dict[int, Update] = {}
        for index, chunk in self._built.ended.items():
            if chunk is not None:
                self._add(index, chunk, updates)
        return updates

    def _interval_s(self) -> float:
        wish_s = self._built.flush_interval_s
        return self._pace.interval_s() if wish_s is None else wish_s

    @property
    def is_finished(self) -> bool:
        """Whether every sequence has ended; what `updates` yields then is the last."""
        return self._num_open == 0

    async def _read(self, stream: TokenStream, until: float) -> StreamNews:
        """What came by then or with the end of a sequence; at least one token if that is past.

        Tokens that nobody can see yet are left to gather, so that a request costs something per
        response, not per token. Two are wanted at once: the first, whose time is measured, and any
        that may complete a stop string, because the device goes on until it is told.
        """
        is_eager = bool(self._built.request.sampling.stop) or self._last_token_at is None
        wait = stream.read if is_eager else stream.read_end
        with self._explaining_abort():
            remaining_s = until - self._clock()
            if remaining_s <= 0:
                return await stream.read()
            try:
                async with asyncio.timeout(remaining_s):
                    return await wait()
            except TimeoutError:
                return stream.take()

    @contextmanager
    def _explaining_abort(self) -> Generator[None]:
        try:
            yield
        except AbortedError:
            if self._claim.is_replaced:
                raise AbortedError(
                    f"request_id {self.request_id!r} was taken over by another call that resumes "
                    "it.",
                    request_id=self.request_id,
                ) from None
            raise

    def _process(self, news: StreamNews, updates: dict[int, Update]) -> None:
        request = self._built.request
        num_tokens = 0
        for entry in news.sequences:
            processor = self._built.processors[entry.index]
            if processor.is_finished:
                continue
            before = processor.num_tokens
            chunk = processor.process(entry.token_ids, entry.finish_reason)
            num_tokens += processor.num_tokens - before
            self._num_open -= processor.is_finished
            if chunk.stop_string is not None and entry.finish_reason is None:
                self._cluster.finish(
                    request.sequences[entry.index], processor.num_tokens, FinishReason.STOP
                )
            self._add(entry.index, chunk, updates)
        if num_tokens > 0:
            self._record_tokens(num_tokens)
        if news.ended and not self.is_finished:
            raise InvariantError(f"stream ended with open sequences: {request}")

    def _add(self, index: int, chunk: OutputChunk, updates: dict[int, Update]) -> None:
        if not chunk:
            return
        if chunk.finish_reason is not None:
            self._finish_reasons.append(chunk.finish_reason)
        update = updates.get(index)
        if update is None:
            update = updates[index] = Update(index)
        update.add(chunk)

    def _record_tokens(self, num_tokens: int) -> None:
        self._metrics.num_generation_tokens += num_tokens
        if self._last_token_at is None:
            self._record_first_token()
            self._has_early_token = False
            return
        now = self._clock()
        num_gaps = num_tokens - self._has_early_token
        self._has_early_token = False
        if num_gaps > 0:
            gap = (now - self._last_token_at) / num_gaps
            self._metrics.inter_token_latency.observe(gap, count=num_gaps)
        self._last_token_at = now

    def _record_first_token(self) -> None:
        self._last_token_at = self._clock()
        self._metrics.time_to_first_token.observe(self._last_token_at - self._started)
        self._has_early_token = True

    def record_end(self) -> None:
        """Count the request once, when its call ends."""
        self._metrics.on_ended(
            finish_reasons=[reason.name.lower() for reason in self._finish_reasons],
            latency_s=self._clock() - self._started,
            is_complete=self.is_finished,
        )
