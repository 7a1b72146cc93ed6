"""The replicas of this control plane: who may attach, and what happens when one goes.

Owns: the registry of engines, the pinned KV geometry of each model, the term, whether requests are
placed yet. Does not know requests' clients, grpc, or how a step is made.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

from control_plane.engine import Engine
from control_plane.errors import Code, InvariantError, ProtocolError, ShuttingDownError
from control_plane.placement_gate import PlacementGate
from control_plane.prefix_store import PrefixScope
from control_plane.replica import (
    ReplicaShape,
    build_scheduler,
    check_geometry,
    geometry_mismatch,
    match_model,
)
from control_plane.scope_owners import ScopeOwners
from control_plane.term import Term
from control_plane.trust import Trust

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from control_plane.cluster_config import ClusterConfig
    from control_plane.engine import WorkerStream
    from control_plane.errors import ServingError
    from control_plane.failure import Failure
    from control_plane.prefix_store import PrefixStore
    from control_plane.replica import KvGeometry, WorkerFacts
    from control_plane.request import Request
    from control_plane.run_clock import RunClock
    from control_plane.scheduled_step import StepUpdate
    from control_plane.served_model import ServedModel
    from control_plane.stream_observer import StreamObservers
    from protos.pagewire.v1 import worker_pb2

logger = logging.getLogger(__name__)

# A lost replica keeps its pool and index this long, in case the same KV memory comes back.
_KEEP_LOST_S = 300.0
# A worker that heard nothing for so long, or for a third of its lease, may end its stream.
_LONG_STALL_S = 3.0
# How long after a stall the streams that it cost are seen to have ended, or a third of the lease.
_AFTER_STALL_S = 1.0
_SUPERSEDED = "SUPERSEDED"
# Superseded processes that are remembered, oldest forgotten first.
_MAX_SUPERSEDED = 1024


class RequestOwner(Protocol):
    """Who answers for requests: the cluster."""

    def started(self, request: Request) -> None:
        """A request has a row for the first time."""
        ...

    def advance(self, update: StepUpdate) -> None:
        """A step was confirmed."""
        ...

    def fail(self, request: Request, error: ServingError) -> None:
        """A request must not be replayed any more."""
        ...

    def replay(self, requests: Iterable[Request]) -> None:
        """Find other places for requests whose replica is gone or takes nothing new."""
        ...

    def replica_ready(self) -> None:
        """Replicas that attached take requests."""
        ...

    def step_back(self) -> None:
        """Another control plane is active: take nothing new."""
        ...


class Fleet:
    """Engines by replica id, attached or lost a moment ago."""

    def __init__(
        self,
        config: ClusterConfig,
        models: Iterable[ServedModel],
        store: PrefixStore,
        *,
        requests: RequestOwner,
        failure: Failure,
        clock: RunClock,
        observers: StreamObservers | None = None,
    ) -> None:
        """Build an empty fleet."""
        self._config = config
        self._models = tuple(models)
        self._store = store
        self._requests = requests
        self._failure = failure
        self._clock = clock
        self._observers = observers
        self._engines: dict[str, Engine] = {}
        self._geometries: dict[str, KvGeometry] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._asking: asyncio.Task[None] | None = None
        self._superseded: dict[tuple[str, bytes], None] = {}
        self._is_open = True
        self._trust = Trust()
        self._scope_owners = ScopeOwners(store)
        self.term = Term(config.shard, store, gather_s=config.term_gather_s)
        self._gate = PlacementGate(
            config,
            self._models,
            store,
            clock=clock,
            ready=self._ready_epochs,
            on_open=requests.replica_ready,
        )
        self.num_lost = 0

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines.values())

    def ready(self, model: ServedModel) -> list[Engine]:
        """Engines of the model that take new sequences now; none while others are waited for."""
        return self.attached(model) if self._gate.is_open(model) else []

    def attached(self, model: ServedModel) -> list[Engine]:
        """Engines of the model that could take new sequences."""
        return [e for e in self._engines.values() if e.is_ready and e.model is model]

    def _ready_epochs(self, model: ServedModel) -> list[bytes]:
        """Replicas of the model that are attached and know what their blocks hold."""
        now = self._clock()
        return [
            engine.shape.replica_epoch
            for engine in self._engines.values()
            if engine.model is model and engine.core.attached and engine.core.held_until <= now
        ]

    def start(self) -> None:
        """Find out which replicas an earlier control plane had."""
        self._asking = asyncio.create_task(self._gate.ask(), name="known replicas")
        self._watch(self._asking)

    def close(self) -> None:
        """Refuse workers from now on; attached ones stay."""
        self._is_open = False

    async def stop(self) -> None:
        """End every worker's stream and wait for the engines' tasks."""
        self.close()
        for engine in list(self._engines.values()):
            self.lose(engine, shutting_down(), lost=False)
            engine.close()
        self._gate.close()
        if self._asking is not None:
            self._asking.cancel()
        await self.term.close()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # Attaching.

    async def attach(self, facts: WorkerFacts, stream: WorkerStream) -> Engine:
        """Make a checked worker part of the fleet; from here on its engine sends.

        Raises:
            ServingError: The worker is refused, and why.
        """
        model = match_model(facts, self._models)
        self._check_geometry(facts, model)
        self._gate.greet(model, has_served=facts.applied_version > 0)
        term = await self.term.settle(facts.highest_term)
        # From here on nothing awaits: what is checked stays true until the engine is attached.
        if not self._is_open:
            raise shutting_down()
        if facts.highest_term > term:
            error = self._step_back(facts, term)
            await self.term.remember(facts.highest_term)
            raise error
        self._check_geometry(facts, model)
        self._check_rank_free(facts)
        self._supersede(facts)
        self._geometries[model.name] = facts.geometry
        engine = self._engine_for(facts, model)
        task = engine.attach(facts, stream, term=term)
        self._watch(task)
        logger.info(
            "worker attached: worker=%s replica=%s model=%s num_blocks=%d term=%d stream=%s",
            facts.worker_id,
            facts.replica_id,
            model.name,
            facts.num_blocks,
            term,
            stream.stream_id,
        )
        self._gate.look()
        if self._gate.is_open(model):
            self._requests.replica_ready()
        return engine

    def _check_geometry(self, facts: WorkerFacts, model: ServedModel) -> None:
        config, geometry = self._config, facts.geometry
        for field, expected in (("block_size", config.block_size), ("dtype", config.kv_dtype)):
            actual = getattr(geometry, field)
            if expected is not None and actual != expected:
                raise geometry_mismatch(field, actual, expected, model=model.name)
        pinned = self._geometries.get(model.name)
        if pinned is not None:
            check_geometry(geometry, pinned, model=model.name)

    def _check_rank_free(self, facts: WorkerFacts) -> None:
        engine = self._engines.get(facts.replica_id)
        holder = engine.facts if engine is not None else None
        if holder is not None and holder.worker_id != facts.worker_id:
            raise ProtocolError(
                "RANK_TAKEN",
                f"Rank {facts.rank} of replica {facts.replica_id} is held by worker "
                f"{holder.worker_id} at {holder.peer}. Give each replica its own id.",
                code=Code.ALREADY_EXISTS,
                replica_id=facts.replica_id,
                rank=facts.rank,
                holder=holder.worker_id,
            )

    def _supersede(self, facts: WorkerFacts) -> None:
        """End the older stream of the same worker id.

        Raises:
            ProtocolError: SUPERSEDED; this process was superseded itself. A status can get lost
                with the stream that it ends; without this, two processes would take the id from
                each other for ever.
        """
        if (facts.worker_id, facts.epoch) in self._superseded:
            raise _superseded(facts, "another process with this id")
        for engine in list(self._engines.values()):
            old = engine.facts
            if old is not None and old.worker_id == facts.worker_id:
                if old.epoch != facts.epoch:
                    self._superseded[old.worker_id, old.epoch] = None
                    if len(self._superseded) > _MAX_SUPERSEDED:
                        del self._superseded[next(iter(self._superseded))]
                lost = old.epoch != facts.epoch or not self._has_stalled()
                self.lose(engine, _superseded(facts, facts.peer), lost=lost)

    def _step_back(self, facts: WorkerFacts, term: int) -> ProtocolError:
        logger.error(
            "a newer control plane is active: worker=%s highest_term=%d term=%d",
            facts.worker_id,
            facts.highest_term,
            term,
        )
        self._requests.step_back()
        return ProtocolError(
            "HIGHER_TERM_SEEN",
            f"The worker has seen term {facts.highest_term}; this control plane has term {term} "
            f"and steps back.",
            code=Code.ABORTED,
            highest_term=facts.highest_term,
            term=term,
        )

    def _engine_for(self, facts: WorkerFacts, model: ServedModel) -> Engine:
        """The replica's engine: as it was if the same KV memory came back, else an empty one."""
        self.forget_long_lost()
        config, shape = self._config, ReplicaShape.of_ranks([facts])
        scope = PrefixScope(config.deployment, facts.model_fingerprint, shape.replica_epoch)
        self._scope_owners.take(scope, facts)
        engine = self._engines.get(facts.replica_id)
        if engine is not None and engine.shape == shape:
            return engine
        engine = Engine(
            replica_id=facts.replica_id,
            model=model,
            shape=shape,
            config=config,
            scheduler=build_scheduler(shape, model, config),
            store=self._store,
            scope=scope,
            owner=self,
            clock=self._clock,
            observer=None
            if self._observers is None
            else self._observers.observe(facts.replica_id, model.name),
        )
        self._drop(facts.replica_id)
        self._engines[facts.replica_id] = engine
        if facts.applied_version > 0 and (loading := engine.recover()) is not None:
            self._watch(loading)
        return engine

    def _drop(self, replica_id: str) -> None:
        engine = self._engines.pop(replica_id, None)
        if engine is not None:
            engine.close()

    # Leaving.

    def receive(
        self, engine: Engine, stream: WorkerStream, message: worker_pb2.WorkerMessage
    ) -> None:
        """Take one message of a worker. Whatever it is, it can only cost that worker its stream."""
        try:
            engine.receive(stream, message)
        except ProtocolError as error:
            self.lose(engine, error, lost=True)
        except InvariantError as error:
            self._failure.record(error)
            raise
        except Exception:
            # A defect of ours that this message found. What the engine holds may be half changed;
            # the token logs are not, so the requests go elsewhere and the engine is not kept.
            logger.exception("unplanned failure: replica=%s", engine.replica_id)
            error = ProtocolError(
                "INTERNAL", "Internal error; see the control plane's log.", code=Code.INTERNAL
            )
            self.lose(engine, error, lost=True)
            self._drop(engine.replica_id)
        else:
            if not self._gate.is_open(engine.model):
                # Its index may have been the last one to be checked.
                self._gate.look()

    def stream_closed(self, engine: Engine, stream: WorkerStream) -> None:
        """The worker's end of its stream is gone."""
        if engine.is_on(stream):
            self.lose(engine, None, lost=not (engine.core.draining or self._has_stalled()))

    def _has_stalled(self) -> bool:
        """Whether streams that end now end because nobody was here to keep them up.

        That says nothing about the workers, nor about the requests in flight.
        """
        third_s = self._config.lease_s / 3
        return self._clock.has_stalled(
            for_s=min(_LONG_STALL_S, third_s), within_s=max(_AFTER_STALL_S, third_s)
        )

    def lose(self, engine: Engine, error: ServingError | None, *, lost: bool) -> None:
        """End the stream of an engine's worker, then replay its requests elsewhere. Idempotent.

        Args:
            engine: Whose worker has to go, or has gone.
            error: What the stream ends with; OK if there is none.
            lost: Whether requests in flight carry a mark for it.
        """
        facts = engine.facts
        if facts is None:
            return
        with self._failure.guard():
            requests = engine.detach(error, lost=lost)
        if engine.core.draining:
            self._scope_owners.leave(engine.replica_id)
        self.num_lost += lost
        if lost and (error is None or error.reason != _SUPERSEDED):
            self._note_trouble(engine)
        logger.log(
            logging.WARNING if lost else logging.INFO,
            "worker gone: worker=%s replica=%s requests=%d cause=%s",
            facts.worker_id,
            facts.replica_id,
            len(requests),
            "its stream ended" if error is None else f"{error.reason}: {error.message}",
        )
        self._requests.replay(requests)

    def forget_long_lost(self) -> None:
        """Let go of pools whose KV memory will hardly come back."""
        horizon = self._clock() - _KEEP_LOST_S
        for engine in list(self._engines.values()):
            if engine.facts is None and engine.lost_at < horizon:
                self._drop(engine.replica_id)

    # What engines report.

    def started(self, request: Request) -> None:
        """Pass a start on."""
        self._requests.started(request)

    def advance(self, update: StepUpdate) -> None:
        """Pass tokens on."""
        self._requests.advance(update)

    def fail(self, request: Request, error: ServingError) -> None:
        """Pass a failure on."""
        self._requests.fail(request, error)

    def doubts(self, engine: Engine) -> bool:
        """Whether the replica was in trouble too often lately."""
        return self._trust.is_doubted(engine.replica_id, self._clock())

    def _note_trouble(self, engine: Engine) -> None:
        doubt_s = self._trust.note(engine.replica_id, self._clock())
        if doubt_s:
            logger.warning(
                "others get work first: replica=%s seconds=%g", engine.replica_id, doubt_s
            )

    def step_failed(self, engine: Engine) -> None:
        """A step failed: a sick worker must not use up the retries of what it was given."""
        self._note_trouble(engine)
        with self._failure.guard():
            requests = engine.core.withdraw_waiting()
        for request in requests:
            if request.num_losses:
                request.avoid = engine.replica_id
        self._requests.replay(requests)

    def withdraw_waiting(self, engine: Engine) -> None:
        """A drain began: what has no row there goes elsewhere."""
        with self._failure.guard():
            requests = engine.core.withdraw_waiting()
        self._requests.replay(requests)

    def _watch(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        # What the store has of a replica may have been the last thing that was waited for.
        self._gate.look()
        if not task.cancelled() and (error := task.exception()) is not None:
            # The tasks handle what workers and the store can cause; the rest is our own defect.
            logger.critical("task failed: task=%s", task.get_name(), exc_info=error)
            self._failure.record(error)


def _superseded(facts: WorkerFacts, by: str) -> ProtocolError:
    return ProtocolError(
        _SUPERSEDED,
        f"Worker {facts.worker_id} attached again from {by}; the newest process wins.",
        code=Code.ABORTED,
        worker_id=facts.worker_id,
    )


def shutting_down() -> ShuttingDownError:
    """The answer to everybody once this control plane is on its way out."""
    return ShuttingDownError(
        "This control plane is shutting down. Try again; another one may take over.",
        retry_after_s=1.0,
    )
