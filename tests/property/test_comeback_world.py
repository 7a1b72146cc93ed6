"""Control planes that take over from one with several workers, to the tenth of a second.

The world is that of `test_cluster_world.py`, whose machine also waits for replicas at random.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from cluster_world import Client, Plane, Worker, World
from world_steps import PREFIX, finish

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 1.5


@pytest.fixture
def world() -> Iterator[World]:
    world = World(num_workers=2, num_blocks=40, return_wait_s=WAIT_S)
    yield world
    world.close()


def is_placed(world: World, plane: Plane) -> bool:
    world.run()
    return plane.cluster.stats().num_requests_unplaced == 0


def num_hits(plane: Plane) -> int:
    return sum(engine.core.scheduler.num_prefix_hits for engine in plane.cluster.fleet)


def ask(world: World, plane: Plane, tail: int) -> Client:
    client = world.new_client([*PREFIX, tail])
    world.send(client, plane)
    return client


def first_life(world: World) -> tuple[Worker, Worker]:
    """Gives the worker without the prefix, then the one that has it. Both are known."""
    plane, (has, other) = world.start_plane(), world.workers
    for worker, tail in ((has, 30), (other, 31)):
        world.attach(worker, plane)
        world.round_trip(worker)
        if worker is has:
            finish(world, ask(world, plane, tail))
    long, short = world.new_client([*range(100, 130)]), world.new_client([*range(60, 74)])
    world.send_together([long, short], plane)
    finish(world, long)
    finish(world, short)
    assert all(engine.core.live_entries() for engine in plane.cluster.fleet)
    plane.store.flush()
    world.kill_plane(plane)
    return other, has


def test_the_first_worker_that_is_back_gets_nothing_that_the_second_one_knows(
    world: World,
) -> None:
    other, has = first_life(world)
    plane = world.start_plane()
    client = ask(world, plane, 32)
    world.run(3.0)  # Nobody is there.
    world.attach(other, plane)
    world.round_trip(other)
    world.run(WAIT_S - 0.1)
    assert not is_placed(world, plane)
    world.attach(has, plane)
    world.round_trip(has)
    world.run(0.05)
    assert is_placed(world, plane)
    finish(world, client)
    assert num_hits(plane) == len(PREFIX)
    world.come_to_rest()


def test_who_is_not_back_in_time_is_not_waited_for(world: World) -> None:
    other, has = first_life(world)
    plane = world.start_plane()
    client = ask(world, plane, 32)
    world.attach(other, plane)
    world.round_trip(other)
    world.run(WAIT_S - 0.1)
    assert not is_placed(world, plane)
    world.run(0.15)
    assert is_placed(world, plane)
    finish(world, client)
    # Lost again, and back: placed at once.
    world.break_stream(other)
    late = ask(world, plane, 33)
    world.attach(other, plane)
    assert is_placed(world, plane)
    finish(world, late)
    world.attach(has, plane)
    world.come_to_rest()


def test_a_store_that_is_up_before_the_workers_are_is_heard(world: World) -> None:
    other, has = first_life(world)
    world.server.is_away = True
    plane = world.start_plane()
    client = ask(world, plane, 32)
    world.run(1.0)
    world.server.is_away = False
    world.run(0.3)
    world.attach(other, plane)
    world.round_trip(other)
    world.run(0.1)
    assert not is_placed(world, plane)
    world.attach(has, plane)
    world.round_trip(has)
    world.run(0.05)
    finish(world, client)
    assert num_hits(plane) == len(PREFIX)
    world.come_to_rest()


def test_a_store_that_is_away_makes_nobody_wait(world: World) -> None:
    other, _ = first_life(world)
    world.server.is_away = True
    plane = world.start_plane()
    client = ask(world, plane, 32)
    world.run(0.1)
    world.attach(other, plane)
    world.run(0.05)
    assert is_placed(world, plane)
    world.run(1.1)  # For its entries plans wait, as for those of any worker.
    finish(world, client)
    world.come_to_rest()


def test_a_store_that_takes_long_to_answer_makes_nobody_wait_longer(world: World) -> None:
    other, _ = first_life(world)
    world.server.delay_s = 5.0
    plane = world.start_plane()
    # Only that one question takes so long.
    world.server.delay_s = 0.0
    client = ask(world, plane, 32)
    world.attach(other, plane)
    world.round_trip(other)
    world.run(WAIT_S - 0.1)
    assert not is_placed(world, plane)
    world.run(0.15)
    assert is_placed(world, plane)
    finish(world, client)
    world.run(5.0)
    world.come_to_rest()


def test_who_leaves_or_is_sent_away_meanwhile_holds_nothing(world: World) -> None:
    other, _ = first_life(world)
    plane = world.start_plane()
    clients = [ask(world, plane, tail) for tail in (32, 33)]
    world.attach(other, plane)
    world.round_trip(other)
    assert not is_placed(world, plane)
    world.leave(clients[0])
    world.run()
    assert clients[0].is_over
    # A drain lets those go on that are in.
    world._call(plane.cluster.begin_drain)
    world.run(WAIT_S + 0.1)
    assert is_placed(world, plane)
    finish(world, clients[1])
    assert plane.cluster.stats().num_requests_live == 0
