"""The term of a control plane, and one that steps back from a higher one."""

from __future__ import annotations

import pytest
from cluster_harness import RawPeer, collect, hello, long_prompt, running_cluster, undisturbed

from control_plane.errors import ShuttingDownError
from control_plane.memory_prefix_store import MemoryPrefixStore


async def test_the_term_exceeds_the_store_and_the_first_hellos() -> None:
    store = MemoryPrefixStore()
    assert await store.next_term("0", 6) == 7
    async with running_cluster(store=store) as harness, RawPeer(harness.address) as peer:
        assert (await peer.attach(highest_term=3)).term == 8
    async with running_cluster() as harness, RawPeer(harness.address) as peer:
        assert (await peer.attach(highest_term=3)).term == 4


async def test_all_first_hellos_count_for_the_term() -> None:
    async with (
        # So that the second is in time on a busy machine too.
        running_cluster(term_gather_s=2.0) as harness,
        RawPeer(harness.address) as one,
        RawPeer(harness.address) as two,
    ):
        await one.say(hello(worker_id="one", replica_id="one", highest_term=1))
        await two.say(hello(worker_id="two", replica_id="two", highest_term=5))
        assert (await one.hear()).welcome.term == 6
        assert (await two.hear()).welcome.term == 6


async def test_a_higher_term_makes_it_step_back() -> None:
    async with running_cluster() as harness, harness.worker() as worker:
        await harness.ready()
        worker.runner.gate.clear()
        request = harness.request(long_prompt(0), max_tokens=24)
        stream = harness.cluster.submit(request)
        async with RawPeer(harness.address) as peer:
            await peer.say(hello(highest_term=99))
            _, reason, _ = await peer.end()
            assert reason == "HIGHER_TERM_SEEN"
        await harness.cluster.superseded()
        with pytest.raises(ShuttingDownError):
            harness.cluster.submit(harness.request([10]))
        worker.runner.gate.set()
        assert await collect(stream) == undisturbed(request)
        assert harness.cluster.stats().term == 1


async def test_who_starts_after_one_that_stepped_back_is_above_what_made_it_step_back() -> None:
    store = MemoryPrefixStore()
    async with (
        running_cluster(store=store) as harness,
        RawPeer(harness.address) as new_worker,
        RawPeer(harness.address) as old_worker,
    ):
        # A new worker is first, and the store has no counter: it was wiped.
        assert (await new_worker.attach(worker_id="new", replica_id="new")).term == 1
        await old_worker.say(hello(highest_term=50))
        _, reason, _ = await old_worker.end()
        assert reason == "HIGHER_TERM_SEEN"
    async with (
        running_cluster(store=store) as harness,
        RawPeer(harness.address) as new_worker,
        RawPeer(harness.address) as old_worker,
    ):
        assert (await new_worker.attach(worker_id="new", replica_id="new")).term == 51
        assert (await old_worker.attach(highest_term=50)).term == 51
