from __future__ import annotations

import pytest

from control_plane.placement_gate import Comeback

A, B, C = (bytes([i]) * 32 for i in range(3))


def comeback(*known: bytes, wait_s: float = 1.5) -> Comeback:
    one = Comeback(wait_s)
    one.know(known)
    return one


def test_requests_wait_from_the_first_hello_until_all_known_replicas_are_back():
    one = comeback(A, B)
    assert not one.holds
    one.greet(10.0, has_served=True)
    assert one.holds
    one.look(10.1, [A, C])
    assert one.holds
    assert one.missing == {B}
    one.look(10.2, [C])  # A is lost again; it was back.
    one.look(10.3, [B])
    assert not one.holds
    assert one.is_over


def test_they_wait_no_longer_than_the_limit():
    one = comeback(A, B)
    one.greet(10.0, has_served=True)
    one.greet(11.0, has_served=True)
    one.look(11.49, [A])
    assert one.holds
    one.look(11.5, [A])
    assert not one.holds
    assert one.missing == {B}


def test_it_never_begins_again():
    one = comeback(A, B)
    one.greet(10.0, has_served=True)
    one.look(10.1, [A, B])
    one.know([A, B, C])
    one.greet(10.2, has_served=True)
    one.look(10.2, [A])
    assert not one.holds


def test_a_cold_start_holds_nothing():
    one = comeback(A, B)
    one.greet(10.0, has_served=False)
    one.look(10.1, [C])
    assert not one.holds


def test_a_worker_that_served_before_holds_even_behind_a_new_one():
    one = comeback(A, B)
    one.greet(10.0, has_served=False)
    one.greet(10.6, has_served=True)
    assert one.holds
    one.look(11.5, [A])
    assert not one.holds


def test_a_worker_that_comes_back_late_holds_nothing():
    one = comeback(A, B)
    one.greet(10.0, has_served=False)
    one.greet(11.6, has_served=True)
    assert not one.holds
    one.look(11.7, [])
    assert not one.holds


def test_as_long_as_the_store_has_not_answered_there_may_be_others():
    one = Comeback(1.5)
    one.greet(10.0, has_served=True)
    one.look(10.1, [A])
    assert one.holds
    one.know([A])
    one.look(10.2, [])
    assert not one.holds


@pytest.mark.parametrize("known", [(), (A,)])
def test_who_is_known_and_there_is_not_waited_for(known: tuple[bytes, ...]):
    one = comeback(*known)
    one.greet(10.0, has_served=True)
    one.look(10.0, [A])
    assert not one.holds


def test_a_wait_of_zero_holds_nothing():
    one = comeback(A, wait_s=0.0)
    one.greet(10.0, has_served=True)
    assert not one.holds
