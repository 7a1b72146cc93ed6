"""The interleavings in which a block could be taken for something else, one by one.

Each of them is among what the machine of `test_cluster_world.py` does at random; here they are
spelled out, on the same world.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from cluster_world import World
from world_steps import (
    PREFIX,
    client_of,
    core_of,
    finish,
    lose_plan,
    ordered,
    start,
    two_with_one_prefix,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def world() -> Iterator[World]:
    world = World(num_blocks=20, max_num_seqs=2, lookahead=2)
    yield world
    world.close()


def test_a_block_that_a_lost_plan_handed_out_is_still_what_it_was(world: World) -> None:
    """The control plane forgot its content at the hand-out; the store and the worker did not."""
    plane, worker = start(world)
    first = client_of(world, plane, [*PREFIX, 30])
    finish(world, first)
    plane.store.flush()
    stored = core_of(plane).live_entries()
    # They need every block: what is cached is handed out again, by plans that never arrive.
    greedy = [world.new_client([*range(first, first + 35)]) for first in (100, 200)]
    world.send_together(greedy, plane)
    handed_out = {
        block_id
        for plan in ordered(worker)
        for row in plan.added_rows
        for block_id in memoryview(row.block_ids).cast("i")
    }
    assert handed_out & set(stored)
    assert core_of(plane).live_entries() != stored
    world.kill_plane(plane)
    # Who comes next believes the worker: those blocks were not handed out.
    after = world.start_plane()
    world.attach(worker, after)
    world.round_trip(worker)
    assert core_of(after).live_entries() == stored
    again = client_of(world, after, [*PREFIX, 31])
    finish(world, again)
    assert core_of(after).scheduler.num_prefix_hits == len(PREFIX)
    world.come_to_rest()


def test_a_block_that_was_handed_out_after_the_store_heard_of_it_is_refused(world: World) -> None:
    """The store is behind: it names what the block held before the last plans."""
    plane, worker = start(world)
    finish(world, client_of(world, plane, [*PREFIX, 30]))
    plane.store.flush()
    # Two long requests overwrite every block there is; the store does not hear of it.
    for first in (100, 200):
        finish(world, client_of(world, plane, [*range(first, first + 40)]))
    assert {i for i, g in enumerate(worker.runner.generations) if g} == set(range(1, 20))
    world.kill_plane(plane)
    after = world.start_plane()
    world.attach(worker, after)
    world.round_trip(worker)
    assert core_of(after).live_entries() == {}
    assert core_of(after).counters.refused_entries > 0
    finish(world, client_of(world, after, [*PREFIX, 31]))
    world.come_to_rest()


def test_a_generation_equal_to_a_stale_entrys_does_not_bring_it_back(world: World) -> None:
    """A new process under the same id counts its versions from the beginning."""
    plane, worker = start(world)
    finish(world, client_of(world, plane, [*PREFIX, 30]))
    plane.store.flush()
    old_generations = worker.runner.generations.tolist()
    world.crash(worker)
    world.attach(worker, plane)
    world.round_trip(worker)
    # As many tokens, other ones: the same blocks by the same versions.
    finish(world, client_of(world, plane, [*range(100, 112), 130]))
    assert worker.runner.generations.tolist()[:4] == old_generations[:4]
    world.kill_plane(plane)
    after = world.start_plane()
    world.attach(worker, after)
    world.round_trip(worker)
    world.check()
    finish(world, client_of(world, after, [*PREFIX, 31]))
    assert core_of(after).scheduler.num_prefix_hits == 0
    world.come_to_rest()


def test_nobody_hits_a_pending_block_whose_plan_was_lost(world: World) -> None:
    """The second request was scheduled onto blocks that the first one never computed."""
    plane, worker = start(world)
    first, second = two_with_one_prefix(world, plane)
    plans = ordered(worker)
    hit = [row for plan in plans for row in plan.added_rows if row.num_hit_blocks]
    assert [row.num_hit_blocks for row in hit] == [3]
    lose_plan(worker, plans[0])
    world.round_trip(worker)
    core = core_of(plane)
    assert core.counters.num_nacks == 1
    for name in core.live_entries().values():
        assert name[1] > plans[-1].version
    finish(world, first)
    finish(world, second)
    assert first.received == first.expected
    assert second.received == second.expected
    world.come_to_rest()


def test_nobody_hits_a_pending_block_whose_step_failed(world: World) -> None:
    plane, worker = start(world)
    first, second = two_with_one_prefix(world, plane)
    plans = ordered(worker)
    assert any(row.num_hit_blocks for plan in plans for row in plan.added_rows)
    worker.runner.fail_launch.add(plans[0].version)
    world.round_trip(worker)
    assert core_of(plane).counters.num_step_failures == 1
    assert core_of(plane).live_entries() == {}
    finish(world, first)
    finish(world, second)
    world.come_to_rest()


def test_what_an_old_control_plane_writes_late_is_refused() -> None:
    """What it had confirmed, while its successor has used the blocks for something else."""
    world = World(num_blocks=12, max_num_seqs=2)
    try:
        old, worker = start(world)
        finish(world, client_of(world, old, [*PREFIX, 30]))
        world.cut_plane(old)
        new = world.start_plane()
        world.attach(worker, new)
        world.round_trip(worker)
        for first in (100, 200):
            finish(world, client_of(world, new, [*range(first, first + 36)]))
        new.store.flush()
        old.store.flush()
        world.kill_plane(new)
        third = world.start_plane()
        world.attach(worker, third)
        world.round_trip(worker)
        world.check()
        finish(world, client_of(world, third, [*PREFIX, 31]))
        assert core_of(third).scheduler.num_prefix_hits == 0
        world.come_to_rest()
    finally:
        world.close()


def test_a_worker_that_served_a_successor_makes_the_old_control_plane_step_back() -> None:
    world = World(num_workers=2)
    try:
        old = world.start_plane()
        for worker in world.workers:
            world.attach(worker, old)
        client = client_of(world, old, [*PREFIX, 30], max_tokens=20)
        for worker in world.workers:
            world.round_trip(worker)
        new = world.start_plane()
        moved = world.workers[1]
        world.break_stream(moved)
        world.attach(moved, new)
        world.round_trip(moved)
        assert moved.protocol.highest_term == 2
        world.break_stream(moved)
        world.attach(moved, old)
        assert old.has_stepped_back
        # What it serves it serves to the end.
        finish(world, client)
        assert client.reason is not None
        world.come_to_rest()
    finally:
        world.close()


def test_a_store_that_answers_late_does_not_name_blocks_that_were_handed_out_meanwhile(
    world: World,
) -> None:
    plane, worker = start(world)
    finish(world, client_of(world, plane, [*PREFIX, 30]))
    plane.store.flush()
    stored = core_of(plane).live_entries()
    world.kill_plane(plane)
    world.server.delay_s = 2.0
    after = world.start_plane()
    world.attach(worker, after)
    world.run(2.1)  # The term.
    core = core_of(after)
    world.deliver_down(worker)
    world.deliver_up(worker)
    assert core.held_until > world.loop.time()
    world.run(1.1)  # The wait for the store, which goes on.
    assert core.held_until < world.loop.time()
    # Every block is handed out; the last of each table is never filled, hence has no name.
    for size in (37, 33):
        client = world.new_client([*range(100 + size, 100 + 2 * size)], max_tokens=1)
        world.send(client, after)
        for _ in range(8):
            world.round_trip(worker)
        assert client.is_over
    unnamed = set(stored) - set(core.live_entries())
    assert unnamed
    world.run(2.0)
    assert core.counters.refused_entries > 0
    assert not unnamed & set(core.live_entries())
    world.check()
    finish(world, client_of(world, after, [*PREFIX, 31]))
    world.come_to_rest()


@pytest.mark.parametrize("generations_come", [True, False])
def test_an_index_kept_over_a_lost_stream_is_not_taken_on_trust(generations_come: bool) -> None:
    """Another control plane of the same term had the worker meanwhile."""
    world = World(num_workers=2, num_blocks=12, max_num_seqs=2)
    try:
        old = world.start_plane()
        worker, other = world.workers
        world.attach(worker, old)
        world.round_trip(worker)
        finish(world, client_of(world, old, [*PREFIX, 30]))
        kept = core_of(old).live_entries()
        assert kept
        world.server.is_away = True
        new = world.start_plane()
        world.attach(other, new)
        assert new.cluster.stats().term == old.cluster.stats().term
        world.break_stream(worker)
        world.crash(other)
        world.attach(worker, new)
        world.round_trip(worker)
        world.run(1.1)  # For a store that is away nobody waits longer.
        for first in (100, 200):
            client = world.new_client([*range(first, first + 36)])
            world.send(client, new)
            for _ in range(40):
                world.round_trip(worker)
            assert client.is_over
        world.break_stream(worker)
        world.attach(worker, old)
        client = world.new_client([*PREFIX, 31])
        world.send(client, old)
        if not generations_come:
            world.deliver_down(worker)
            world.run(1.1)
            assert len(ordered(worker)) > 0
        finish(world, client)
        assert core_of(old).counters.refused_entries == len(kept)
        assert core_of(old).scheduler.num_prefix_hits == 0
        world.come_to_rest()
    finally:
        world.close()


def test_stored_values_that_changed_places_are_refused(world: World) -> None:
    """Blocks of one plan have one generation: only the checksum tells whose a value is."""
    plane, worker = start(world)
    finish(world, client_of(world, plane, [*PREFIX, 30]))
    plane.store.flush()
    generations = {generation for _, generation in core_of(plane).live_entries().values()}
    assert len(generations) < len(core_of(plane).live_entries())
    world.server.damage("swapped", 0, 1)
    world.kill_plane(plane)
    after = world.start_plane()
    world.attach(worker, after)
    world.round_trip(worker)
    world.check()
    finish(world, client_of(world, after, [*PREFIX, 31]))
    assert core_of(after).scheduler.num_prefix_hits == 0
    world.come_to_rest()
