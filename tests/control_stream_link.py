"""One worker, its engine and the stream between them, for the machine of the control stream."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from control_plane.errors import ReplayLimitError, ServingError

if TYPE_CHECKING:
    from fake_worker import StepwiseWorker

    from control_plane.engine_core import EngineCore
    from control_plane.replica import ReplicaShape
    from control_plane.request import FinishReason, Request
    from control_plane.scheduled_step import StepUpdate
    from protos.pagewire.v1 import worker_pb2


@dataclass(eq=False)
class Tracked:
    """A request, what an undisturbed run gives, and what came back."""

    request: Request
    expected: list[int]
    expected_reason: int
    received: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    error: ServingError | None = None
    aborted: bool = False
    stopped_at: int | None = None
    home: Link | None = None

    @property
    def is_over(self) -> bool:
        return self.aborted or self.error is not None or self.reason is not None


@dataclass(eq=False)
class Link:
    """One worker, its engine and the two directions of the stream between them."""

    worker: StepwiseWorker
    tracked: dict[str, Tracked]
    core: EngineCore | None = None
    shape: ReplicaShape | None = None
    to_worker: deque[worker_pb2.ControlMessage] = field(default_factory=deque)
    to_control: deque[worker_pb2.WorkerMessage] = field(default_factory=deque)

    # What the router asks.

    @property
    def replica_id(self) -> str:
        return self.worker.protocol.identity.replica_id

    @property
    def is_up(self) -> bool:
        return self.core is not None and self.core.attached

    @property
    def engine(self) -> EngineCore:
        assert self.core is not None
        return self.core

    @property
    def is_doubtful(self) -> bool:
        return False

    @property
    def queued_tokens(self) -> int:
        return self.engine.uncached_tokens

    @property
    def num_live(self) -> int:
        return self.engine.num_running + self.engine.num_waiting

    def fits(self, num_total_tokens: int, num_sequences: int) -> bool:
        return self.engine.scheduler.fits(num_total_tokens, num_sequences)

    def num_hit_tokens(self, request: Request) -> int:
        return self.engine.scheduler.count_cached_tokens(request)

    # What the core reports.

    def send(self, message: worker_pb2.ControlMessage) -> None:
        self.to_worker.append(message)

    def advance(self, update: StepUpdate) -> None:
        for sequence, token_id in zip(update.sequences, update.token_ids, strict=True):
            self.tracked[sequence.request.req_id].received.append(token_id)
        for sequence in update.finished:
            tracked = self.tracked[sequence.request.req_id]
            assert tracked.reason is None
            tracked.reason = sequence.finish_reason

    def started(self, request: Request) -> None:
        """A plan that gives it a row was sent."""

    def fail(self, request: Request, error: ServingError) -> None:
        assert isinstance(error, ReplayLimitError)
        self.tracked[request.req_id].error = error

    def index_changed(self, changes: object) -> None:
        assert changes
