"""Every live request of this control plane: where it enters, where it runs, how it ends.

Owns: the live requests, their placing on replicas, the bounds of the queue, the drain. Does not
know text, clients, messages of the control stream, or how a step is made.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import TYPE_CHECKING, NoReturn

from control_plane import overload, router
from control_plane.errors import (
    AbortedError,
    DeadlineError,
    InvariantError,
    RequestTooLongError,
)
from control_plane.failure import Failure
from control_plane.fleet import Fleet, shutting_down
from control_plane.request import FinishReason
from control_plane.run_clock import RunClock
from control_plane.stats import ClusterSnapshot
from control_plane.token_stream import TokenReaders, TokenStream
from control_plane.waiting_room import Live, WaitingRoom

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from control_plane.cluster_config import ClusterConfig
    from control_plane.engine import Engine
    from control_plane.errors import ServingError
    from control_plane.prefix_store import PrefixStore
    from control_plane.request import Request
    from control_plane.request import Sequence as RequestSequence
    from control_plane.scheduled_step import StepUpdate
    from control_plane.served_model import ServedModel
    from control_plane.stream_observer import StreamObservers

logger = logging.getLogger(__name__)

# Lateness of this process that is not the workers' fault.
_STALL_S = 0.5


class Cluster:
    """Where requests enter and tokens come back. Everything runs on one event loop.

    Attributes:
        fleet: The replicas; what `WorkerService` attaches workers to.
        clock: Seconds that this process has run: leases and timeouts count on it.
    """

    def __init__(
        self,
        config: ClusterConfig,
        models: Sequence[ServedModel],
        prefix_store: PrefixStore,
        *,
        clock: RunClock | None = None,
        observers: StreamObservers | None = None,
        on_started: Callable[[float], None] | None = None,
    ) -> None:
        """Build it on the running loop.

        Args:
            config: Limits and times.
            models: Those served.
            prefix_store: Started and closed by the caller.
            clock: Made by default.
            observers: May look on at control streams.
            on_started: Gets the seconds that each request waited for its first row.
        """
        if not models:
            raise ValueError("a control plane serves at least one model")
        self.config = config
        self.models = {model.name: model for model in models}
        self.clock = clock or RunClock(tolerance_s=min(_STALL_S, config.lease_s / 8))
        self._store = prefix_store
        self._failure = Failure()
        self.fleet = Fleet(
            config,
            models,
            prefix_store,
            requests=self,
            failure=self._failure,
            clock=self.clock,
            observers=observers,
        )
        self._live: dict[str, Live] = {}
        self._readers = TokenReaders()
        self._waiting = WaitingRoom(config.replica_wait_s, self._give_up, self.clock)
        self._superseded = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._draining = False
        self._started_at_s = time.time()
        self._num_replays = 0
        self._on_started = on_started

    # Life.

    async def start(self) -> None:
        """Begin to take requests; workers attach through `fleet`."""
        self._started_at_s = time.time()
        self.clock.start()
        self.fleet.start()

    async def stop(self) -> None:
        """End every worker's stream and fail what is still live with ShuttingDownError."""
        self.begin_drain()
        self._fail_all()
        self._waiting.close()
        await self.fleet.stop()
        self.clock.stop()

    async def failed(self) -> NoReturn:
        """Wait for a broken invariant; the process must end on it.

        Raises:
            InvariantError: This process contradicts itself.
        """
        await self._failure.wait()

    def begin_drain(self) -> None:
        """Refuse new requests from now on; live ones go on, and workers may still come for them."""
        if not self._draining:
            self._draining = True
            logger.info("drain begins: live=%d", len(self._live))

    async def drained(self, timeout_s: float) -> bool:
        """Wait until no request is live; False if the time ran out first.

        What is left then fails with ShuttingDownError, so that clients resume elsewhere.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            logger.warning("drain ran out of time: live=%d", len(self._live))
            self._fail_all()
            return False
        return True

    async def superseded(self) -> None:
        """Return once a worker reported a higher term: another control plane is active.

        A drain has begun by then; the caller waits for it and ends the process.
        """
        await self._superseded.wait()

    # Requests.

    def submit(
        self,
        request: Request,
        *,
        timeout_s: float | None = None,
        is_patient: bool = False,
        model: ServedModel | None = None,
    ) -> TokenStream:
        """Take a request; its tokens come back through the stream.

        Args:
            request: Its `req_id` is unique among live requests (the edge sees to that).
            timeout_s: Until the client's deadline. Bounds only the wait for a replica; the edge
                aborts what runs past it.
            is_patient: Would rather wait than be refused, up to its deadline.
            model: One of those served; None where there is only one.

        Raises:
            RequestTooLongError: It fits no ready replica; names the longest that does.
            DeadlineError: `timeout_s` is over.
            OverloadedError: The queue is full, or it would wait for too long.
            ShuttingDownError: A drain has begun.
        """
        if self._draining:
            raise shutting_down()
        if model is None:
            (model,) = self.models.values()
        if request.req_id in self._live:
            raise InvariantError(f"request {request.req_id} is live already")
        self._check_length(request, model)
        stream = TokenStream(request.live_sequences, self._readers)
        for sequence in request.live_sequences:
            # A resume can bring every token and not the end, if that was what got lost.
            if sequence.num_tokens >= request.max_total_tokens:
                sequence.finish_reason = FinishReason.LENGTH
                stream.finish(sequence, FinishReason.LENGTH)
        if request.is_finished:
            return stream
        # Who resumes has waited for a row before.
        is_patient |= any(sequence.output_token_ids for sequence in request.sequences)
        self._check_queue(request, model, timeout_s=timeout_s, is_patient=is_patient)
        now = self.clock()
        deadline = None if timeout_s is None else now + timeout_s
        live = Live(request, stream, model, since=now, deadline=deadline)
        self._live[request.req_id] = live
        self._empty.clear()
        self._place(live)
        return stream

    def abort(self, request: Request) -> None:
        """Forget a request in any state. Idempotent. Its stream fails with AbortedError."""
        live = self._find(request)
        if live is not None:
            self._end(live, AbortedError("The request was aborted.", req_id=request.req_id))

    def finish(
        self, sequence: RequestSequence, num_output_tokens: int, reason: FinishReason
    ) -> None:
        """End a sequence at a stop string: what was computed past it is dropped.

        Its TokenStream gets no further tokens of the sequence, only its end.
        """
        live = self._find(sequence.request)
        if live is None or sequence.is_finished:
            return
        if live.engine is not None:
            with self._failure.guard():
                live.engine.finish(sequence, num_output_tokens=num_output_tokens, reason=reason)
        else:
            del sequence.output_token_ids[num_output_tokens:]
            sequence.finish_reason = reason
        live.stream.finish(sequence, reason)
        if live.request.is_finished:
            self._forget(live)

    # What the fleet reports.

    def started(self, request: Request) -> None:
        """A request has a row for the first time."""
        live = self._find(request)
        if live is not None and self._on_started is not None:
            self._on_started(self.clock() - live.since)

    def advance(self, update: StepUpdate) -> None:
        """New tokens and ends of a confirmed step."""
        self._readers.wake(update.sequences)
        for sequence in update.finished:
            live = self._live.get(sequence.request.req_id)
            if live is not None and sequence.finish_reason is not None:
                live.stream.finish(sequence, sequence.finish_reason)
                if live.request.is_finished:
                    self._forget(live)

    def fail(self, request: Request, error: ServingError) -> None:
        """A request that its replica has given up for good."""
        live = self._find(request)
        if live is not None:
            logger.warning("request failed: req_id=%s reason=%s", request.req_id, error.reason)
            live.stream.fail(error)
            self._forget(live)

    def replay(self, requests: Iterable[Request]) -> None:
        """Place requests again whose replica is gone or takes nothing new, in arrival order."""
        for request in requests:
            live = self._find(request)
            if live is None:
                error = InvariantError(f"a replica held {request.req_id}, which is not live")
                self._failure.record(error)
                raise error
            self._num_replays += 1
            self._place(live)

    def replica_ready(self) -> None:
        """Replicas take requests: place what waits."""
        for live in self._waiting.take_all():
            self._place(live)

    def step_back(self) -> None:
        """Another control plane is active: take nothing new and say so."""
        self.begin_drain()
        self.fleet.close()
        self._superseded.set()

    # Stats.

    def num_ready(self, model: str) -> int:
        """Replicas of the model that take work now and make progress with what they have.

        None as long as requests wait for replicas to come back, whoever is attached.
        """
        return sum(not engine.is_stuck for engine in self.fleet.ready(self.models[model]))

    def longest_fit(self, model: ServedModel, num_sequences: int) -> int:
        """The most tokens, prompt and output, that so many sequences can have on a ready replica.

        Without a replica only the model can tell; a request that is longer than what comes then
        waits, and no replica where it does not fit will take it.
        """
        ready, limit = self.fleet.ready(model), model.max_model_len
        return router.longest_fit(ready, num_sequences, limit=limit) if ready else limit

    def audit(self) -> None:
        """Check every replica's pool.

        Raises:
            InvariantError: Blocks leaked or are owned twice.
        """
        for engine in self.fleet:
            engine.core.scheduler.audit()

    def stats(self) -> ClusterSnapshot:
        """A snapshot of every replica."""
        self.fleet.forget_long_lost()
        return ClusterSnapshot(
            replicas=tuple(engine.snapshot() for engine in self.fleet),
            num_requests_unplaced=len(self._waiting),
            num_requests_live=len(self._live),
            term=self.fleet.term.value,
            started_at_s=self._started_at_s,
            prefix_store=self._store.describe(),
            num_replicas_lost=self.fleet.num_lost,
            num_replays=self._num_replays,
            num_stalls=self.clock.num_stalls,
            stalled_s=self.clock.stalled_s,
        )

    # Placing.

    def _place(self, live: Live) -> None:
        """Hand the request to a replica, or let it wait for one."""
        if not self._hand_over(live, self.fleet.ready(live.model)):
            self._waiting.add(live)

    def _hand_over(self, live: Live, engines: list[Engine]) -> bool:
        """Hand the request to one of these; False if it fits none."""
        with self._failure.guard():
            router.resolve_length(live.request, engines)
            live.engine = router.choose(live.request, engines)
            if live.engine is not None:
                live.engine.add(live.request)
        return live.engine is not None

    def _give_up(self, live: Live, error: ServingError) -> None:
        """The request has waited for as long as it can."""
        self._waiting.remove(live)
        # If only for the best replica, then another one is better than none.
        if not self._hand_over(live, self.fleet.attached(live.model)):
            self._end(live, error)

    def _end(self, live: Live, error: ServingError) -> None:
        """End a live request with an error, wherever it is."""
        with self._failure.guard():
            if live.engine is not None:
                live.engine.abort(live.request)
        for sequence in live.request.live_sequences:
            sequence.finish_reason = FinishReason.ABORT
        live.stream.fail(error)
        self._forget(live)

    def _find(self, request: Request) -> Live | None:
        live = self._live.get(request.req_id)
        return live if live is not None and live.request is request else None

    def _forget(self, live: Live) -> None:
        del self._live[live.request.req_id]
        self._waiting.remove(live)
        if not self._live:
            self._empty.set()

    def _fail_all(self) -> None:
        for live in list(self._live.values()):
            self._end(live, shutting_down())

    # Checks.

    def _check_length(self, request: Request, model: ServedModel) -> None:
        """Refuse what can never run.

        What a client resumes did run somewhere: the replica may not have come back yet.
        """
        total, limit = request.max_total_tokens, model.max_model_len
        if request.open_limit is not None:
            total = 1 + max(sequence.num_tokens for sequence in request.sequences)
        is_new = not any(sequence.output_token_ids for sequence in request.sequences)
        ready = self.fleet.ready(model) if is_new else []
        num_sequences = len(request.sequences)
        if request.num_prompt_tokens < total <= limit and (
            not ready or any(engine.fits(total, num_sequences) for engine in ready)
        ):
            return
        if is_new:
            limit = self.longest_fit(model, num_sequences)
        raise RequestTooLongError(
            f"The request needs room for {total} tokens ({request.num_prompt_tokens} of them "
            f"prompt), but the longest that fits is {limit}, prompt and output together. Shorten "
            f"the prompt or lower max_tokens.",
            num_prompt_tokens=request.num_prompt_tokens,
            num_total_tokens=total,
            limit=limit,
        )

    def _check_queue(
        self,
        request: Request,
        model: ServedModel,
        *,
        timeout_s: float | None,
        is_patient: bool,
    ) -> None:
        """Refuse what would overload this control plane, or wait for too long."""
        waiting, config = self._waiting, self.config
        overload.check_size(
            request,
            self.fleet,
            num_unplaced=(len(waiting), waiting.num_tokens),
            limits=config,
        )
        limit_s = math.inf if is_patient else config.max_queue_wait_s
        if timeout_s is not None:
            if timeout_s <= 0:
                raise DeadlineError("The request's deadline passed before it was admitted.")
            limit_s = min(limit_s, timeout_s)
        if limit_s < math.inf:
            ready = self.fleet.ready(model)
            router.resolve_length(request, ready)
            overload.check_wait(request, router.fitting(request, ready), limit_s=limit_s)
