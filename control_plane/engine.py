"""One replica's engine on the event loop: a thin shell around `EngineCore`.

Owns: the task that orders steps as soon as the window allows and there is work, the timer behind
lease and step timeout, the end of a drain. Does not know grpc, Redis's state, or other replicas.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING, Protocol

from google.protobuf import duration_pb2

from control_plane.engine_core import EngineCore
from control_plane.errors import ProtocolError
from control_plane.queue_wait import QueueWait
from control_plane.stats import ReplicaSnapshot, WorkerSnapshot
from control_plane.wake_timer import WakeTimer
from protos.pagewire.v1 import worker_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping

    from control_plane.engine_config import EngineConfig
    from control_plane.engine_output import EngineOwner
    from control_plane.errors import ServingError
    from control_plane.prefix_store import PrefixScope, PrefixStore
    from control_plane.replica import ReplicaShape, WorkerFacts
    from control_plane.request import BlockHash, BlockId, FinishReason, Request, Version
    from control_plane.request import Sequence as RequestSequence
    from control_plane.run_clock import RunClock
    from control_plane.scheduled_step import StepUpdate
    from control_plane.scheduler import Scheduler
    from control_plane.served_model import ServedModel
    from control_plane.stream_observer import StreamObserver

logger = logging.getLogger(__name__)

# How long, and how often, a store that does not answer is asked for the entries of a replica.
_LOAD_LIMIT_S = 60.0
_LOAD_PAUSE_S = 0.2
# Between two pieces of an audit, so that it takes no more than a fraction of the time.
_AUDIT_PAUSE_S = 0.05


class WorkerStream(Protocol):
    """The control plane's end of one worker's stream."""

    @property
    def stream_id(self) -> str: ...

    def send(self, message: worker_pb2.ControlMessage) -> None:
        """Queue a message; never blocks. Ignored once ended."""
        ...

    def end(self, error: ServingError | None) -> None:
        """End the stream, with OK if there is no error. Idempotent; the first call decides."""
        ...


class Engine:
    """The engine of one replica, attached to its worker or waiting for it to come back."""

    def __init__(
        self,
        *,
        replica_id: str,
        model: ServedModel,
        shape: ReplicaShape,
        config: EngineConfig,
        scheduler: Scheduler,
        store: PrefixStore,
        scope: PrefixScope,
        owner: EngineOwner,
        clock: RunClock,
        observer: StreamObserver | None = None,
    ) -> None:
        """Build an engine that is not attached. Epoch and shape are its own for life."""
        self.replica_id = replica_id
        self.model = model
        self.shape = shape
        self.core = EngineCore(config, scheduler, self)
        self.facts: WorkerFacts | None = None
        self.lost_at = 0.0
        self._scheduler = scheduler
        self._store = store
        self._scope = scope
        self._owner = owner
        self._clock = clock
        self._observer = observer
        self._stream: WorkerStream | None = None
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._timer = WakeTimer(self._wake.set)
        self._drain_ends_at = float("inf")
        self._last_sent_s = 0.0
        self._num_stalls = 0
        self._queue_wait = QueueWait()
        self._caches_prefixes = scheduler.kv_cache_manager.config.enable_prefix_caching
        self._recovery: asyncio.Task[None] | None = None
        self._unrecorded: dict[BlockId, tuple[BlockHash, Version] | None] = {}

    # What an earlier process knew.

    def recover(self) -> asyncio.Task[None] | None:
        """Begin to ask the store for the replica's entries; before the first `attach`.

        Returns:
            The task; what it raises is a defect of ours.
        """
        if self._caches_prefixes:
            self.core.expect_entries()
            self._recovery = asyncio.create_task(self._load(), name=f"load {self.replica_id}")
        return self._recovery

    def close(self) -> None:
        """The engine is not kept any longer."""
        if self._recovery is not None:
            self._recovery.cancel()

    async def _load(self) -> None:
        # A store that restarts together with this process answers a moment later.
        give_up_at = self._clock() + _LOAD_LIMIT_S
        while (entries := await self._store.load(self._scope)) is None:
            if self._clock() >= give_up_at:
                entries = {}
                break
            await asyncio.sleep(_LOAD_PAUSE_S)
        self.core.offer_entries(entries)
        self._wake.set()

    def _keep_up_index(self) -> float:
        """Do a piece of what is left of recovery or audit.

        Returns:
            Seconds until the next: others have their turn meanwhile. Infinite if nothing is left.
        """
        index = self.core.index
        if index.has_work:
            index.work()
            # Behind the last one plans may be waiting.
            return 0.0
        return _AUDIT_PAUSE_S if index.is_auditing and self.core.is_idle else math.inf

    # The stream.

    def attach(self, facts: WorkerFacts, stream: WorkerStream, *, term: int) -> asyncio.Task[None]:
        """Begin on a worker's stream: Welcome, Reset, then steps.

        Returns:
            The engine's task. It ends with the stream; what it raises is a defect of ours.
        """
        now = self._clock()
        self.facts = facts
        self._stream = stream
        self._drain_ends_at = float("inf")
        self._num_stalls = self._clock.num_stalls
        if self._observer is not None:
            self._observer.attached(facts)
        # A worker that applied nothing in this epoch has nothing to find again.
        asks = self._caches_prefixes and facts.applied_version > 0
        welcome = worker_pb2.Welcome(
            term=term,
            stream_id=stream.stream_id,
            num_blocks=self.shape.num_blocks,
            lookahead=self.core.config.longest_lookahead,
            lease=duration_pb2.Duration(),
            send_generations=asks,
        )
        welcome.lease.FromNanoseconds(int(self.core.config.lease_s * 1e9))
        self.send(worker_pb2.ControlMessage(welcome=welcome))
        hold_s = self.core.config.adoption_wait_s if asks else None
        self.core.attach(facts.applied_version, now, hold_s=hold_s)
        self._wake.set()
        self._task = asyncio.create_task(self._run(), name=f"engine {self.replica_id}")
        return self._task

    def detach(self, error: ServingError | None, *, lost: bool) -> list[Request]:
        """End the stream, then give up the requests; nothing read afterwards counts."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.end(error)
            if self._observer is not None:
                self._observer.ended(error)
        self._timer.cancel()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        self._task = None
        self._record_index()
        self.facts = None
        self.lost_at = self._clock()
        return self.core.detach(lost=lost)

    def is_on(self, stream: WorkerStream) -> bool:
        """Whether this is the stream the engine is attached to now."""
        return self._stream is stream

    def receive(self, stream: WorkerStream, message: worker_pb2.WorkerMessage) -> None:
        """Take one message; ignored if the stream has ended meanwhile.

        Raises:
            ProtocolError: The worker has to go.
        """
        if self._stream is not stream:
            return
        if self._observer is not None:
            self._observer.received(message)
        num_step_failures = self.core.counters.num_step_failures
        self.core.receive(message, self._clock())
        self._store.renew(self._scope, self.core.live_entries)
        if message.HasField("drain"):
            self._begin_drain(message.drain)
        elif self.core.counters.num_step_failures > num_step_failures:
            self._owner.step_failed(self)
        self._wake.set()

    def _begin_drain(self, drain: worker_pb2.Drain) -> None:
        grace_s = max(0.0, drain.grace.ToNanoseconds() / 1e9)
        # Before the worker's own end of grace, so that the requests move in order and unmarked.
        ends_at = self._clock() + max(0.0, grace_s - min(1.0, grace_s / 10))
        self._drain_ends_at = min(self._drain_ends_at, ends_at)
        logger.info("drain: replica=%s grace_s=%.1f", self.replica_id, grace_s)
        self._owner.withdraw_waiting(self)

    async def _run(self) -> None:
        """Until the stream ends: whatever there is to send, then sleep until there is more."""
        while self._stream is not None:
            self._wake.clear()
            now = self._clock()
            try:
                self.core.check(now)
            except ProtocolError as error:
                self._owner.lose(self, error, lost=True)
                return
            await self._order_steps()
            self._record_index()
            now = self._clock()
            if self.core.draining and (self.core.is_idle or now >= self._drain_ends_at):
                self._owner.lose(self, None, lost=False)
                return
            heartbeat_at = self._last_sent_s + self.core.config.lease_s / 3
            if now >= heartbeat_at or self._num_stalls != self._clock.num_stalls:
                # After a stall at once: the worker's lease went on.
                self._num_stalls = self._clock.num_stalls
                self.send(worker_pb2.ControlMessage(heartbeat=worker_pb2.Heartbeat()))
                heartbeat_at = now + self.core.config.lease_s / 3
            next_piece_s = self._keep_up_index()
            times = [self.core.next_check(), self._drain_ends_at, heartbeat_at, now + next_piece_s]
            if self.core.held_until > now:
                times.append(self.core.held_until)
            self._timer.arm(min(times) - now)
            await self._wake.wait()

    async def _order_steps(self) -> None:
        core = self.core
        num_started = core.counters.sequences_started
        has_room = core.order_step(self._clock())
        while has_room:
            # The plan leaves before the next one is made: the worker may be idle until it comes.
            await asyncio.sleep(0)
            has_room = core.order_step(self._clock())
        num_started = core.counters.sequences_started - num_started
        self._queue_wait.observe(num_started, core.num_waiting, self._clock())

    def _record_index(self) -> None:
        """Tell the store what changed since the last time."""
        if self._unrecorded:
            changes, self._unrecorded = self._unrecorded, {}
            self._store.record(self._scope, changes)

    # Requests.

    @property
    def is_ready(self) -> bool:
        """Takes new sequences now."""
        return self._stream is not None and not self.core.draining

    @property
    def is_stuck(self) -> bool:
        """A step takes suspiciously long."""
        return self.core.is_stuck(self._clock())

    @property
    def is_doubtful(self) -> bool:
        """Takes new sequences only where there is no other replica."""
        return self.is_stuck or self._owner.doubts(self)

    @property
    def num_waiting(self) -> int:
        # Asked of every replica for every request, as are the next ones: straight at the source.
        return self._scheduler.num_waiting

    def expected_wait_s(self, request: Request) -> float:
        """Seconds until the request would get a row here, if it came now."""
        if not self._scheduler.num_waiting:
            return 0.0
        return self._queue_wait.expected_s(self.core.count_ahead(request), self._clock())

    @property
    def queued_tokens(self) -> int:
        """Tokens to compute of requests without any output; what was cached when they came not."""
        return self.core.uncached_tokens

    @property
    def unstarted_tokens(self) -> int:
        """Known tokens of requests without any output."""
        return self.core.unstarted_tokens

    @property
    def num_live(self) -> int:
        return self._scheduler.num_running + self._scheduler.num_waiting

    def fits(self, num_total_tokens: int, num_sequences: int) -> bool:
        """Whether so many sequences of this length can ever run here together."""
        return self._scheduler.fits(num_total_tokens, num_sequences)

    def num_hit_tokens(self, request: Request) -> int:
        """Tokens of the request whose KV is here already. Changes nothing."""
        return self._scheduler.count_cached_tokens(request)

    def add(self, request: Request) -> None:
        """Take a request; its first step goes out once the loop has come round."""
        self.core.add(request)
        self._wake.set()

    def abort(self, request: Request) -> None:
        """Forget a request in any state."""
        self.core.abort(request)
        self._wake.set()

    def finish(
        self, sequence: RequestSequence, *, num_output_tokens: int, reason: FinishReason
    ) -> None:
        """End a sequence at a stop string."""
        self.core.finish(sequence, num_output_tokens=num_output_tokens, reason=reason)
        self._wake.set()

    # Output of the core.

    def send(self, message: worker_pb2.ControlMessage) -> None:
        """Pass a message of the core on to the worker."""
        if self._stream is not None:
            self._stream.send(message)
            if self._observer is not None:
                self._observer.sent(message)
            self._last_sent_s = self._clock()

    def started(self, request: Request) -> None:
        """Pass a start of the core on."""
        self._owner.started(request)

    def advance(self, update: StepUpdate) -> None:
        """Pass tokens of the core on."""
        self._owner.advance(update)

    def fail(self, request: Request, error: ServingError) -> None:
        """Pass a failure of the core on."""
        self._owner.fail(request, error)

    def index_changed(self, changes: Mapping[BlockId, tuple[BlockHash, Version] | None]) -> None:
        """Keep confirmed index entries of the core for the store.

        The store hears of them behind the turn of those who wait for the same step's tokens, and
        behind the plans that the step made room for: a long prompt has hundreds of entries.
        """
        self._unrecorded.update(changes)

    # Stats.

    def snapshot(self) -> ReplicaSnapshot:
        """The replica as GetStats shows it."""
        core, scheduler, counters = self.core, self._scheduler, self.core.counters
        return ReplicaSnapshot(
            replica_id=self.replica_id,
            model=self.model.name,
            workers=self._worker_snapshots(),
            usable_blocks=scheduler.num_usable_blocks,
            free_blocks=scheduler.num_free_blocks,
            cached_blocks=scheduler.num_cached_blocks,
            num_requests_running=core.num_running,
            num_requests_waiting=core.num_waiting,
            sent_version=core.sent_version,
            confirmed_version=core.confirmed_version,
            replica_epoch=self.shape.replica_epoch.hex(),
            block_size=self.shape.geometry.block_size,
            prefix_queries=scheduler.num_prefix_queries,
            prefix_hits=scheduler.num_prefix_hits,
            num_preemptions=scheduler.num_preemptions,
            num_resets=counters.num_resets,
            num_nacks=counters.num_nacks,
            num_step_failures=counters.num_step_failures,
            num_steps=counters.steps,
            wasted_steps=counters.wasted_steps,
            wasted_rows=counters.wasted_rows,
            device_time_us=counters.device_time_us,
            replayed_tokens=counters.replayed_tokens,
            plans_sent=counters.plans_sent,
            plan_bytes=counters.plan_bytes,
            lookahead=core.window.lookahead,
            round_trip_s=core.window.round_trip.mean_s,
            generation_tokens=counters.generation_tokens,
            prompt_tokens_sent=counters.prompt_tokens_sent,
            adopted_blocks=counters.adopted_blocks,
            refused_entries=counters.refused_entries,
            ready=self.is_ready and not self.is_stuck,
        )

    def _worker_snapshots(self) -> tuple[WorkerSnapshot, ...]:
        facts = self.facts
        if facts is None:
            return ()
        return (
            WorkerSnapshot(
                worker_id=facts.worker_id,
                rank=facts.rank,
                epoch=facts.epoch.hex(),
                backend=facts.backend,
                device=facts.device,
                last_message_ms=int((self._clock() - self.core.last_heard) * 1000),
                draining=self.core.draining,
                peer=facts.peer,
            ),
        )
