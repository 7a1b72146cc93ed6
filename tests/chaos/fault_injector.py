"""Does what the schedule says to processes, store and links, and undoes it.

Owns: what each kind of fault is, that a target has one fault at a time and is whole again before
the next, the count of faults. Does not know: what streams receive.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import Counter
from typing import TYPE_CHECKING, Protocol

from chaos.chaos_system import CLIENT_LINKS, STORE_LINK, StoreContents, stepped_back
from chaos.fault_schedule import (
    CONTROL_PLANE,
    Fault,
    FaultKind,
    FaultLane,
)

from demo.link import LinkConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from chaos.chaos_system import ChaosSystem, WorkerSlot
    from chaos.findings import Findings

    from demo.link import Link
    from demo.processes import ManagedProcess

# Far more than a restart takes even on a machine with much else to do.
_WHOLE_LIMIT_S = 120.0
_ACTIVE_LIMIT_S = 3.0
_PATIENCE_S = 45.0
_POLL_S = 0.02
_MIN_TOKENS_SERVED = 400
_MAX_DELAY_S = 0.4


class Load(Protocol):
    """What faults need to know of the streams."""

    @property
    def num_active(self) -> int:
        """Streams that have tokens and are not at their end."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens received so far."""
        ...

    def may_lose_a_worker(self) -> bool:
        """Whether no live request would be at its last loss."""
        ...

    def is_served(self) -> bool:
        """Whether every stream has had news not long ago."""
        ...

    def note_loss(self) -> None:
        """Any live request may lose its worker now."""
        ...


class FaultInjector:
    """Runs a schedule.

    Attributes:
        counts: Faults by kind.
        active_counts: Those that came while streams were active.
    """

    def __init__(self, system: ChaosSystem, load: Load, findings: Findings) -> None:
        self.counts: Counter[FaultKind] = Counter()
        self.active_counts: Counter[FaultKind] = Counter()
        self._system = system
        self._load = load
        self._findings = findings
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._tokens_at_control_fault = -_MIN_TOKENS_SERVED

    async def run(
        self,
        lanes: Iterable[Iterator[Fault]],
        *,
        most: int,
        until: float,
        log: Callable[[str], None],
    ) -> None:
        """Inject faults, so many per lane or until the monotonic clock says so; wait for the last.

        Raises:
            TimeoutError: A target did not become whole again.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for faults in lanes:
                    tasks.create_task(self._run_lane(faults, most, until, log))
        except* TimeoutError as group:
            raise group.exceptions[0] from None
        await asyncio.gather(*self._under_way.values())

    async def _run_lane(
        self, faults: Iterator[Fault], most: int, until: float, log: Callable[[str], None]
    ) -> None:
        for fault in faults:
            await asyncio.sleep(fault.gap_s)
            if fault.number > most:
                return
            await self._wait_for_target(fault)
            if time.monotonic() >= until:
                return
            self._begin(fault, log)

    async def cancel(self) -> None:
        """Stop in the midst of it; what is broken stays broken."""
        for task in self._under_way.values():
            task.cancel()
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)

    def _begin(self, fault: Fault, log: Callable[[str], None]) -> None:
        num_active = self._load.num_active
        self._findings.positions[fault.lane] = fault.number
        self.counts[fault.kind] += 1
        self.active_counts[fault.kind] += num_active > 0
        log(f"{fault}, {num_active} streams active")
        if self._costs_a_worker(fault):
            self._load.note_loss()
        if fault.lane is FaultLane.CONTROL:
            self._tokens_at_control_fault = self._load.num_tokens
        task = asyncio.create_task(self._apply(fault), name=str(fault))
        self._under_way[fault.target] = task

    async def _wait_for_target(self, fault: Fault) -> None:
        """Until the target is whole, and the fault costs nobody the last try or all patience."""
        await self._until(lambda: self._is_whole(fault), fault, _WHOLE_LIMIT_S)
        load, costs_a_worker = self._load, self._costs_a_worker(fault)
        # What is waited for here would only make the fault worth more; it comes all the same.
        with contextlib.suppress(TimeoutError):
            await self._until(lambda: load.num_active > 0, fault, _ACTIVE_LIMIT_S)
        if costs_a_worker or fault.lane is FaultLane.CONTROL:
            # A request that waits behind many others is given up on in the end, faults or not.
            with contextlib.suppress(TimeoutError):
                await self._until(
                    lambda: load.is_served() and (load.may_lose_a_worker() or not costs_a_worker),
                    fault,
                    _PATIENCE_S,
                )

    async def _until(self, condition: Callable[[], bool], fault: Fault, limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                while not condition():  # noqa: ASYNC110 - conditions without events
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise TimeoutError(
                f"{fault.target} was not whole again within {limit_s:.0f} s, before fault {fault}"
            ) from None

    def _is_whole(self, fault: Fault) -> bool:
        system, target = self._system, fault.target
        under_way = self._under_way.get(target)
        if under_way is not None and not under_way.done():
            return False
        if under_way is not None:
            under_way.result()
        if target == CONTROL_PLANE:
            # Each time it has to have served: dying again while it starts would show nothing new.
            num_tokens = self._load.num_tokens - self._tokens_at_control_fault
            has_served = num_tokens >= _MIN_TOKENS_SERVED
            process = system.control_plane
            is_up = process is not None and process.is_running and bool(system.serving_workers)
            return is_up and has_served
        if target in system.slots:
            return system.is_serving(system.slots[target])
        return True

    def _costs_a_worker(self, fault: Fault) -> bool:
        """Whether requests in flight may be marked as lost by it."""
        lease_s = self._system.config.lease_s
        match fault.kind:
            case FaultKind.WORKER_KILL:
                return True
            case FaultKind.LINK_CUT:
                return fault.target not in (*CLIENT_LINKS, STORE_LINK)
            case FaultKind.WORKER_STOP | FaultKind.CONTROL_STOP:
                return fault.hold_s > lease_s / 2
            case FaultKind.LINK_FREEZE:
                return fault.hold_s > lease_s / 2 and fault.target.startswith("link of")
            case _:
                return False

    async def _apply(self, fault: Fault) -> None:
        system = self._system
        match fault.lane:
            case FaultLane.LINKS:
                await self._disturb_link(fault, system.links[fault.target])
            case FaultLane.STORE:
                await self._disturb_store(fault)
            case FaultLane.CONTROL:
                await self._disturb_control_plane(fault)
            case FaultLane.WORKERS:
                await self._disturb_worker(fault, system.slots[fault.target])

    # Processes.

    async def _disturb_worker(self, fault: Fault, slot: WorkerSlot) -> None:
        process = slot.process
        assert process is not None
        if fault.kind is FaultKind.WORKER_STOP:
            await self._freeze(process, fault.hold_s)
            return
        await self._end(process, fault.kind is FaultKind.WORKER_KILL)
        slot.process = None
        await asyncio.sleep(fault.hold_s)
        self._system.start_worker(slot, new_id=fault.chance < 0.3)

    async def _disturb_control_plane(self, fault: Fault) -> None:
        process = self._system.control_plane
        assert process is not None
        if fault.kind is FaultKind.CONTROL_STOP:
            await self._freeze(process, fault.hold_s)
            return
        store_link = self._system.store_link
        if fault.kind is FaultKind.CONTROL_KILL and fault.chance < 0.5:
            # What it writes in its last second is lost: the store remembers blocks as they were.
            await store_link.cut(refuse_new=True)
            await asyncio.sleep(0.3 + 2.0 * fault.chance)
        await self._end(process, fault.kind is FaultKind.CONTROL_KILL)
        store_link.mend()
        self._system.control_plane = None
        await asyncio.sleep(fault.hold_s)
        self._system.start_control_plane()

    async def _freeze(self, process: ManagedProcess, hold_s: float) -> None:
        process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(hold_s)
        finally:
            process.send_signal(signal.SIGCONT)

    async def _end(self, process: ManagedProcess, is_crash: bool) -> None:
        process.is_expected_to_end = True
        process.send_signal(signal.SIGKILL if is_crash else signal.SIGTERM)
        code = await process.wait(_WHOLE_LIMIT_S)
        if code != (-signal.SIGKILL if is_crash else 0) and not stepped_back(process):
            self._findings.add("died", f"{process.name} ended with code {code}")
        for line in await self._system.forget(process):
            self._findings.add("logged", line)

    # Store and links.

    async def _disturb_store(self, fault: Fault) -> None:
        system, store = self._system, self._system.store
        if fault.kind is FaultKind.STORE_STOP:
            store.freeze()
            try:
                await asyncio.sleep(fault.hold_s)
            finally:
                store.thaw()
        elif fault.kind is FaultKind.STORE_KILL:
            await system.restart_store(StoreContents.AS_WRITTEN, after_s=fault.hold_s)
        elif fault.chance < 0.3:
            async with store.admin() as admin:
                await admin.flushall()
        else:
            is_lost = fault.chance < 0.6
            contents = StoreContents.NONE if is_lost else StoreContents.FROM_BACKUP
            await system.restart_store(contents, after_s=fault.hold_s)

    async def _disturb_link(self, fault: Fault, link: Link) -> None:
        try:
            if fault.kind is FaultKind.LINK_CUT:
                await link.cut(refuse_new=fault.chance < 0.7)
            elif fault.kind is FaultKind.LINK_FREEZE:
                # A third each: both directions, or one of them.
                link.freeze(upstream=fault.chance < 0.67, downstream=fault.chance > 0.33)
            else:
                delay_s = fault.chance * _MAX_DELAY_S
                slow = LinkConfig(delay_s=delay_s, jitter_s=delay_s)
                link.upstream = link.downstream = slow
            await asyncio.sleep(fault.hold_s)
        finally:
            link.mend()
            link.thaw()
            link.set_round_trip(0.0)
