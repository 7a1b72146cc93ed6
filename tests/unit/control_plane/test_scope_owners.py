from __future__ import annotations

from cluster_harness import FINGERPRINT, hello

from control_plane.memory_prefix_store import MemoryPrefixStore
from control_plane.prefix_store import PrefixScope
from control_plane.replica import read_hello, replica_epoch
from control_plane.scope_owners import ScopeOwners


class Owners:
    """Owners over a store in memory, in which every scope that attached has an entry."""

    def __init__(self) -> None:
        self.store = MemoryPrefixStore()
        self.owners = ScopeOwners(self.store)

    def take(self, worker: str, epoch: int, replica: str | None = None) -> PrefixScope:
        message = hello(
            worker_id=worker, replica_id=replica or f"replica-{worker}", epoch=bytes([epoch]) * 16
        )
        facts = read_hello(message.hello, peer="test")
        scope = PrefixScope("default", FINGERPRINT, replica_epoch([facts]))
        self.owners.take(scope, facts)
        self.store.record(scope, {1: (bytes(32), 1)})  # type: ignore[dict-item]
        return scope

    async def known(self) -> set[PrefixScope]:
        return set(await self.store.known_scopes("default", [FINGERPRINT]))


async def test_a_worker_that_comes_back_with_its_memory_keeps_it() -> None:
    one = Owners()
    a = one.take("w0", 1)
    assert one.take("w0", 1) == a
    assert await one.known() == {a}


async def test_another_memory_under_the_same_names_is_the_end_of_the_first() -> None:
    one = Owners()
    a, other = one.take("w0", 1), one.take("w1", 2)
    b = one.take("w0", 3)
    assert a != b
    assert await one.known() == {b, other}


async def test_the_worker_s_name_is_enough() -> None:
    one = Owners()
    one.take("w0", 1, replica="r0")
    b = one.take("w0", 2, replica="r1")
    c = one.take("w2", 3, replica="r0")
    assert await one.known() == {b, c}


async def test_the_replica_s_name_is_enough() -> None:
    one = Owners()
    one.take("w0-first", 1, replica="r0")
    b = one.take("w0-second", 2, replica="r0")
    assert await one.known() == {b}


async def test_what_two_names_stood_for_ends_when_one_worker_takes_both() -> None:
    one = Owners()
    one.take("w0", 1, replica="r0")
    one.take("w1", 2, replica="r1")
    c = one.take("w0", 3, replica="r1")
    assert await one.known() == {c}


async def test_a_memory_that_was_thought_gone_counts_again_when_it_is_back() -> None:
    one = Owners()
    a = one.take("w0", 1)
    one.take("w0", 2)
    assert one.take("w0", 1) == a
    assert await one.known() == {a}


async def test_a_worker_that_leaves_takes_its_memory_with_it() -> None:
    one = Owners()
    one.take("w0", 1)
    other = one.take("w1", 2)
    one.owners.leave("replica-w0")
    one.owners.leave("replica-w0")
    one.owners.leave("replica-unknown")
    assert await one.known() == {other}


async def test_names_are_not_kept_for_ever() -> None:
    one = Owners()
    kept = [one.take(f"w{number}", 1) for number in range(5000)]
    assert len(one.owners._scopes) == 8192
    assert await one.known() <= set(kept)
    assert one.take("w4999", 1) == kept[-1]
    one.take("w4999", 2)
    assert kept[-1] not in set(one.store._scopes)
