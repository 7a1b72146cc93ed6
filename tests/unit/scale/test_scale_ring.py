"""Consistent hashing with spill: who has which key."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.benchmarks.scale.ring import Ring, hash64
from tests.benchmarks.scale.scenarios import moved_keys

KEYS = [hash64(i.to_bytes(8, "big")) for i in range(20_000)]


def ring(*members: int, weights: dict[int, float] | None = None) -> Ring:
    made = Ring()
    for member in members:
        made.add(member, (weights or {}).get(member, 1.0))
    return made


def owners(of: Ring) -> list[int]:
    return [of.owner(key) for key in KEYS]


def test_every_member_has_about_its_share() -> None:
    counts = Counter(owners(ring(*range(8))))
    assert set(counts) == set(range(8))
    assert max(counts.values()) < 1.25 * len(KEYS) / 8


def test_shares_follow_weights() -> None:
    counts = Counter(owners(ring(0, 1, weights={0: 3.0})))
    assert counts[0] / counts[1] == pytest.approx(3, rel=0.15)


def test_a_member_that_goes_moves_its_own_keys_only() -> None:
    of = ring(*range(6))
    before = owners(of)
    of.remove(2)
    after = owners(of)
    assert all(now == was for now, was in zip(after, before, strict=True) if was != 2)
    assert 2 not in after
    # They go to everybody, not to one neighbour.
    assert {now for now, was in zip(after, before, strict=True) if was == 2} == {0, 1, 3, 4, 5}


def test_a_member_that_comes_takes_keys_and_moves_no_other() -> None:
    of = ring(*range(6))
    before = owners(of)
    of.add(6)
    moved = [now for now, was in zip(owners(of), before, strict=True) if now != was]
    assert set(moved) == {6}
    assert len(moved) / len(KEYS) == pytest.approx(1 / 7, rel=0.25)


def test_order_of_joining_does_not_matter() -> None:
    assert owners(ring(0, 1, 2, 3)) == owners(ring(3, 1, 0, 2))


def test_walk_gives_everybody_once_from_the_owner_on() -> None:
    of = ring(*range(5))
    for key in KEYS[:50]:
        walked = list(of.walk(key))
        assert walked[0] == of.owner(key)
        assert sorted(walked) == list(range(5))


def test_a_full_owner_is_passed_by_and_everybody_full_means_the_owner() -> None:
    of = ring(*range(5))
    for key in KEYS[:50]:
        first, second = list(of.walk(key))[:2]
        assert of.place(key, lambda member: True) == first
        assert of.place(key, lambda member, full=first: member != full) == second
        assert of.place(key, lambda member: False) == first


def test_moved_keys_are_one_share() -> None:
    moved = moved_keys(4, num_keys=20_000)
    assert moved["moved_when_one_dies"] == pytest.approx(1 / 4, rel=0.2)
    assert moved["moved_when_one_joins"] == pytest.approx(1 / 5, rel=0.2)
