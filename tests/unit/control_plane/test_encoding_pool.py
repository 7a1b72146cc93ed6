"""Long inputs: off the event loop, bounded, and nobody waits long for somebody else's megabytes."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from control_plane.encoding_pool import EncodingPool
from control_plane.errors import OverloadedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHORT, LONG = 10_000, 1_000_000


@pytest.fixture
def pool() -> Iterator[EncodingPool]:
    pool = EncodingPool()
    yield pool
    pool.close()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What the work of these tests waits for."""
    gate = threading.Event()
    yield gate
    gate.set()


def started(
    pool: EncodingPool, num_chars: int, work: Callable[[], object], tenant: str = ""
) -> asyncio.Task[object]:
    return asyncio.create_task(pool.run(num_chars, work, tenant=tenant))


async def test_long_inputs_are_encoded_off_the_event_loop(pool: EncodingPool) -> None:
    threads = [await pool.run(size, threading.current_thread) for size in (10, 100_000)]
    assert threads[0] is threading.current_thread()
    assert threads[1] is not threading.current_thread()


async def test_what_work_raises_comes_back(pool: EncodingPool) -> None:
    with pytest.raises(ZeroDivisionError):
        await pool.run(LONG, lambda: 1 // 0)
    assert await pool.run(LONG, lambda: 5) == 5


async def test_what_waits_for_the_pool_is_bounded(gate: threading.Event) -> None:
    pool = EncodingPool(max_pending_chars=10_000)
    first = started(pool, 9_000, gate.wait)
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError) as error:
        await pool.run(3_000, gate.wait)
    assert error.value.retry_after_s is not None
    assert error.value.metadata["limit"] == "10000"
    gate.set()
    await first
    assert await pool.run(9_000, lambda: 5) == 5
    pool.close()


async def test_half_of_the_room_is_left_to_others(gate: threading.Event) -> None:
    pool = EncodingPool(max_pending_chars=20_000)
    first = started(pool, 9_000, gate.wait, "alice")
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError) as error:
        await pool.run(3_000, gate.wait, tenant="alice")
    assert error.value.metadata["limit"] == "10000"
    second = started(pool, 9_000, gate.wait, "bob")
    gate.set()
    await asyncio.gather(first, second)
    pool.close()


async def test_a_cancelled_encoding_counts_until_its_thread_is_done(gate: threading.Event) -> None:
    pool = EncodingPool(max_pending_chars=10_000)
    began, loop = asyncio.Event(), asyncio.get_running_loop()

    def work() -> None:
        loop.call_soon_threadsafe(began.set)
        gate.wait()

    task = started(pool, 9_000, work)
    await began.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    with pytest.raises(OverloadedError):
        await pool.run(9_000, work)
    gate.set()
    pool.close()


async def test_a_cancelled_encoding_that_only_waited_counts_no_more(gate: threading.Event) -> None:
    pool = EncodingPool(max_pending_chars=3 * LONG)
    running = started(pool, LONG, gate.wait, "alice")
    waiting = started(pool, LONG, gate.wait, "bob")
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    again = started(pool, 2 * LONG, lambda: 5, "carol")
    await asyncio.sleep(0)
    assert not again.done()
    gate.set()
    assert await again == 5
    await running
    pool.close()


async def test_short_inputs_pass_by_long_ones(pool: EncodingPool, gate: threading.Event) -> None:
    long = [started(pool, LONG, gate.wait) for _ in range(5)]
    await asyncio.sleep(0)
    # They would wait for ever.
    assert [await pool.run(SHORT, lambda i=i: i) for i in range(5)] == list(range(5))
    gate.set()
    await asyncio.gather(*long)


async def test_long_inputs_get_a_thread_whatever_else_comes(
    pool: EncodingPool, gate: threading.Event
) -> None:
    short = [started(pool, SHORT, gate.wait) for _ in range(2)]
    await asyncio.sleep(0)
    order: list[str] = []
    more = [started(pool, SHORT, lambda: order.append("short")) for _ in range(5)]
    long = started(pool, LONG, lambda: order.append("long"))
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*short, *more, long)
    assert "long" in order[:2]


async def test_tenants_take_turns(pool: EncodingPool, gate: threading.Event) -> None:
    first = started(pool, LONG, gate.wait, "alice")
    await asyncio.sleep(0)
    order: list[str] = []
    rest = [
        started(pool, LONG, lambda tenant=tenant: order.append(tenant), tenant)
        for tenant in ("alice", "alice", "alice", "bob", "carol", "bob")
    ]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(first, *rest)
    assert order == ["alice", "bob", "carol", "alice", "bob", "alice"]
