"""Who may look on while a replica's control stream passes, such as a recording.

Owns: the interface. An observer changes nothing and must return at once: it is called on the event
loop, between deciding and sending.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from control_plane.errors import ServingError
    from control_plane.replica import WorkerFacts
    from protos.pagewire.v1 import worker_pb2


class StreamObserver(Protocol):
    """Sees one replica's streams, one after the other, in the order in which its engine does."""

    def attached(self, facts: WorkerFacts) -> None:
        """A stream began with this Hello; what is sent and received from here on is its."""
        ...

    def sent(self, message: worker_pb2.ControlMessage) -> None:
        """A message was queued for the worker. It is not changed afterwards."""
        ...

    def received(self, message: worker_pb2.WorkerMessage) -> None:
        """A message came in and is about to be taken."""
        ...

    def ended(self, error: ServingError | None) -> None:
        """The stream ended; nothing read from it afterwards counts."""
        ...


class StreamObservers(Protocol):
    """Gives each replica its observer."""

    def observe(self, replica_id: str, model: str) -> StreamObserver:
        """The observer of a replica, the same one if it was there before."""
        ...
