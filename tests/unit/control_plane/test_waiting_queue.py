from __future__ import annotations

import random

import pytest

from control_plane.errors import InvariantError
from control_plane.request import Request, SamplingParams
from control_plane.waiting_queue import WaitingQueue


def new_request(arrival: int, tenant: str = "", priority: int = 0) -> Request:
    return Request(
        req_id=f"{tenant}{arrival}",
        prompt_token_ids=[1],
        sampling=SamplingParams(),
        seed=0,
        max_total_tokens=9,
        arrival=arrival,
        tenant=tenant,
        priority=priority,
    )


def queue_of(*requests: Request) -> WaitingQueue:
    queue = WaitingQueue()
    for request in requests:
        queue.push(request, has_started=False)
    return queue


def admit_all(queue: WaitingQueue) -> list[str]:
    admitted: list[str] = []
    while queue:
        request = next(iter(queue))
        queue.admit(request)
        admitted.append(request.req_id)
    return admitted


def test_higher_priority_comes_first():
    queue = queue_of(new_request(0), new_request(1, priority=2), new_request(2, priority=1))
    assert admit_all(queue) == ["1", "2", "0"]


def test_tenants_take_turns_and_arrival_decides_within_one():
    requests = [new_request(i, tenant) for i, tenant in enumerate("aaabbc")]
    assert admit_all(queue_of(*requests)) == ["a0", "b3", "c5", "a1", "b4", "a2"]


def test_iteration_is_the_order_of_admission():
    requests = [new_request(i, tenant) for i, tenant in enumerate("abbaacb")]
    queue = queue_of(*requests)
    order = [request.req_id for request in queue]
    assert order == admit_all(queue)


def test_admitting_while_iterating_skips_nobody():
    requests = [new_request(i, tenant) for i, tenant in enumerate("aaabbc")]
    queue = queue_of(*requests)
    seen: list[str] = []
    for request in queue:
        seen.append(request.req_id)
        if request.arrival % 2 == 0:
            queue.admit(request)
    assert sorted(seen) == sorted(request.req_id for request in requests)
    # The turn that b4 took counts, although b3 was passed by.
    assert [request.arrival for request in queue] == [5, 3, 1]


def test_a_turn_is_remembered_between_admissions():
    queue = queue_of(new_request(0, "a"), new_request(1, "a"), new_request(2, "b"))
    queue.admit(next(iter(queue)))
    assert admit_all(queue) == ["b2", "a1"]


def test_who_had_a_row_comes_before_new_ones_of_its_priority_and_takes_no_turn():
    queue = queue_of(new_request(0, "a"), new_request(1, "b"), new_request(9, "a", priority=1))
    for arrival in (7, 5):
        queue.push(new_request(arrival, "a"), has_started=True)
    assert admit_all(queue) == ["a9", "a5", "a7", "a0", "b1"]


def test_removed_requests_leave_no_trace():
    requests = [new_request(i, tenant) for i, tenant in enumerate("aab")]
    queue = queue_of(*requests)
    for request in requests:
        queue.remove(request)
        assert request not in queue
    assert len(queue) == 0
    assert list(queue) == []
    queue.push(requests[0], has_started=False)
    with pytest.raises(InvariantError, match="waits already"):
        queue.push(requests[0], has_started=False)


def test_a_new_request_knows_how_many_come_before_it():
    rng = random.Random(0)
    for _ in range(200):
        queue = WaitingQueue()
        for arrival in range(rng.randrange(20)):
            request = new_request(arrival, rng.choice("abcd"), rng.randrange(3))
            queue.push(request, has_started=rng.random() < 0.2)
        newcomer = new_request(100, rng.choice("abcde"), rng.randrange(3))
        expected = queue.count_ahead(newcomer)
        queue.push(newcomer, has_started=False)
        # Who is next to take a turn among tenants is not looked at.
        assert 0 <= expected - list(queue).index(newcomer) <= 3


def test_a_tenant_with_a_long_queue_does_not_make_others_wait_for_it():
    queue = queue_of(*(new_request(i, "busy") for i in range(50)))
    assert queue.count_ahead(new_request(60, "busy")) == 50
    assert queue.count_ahead(new_request(60, "other")) == 1
    assert queue.count_ahead(new_request(60, "other", priority=1)) == 0
