"""The arithmetic of `make bench-first-token`, and that what it traces is still there."""

from __future__ import annotations

import importlib

import pytest

from tests.benchmarks import bench_first_token as bench
from tests.benchmarks import traced_process


def test_every_traced_method_exists() -> None:
    for points in traced_process.POINTS.values():
        for point in points:
            owner: object = importlib.import_module(point.module)
            for name in point.method.split("."):
                owner = getattr(owner, name)
            assert callable(owner)


def test_every_place_ends_a_hop() -> None:
    traced = {point.name for points in traced_process.POINTS.values() for point in points}
    assert {name for name, _ in bench.HOPS} == traced | {"first"}


def test_hops_are_medians_and_add_up() -> None:
    places = [name for name, _ in bench.HOPS]
    requests = [
        {"sent": start, "end": 10**9}
        | {name: start + slowness * (i + 1) * 1_000_000 for i, name in enumerate(places)}
        for start, slowness in ((0, 1), (5_000, 3), (7_000, 2))
    ]
    assert bench.hops_ms(requests) == pytest.approx([2.0] * len(places))
    assert bench.total_ms(requests) == pytest.approx(2.0 * len(places))
    assert bench.added_ms(requests) == pytest.approx(2.0 * (len(places) - 1))


def test_a_place_counts_when_the_request_first_passes_it() -> None:
    notes = [[90, "read"], [140, "read"], [110, "read"], [120, "built"], [210, "submitted"]]
    times = {"sent": 100, "first": 150, "end": 200}
    assert bench.with_notes(times, notes) == times | {"read": 110, "built": 120}


async def test_wrapped_methods_note_calls_or_their_ends_and_only_those_that_count() -> None:
    class Plane:
        def take(self, value: int) -> int:
            noted.append(f"take {value}")
            return value

        async def wait(self, value: int) -> int:
            noted.append(f"wait {value}")
            return value

    def is_even(arguments: tuple[object, ...]) -> bool:
        return arguments[1] in (0, 2)

    noted: list[str] = []
    for method, is_end in (("take", False), ("wait", True)):
        point = traced_process.Point(method, "", "", is_end=is_end, counts=is_even)
        wrapped = traced_process._wrapped(getattr(Plane, method), point, noted.append)
        setattr(Plane, method, wrapped)
    plane = Plane()
    assert [plane.take(2), plane.take(1)] == [2, 1]
    assert [await plane.wait(2), await plane.wait(1)] == [2, 1]
    assert noted == ["take", "take 2", "take 1", "wait 2", "wait", "wait 1"]
