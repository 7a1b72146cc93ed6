"""Threads that encode and decode long inputs, shared fairly.

Encoding megabytes takes many seconds. Nobody's tokens wait for that, nor does anybody else's
prompt: tenants take turns, one that is ahead of others is refused first, and one thread never takes
more than a fraction of a second's work.

Owns: who is next. Does not know: tokenizers.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from control_plane.errors import OverloadedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

_T = TypeVar("_T")

# About a millisecond of encoding: what the event loop can afford, and cheaper than a thread switch.
_INLINE_CHARS = 2048
# Some tenths of a second.
_SHORT_CHARS = 1 << 16
_NUM_THREADS = 2


@dataclass(eq=False, slots=True)
class _Job:
    tenant: str
    num_chars: int
    work: Callable[[], Any]
    result: asyncio.Future[Any]

    @property
    def is_long(self) -> bool:
        return self.num_chars > _SHORT_CHARS


class _Turns:
    """Jobs of one kind, round robin over tenants."""

    def __init__(self) -> None:
        # Who is first has waited longest for its turn. No queue is empty.
        self._tenants: OrderedDict[str, deque[_Job]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def push(self, job: _Job) -> None:
        self._tenants.setdefault(job.tenant, deque()).append(job)

    def pop(self) -> _Job:
        tenant, jobs = next(iter(self._tenants.items()))
        job = jobs.popleft()
        if jobs:
            self._tenants.move_to_end(tenant)
        else:
            del self._tenants[tenant]
        return job

    def remove(self, job: _Job) -> bool:
        """Whether it was still waiting."""
        jobs = self._tenants.get(job.tenant, ())
        if job not in jobs:
            return False
        self._tenants[job.tenant].remove(job)
        if not self._tenants[job.tenant]:
            del self._tenants[job.tenant]
        return True


class EncodingPool:
    """Two threads, one of them for short inputs only, and the bound on what waits for them.

    One per process, used on one event loop.
    """

    def __init__(self, *, max_pending_chars: int = 64 << 20) -> None:
        """Start no thread yet.

        Args:
            max_pending_chars: Input accepted and not encoded yet, before more is refused; half of
                it for a single tenant, which may always have one input though.
        """
        self._executor = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="encode")
        self._max_pending_chars = max_pending_chars
        self._pending_chars = 0
        self._pending_by_tenant: dict[str, int] = {}
        self._short, self._long = _Turns(), _Turns()
        self._num_running = self._num_long = 0

    async def run(self, num_chars: int, work: Callable[[], _T], *, tenant: str = "") -> _T:
        """Do `work` off the event loop, or at once if it is short.

        Args:
            num_chars: What it is about as long as.
            work: What to do; called on a thread.
            tenant: For whom.

        Raises:
            OverloadedError: Too much waits already.
        """
        if num_chars <= _INLINE_CHARS:
            return work()
        self._check(num_chars, tenant)
        job = _Job(tenant, num_chars, work, asyncio.get_running_loop().create_future())
        self._count(job, 1)
        (self._long if job.is_long else self._short).push(job)
        self._start_jobs()
        try:
            return await job.result
        except asyncio.CancelledError:
            # One that runs counts until its thread is done with it.
            if (self._long if job.is_long else self._short).remove(job):
                self._count(job, -1)
            raise

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _check(self, num_chars: int, tenant: str) -> None:
        own = self._pending_by_tenant.get(tenant, 0)
        for pending, limit in (
            (self._pending_chars, self._max_pending_chars),
            (own, self._max_pending_chars // 2 if own else self._max_pending_chars),
        ):
            if pending + num_chars > limit:
                raise OverloadedError(
                    f"{pending} characters wait to be tokenized and {num_chars} more would pass "
                    f"the limit of {limit}. Try again in a second.",
                    retry_after_s=1.0,
                    pending_chars=pending,
                    limit=limit,
                )

    def _count(self, job: _Job, sign: int) -> None:
        self._pending_chars += sign * job.num_chars
        own = self._pending_by_tenant.get(job.tenant, 0) + sign * job.num_chars
        if own:
            self._pending_by_tenant[job.tenant] = own
        else:
            del self._pending_by_tenant[job.tenant]

    def _start_jobs(self) -> None:
        while self._num_running < _NUM_THREADS:
            # A thread each, where both kinds wait.
            if self._long and not self._num_long:
                job = self._long.pop()
            elif self._short:
                job = self._short.pop()
            else:
                return
            self._num_running += 1
            self._num_long += job.is_long
            loop = job.result.get_loop()
            future = self._executor.submit(job.work)
            future.add_done_callback(
                lambda future, job=job, loop=loop: _call_soon_if_open(loop, self._end, job, future)
            )

    def _end(self, job: _Job, future: Future[Any]) -> None:
        self._num_running -= 1
        self._num_long -= job.is_long
        self._count(job, -1)
        if not job.result.done():
            if future.cancelled():
                job.result.cancel()
            elif (error := future.exception()) is not None:
                job.result.set_exception(error)
            else:
                job.result.set_result(future.result())
        self._start_jobs()


def _call_soon_if_open(
    loop: asyncio.AbstractEventLoop,
    callback: Callable[[_Job, Future[Any]], None],
    job: _Job,
    future: Future[Any],
) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback, job, future)
