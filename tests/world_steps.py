"""Small steps of tests that move a `World` by hand: one control plane, one worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protos.pagewire.v1 import worker_pb2

if TYPE_CHECKING:
    from cluster_world import Client, Plane, Worker, World

    from control_plane.engine_core import EngineCore

# Three full blocks of four tokens.
PREFIX = list(range(10, 22))


def start(world: World) -> tuple[Plane, Worker]:
    plane, worker = world.start_plane(), world.workers[0]
    world.attach(worker, plane)
    world.round_trip(worker)
    return plane, worker


def finish(world: World, client: Client) -> None:
    """Let a client's request run to its end."""
    for _ in range(40):
        if client.is_over:
            break
        for worker in world.workers:
            world.round_trip(worker)
    assert client.is_over
    world.check()


def core_of(plane: Plane) -> EngineCore:
    [engine] = plane.cluster.fleet
    return engine.core


def ordered(worker: Worker) -> list[worker_pb2.Plan]:
    """Plans on their way to the worker."""
    assert worker.connection is not None
    return [
        message.plan
        for message in worker.connection.to_worker
        if isinstance(message, worker_pb2.ControlMessage) and message.HasField("plan")
    ]


def lose_plan(worker: Worker, plan: worker_pb2.Plan) -> None:
    assert worker.connection is not None
    worker.connection.to_worker.remove(worker_pb2.ControlMessage(plan=plan))


def client_of(world: World, plane: Plane, prompt: list[int], **options: object) -> Client:
    client = world.new_client(prompt, **options)  # type: ignore[arg-type]
    world.send(client, plane)
    return client


def two_with_one_prefix(world: World, plane: Plane) -> tuple[Client, Client]:
    """The second is ordered by the plan behind the first one's, on the blocks that it computes."""
    clients = [world.new_client([*PREFIX, last], max_tokens=6) for last in (30, 31)]
    world.send_together(clients, plane)
    return clients[0], clients[1]
