"""Messages that come late, twice, or over a stream that has ended, one by one.

Each of them is among what the machine of `test_cluster_world.py` does at random; here they are
spelled out, on the same world.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from cluster_world import World
from world_steps import PREFIX, client_of, core_of, finish, lose_plan, ordered, start

from protos.pagewire.v1 import worker_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def world() -> Iterator[World]:
    world = World(num_blocks=20, max_num_seqs=2, lookahead=2)
    yield world
    world.close()


def test_a_result_of_an_older_plan_is_not_taken_for_the_rows_next_sequence(world: World) -> None:
    plane, worker = start(world)
    leaves = client_of(world, plane, [*PREFIX, 30], max_tokens=20)
    world.round_trip(worker)
    world.round_trip(worker)
    # Three steps of it are out; nothing of them has come back.
    world.deliver_down(worker)
    world.run_steps(worker)
    num_received = len(leaves.received)
    world.leave(leaves)
    comes = client_of(world, plane, [*range(100, 113)], max_tokens=20)
    world.deliver_up(worker, 1)
    [plan] = ordered(worker)
    # Its row goes to another sequence before the other results are here.
    assert bytes(plan.removed_rows) == bytes(4)
    assert [row.row for row in plan.added_rows] == [0]
    world.deliver_up(worker)
    assert comes.received == []
    assert len(leaves.received) == num_received
    finish(world, comes)
    assert comes.reason is not None
    world.come_to_rest()


def test_two_nacks_behind_one_are_answered_once(world: World) -> None:
    plane, worker = start(world)
    client = client_of(world, plane, [*PREFIX, 30], max_tokens=20)
    world.round_trip(worker)
    plans = ordered(worker)
    assert len(plans) == 3
    lose_plan(worker, plans[0])
    core, connection = core_of(plane), worker.connection
    assert connection is not None
    num_resets = core.counters.num_resets
    world.deliver_down(worker)
    [nack] = connection.to_control
    assert nack.nack.version == plans[1].version
    # A worker that refuses every plan behind the lost one, and says the first refusal twice.
    for version in (plans[1].version, plans[2].version):
        connection.to_control.append(worker_pb2.WorkerMessage(nack={"version": version}))
    world.deliver_up(worker)
    assert core.counters.num_resets == num_resets + 1
    assert core.counters.num_nacks == 1
    assert core.attached
    finish(world, client)
    world.come_to_rest()


def test_what_comes_over_a_stream_that_has_ended_counts_for_nothing(world: World) -> None:
    """The lease ran out over a half-open connection; the worker's results are read afterwards."""
    plane, worker = start(world)
    client = client_of(world, plane, [*PREFIX, 30], max_tokens=12)
    world.round_trip(worker)
    world.deliver_down(worker)
    world.run_steps(worker)
    old = worker.connection
    assert old is not None
    assert old.to_control
    late = list(old.to_control)
    received = list(client.received)
    world.wait(10.0, heartbeats=False)
    assert old.is_ended
    world.deliver_up(worker)
    assert client.received == received
    assert old.engine is not None
    # Nor do they over the next stream, whose Reset is above them.
    world.deliver_down(worker)
    world.attach(worker, plane)
    world.deliver_down(worker)
    assert worker.connection is not None
    drain = worker_pb2.WorkerMessage(drain=worker_pb2.Drain())
    world._call(plane.cluster.fleet.receive, old.engine, old, drain)
    assert plane.cluster.num_ready("fake") == 1
    worker.connection.to_control.extend(late)
    num_resets = core_of(plane).counters.num_resets
    world.deliver_up(worker)
    assert client.received == received
    assert core_of(plane).counters.num_resets == num_resets
    finish(world, client)
    assert client.received == client.expected
    world.come_to_rest()


def test_a_failure_that_is_reported_twice_is_held_against_a_request_once(world: World) -> None:
    plane, worker = start(world)
    client = client_of(world, plane, [*PREFIX, 30], max_tokens=12)
    worker.runner.fail_launch.add(ordered(worker)[0].version)
    world.deliver_down(worker)
    world.run_steps(worker)
    connection = worker.connection
    assert connection is not None
    [failed] = connection.to_control
    connection.to_control.extend([failed, failed])
    world.deliver_up(worker)
    core = core_of(plane)
    assert core.attached
    assert core.counters.num_step_failures == 1
    assert client.request is not None
    assert client.request.num_losses == 1
    finish(world, client)
    assert client.received == client.expected
    world.come_to_rest()


def test_a_failure_of_a_plan_that_was_never_sent_is_held_against_nobody(world: World) -> None:
    plane, worker = start(world)
    client = client_of(world, plane, [*PREFIX, 30], max_tokens=12)
    world.round_trip(worker)
    core = core_of(plane)
    failed = worker_pb2.StepFailed(version=core.sent_version + 1)
    assert worker.connection is not None
    num_resets = core.counters.num_resets
    worker.connection.to_control.append(worker_pb2.WorkerMessage(step_failed=failed))
    world.deliver_up(worker)
    assert core.counters.num_resets == num_resets + 1
    assert client.request is not None
    assert client.request.num_losses == 0
    finish(world, client)
    assert client.received == client.expected
    world.come_to_rest()
