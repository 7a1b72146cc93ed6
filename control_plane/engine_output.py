"""What an `EngineCore` tells whoever runs it, and an `Engine` whoever owns it. Owns nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from control_plane.engine import Engine
    from control_plane.errors import ServingError
    from control_plane.request import BlockHash, BlockId, Request, Version
    from control_plane.scheduled_step import StepUpdate
    from protos.pagewire.v1 import worker_pb2


class EngineOutput(Protocol):
    """Where the core's messages and news go. No method may block or call back into the core."""

    def send(self, message: worker_pb2.ControlMessage) -> None:
        """Put a message on the worker's stream, behind all earlier ones."""
        ...

    def started(self, request: Request) -> None:
        """A request has a row for the first time, of all replicas."""
        ...

    def advance(self, update: StepUpdate) -> None:
        """A step was confirmed: new tokens and ends."""
        ...

    def fail(self, request: Request, error: ServingError) -> None:
        """The request is forgotten by this replica and must not be replayed."""
        ...

    def index_changed(self, changes: Mapping[BlockId, tuple[BlockHash, Version] | None]) -> None:
        """Permanent entries of the prefix index came or went."""
        ...


class EngineOwner(Protocol):
    """Who hears of tokens, failures and losses: the cluster."""

    def started(self, request: Request) -> None:
        """A request has a row for the first time."""
        ...

    def advance(self, update: StepUpdate) -> None:
        """A step was confirmed."""
        ...

    def fail(self, request: Request, error: ServingError) -> None:
        """A request must not be replayed any more."""
        ...

    def lose(self, engine: Engine, error: ServingError | None, *, lost: bool) -> None:
        """The engine's worker has to go; see `Fleet.lose`."""
        ...

    def doubts(self, engine: Engine) -> bool:
        """Whether the replica was in trouble too often lately."""
        ...

    def step_failed(self, engine: Engine) -> None:
        """A step failed, and everything the engine holds waits again; it may do so elsewhere."""
        ...

    def withdraw_waiting(self, engine: Engine) -> None:
        """The engine takes no new sequence any more; find other places for what waits."""
        ...
