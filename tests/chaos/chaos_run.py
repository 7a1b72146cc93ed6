"""One run: system, undisturbed system, streams, faults, and what has to hold at the end.

Owns: the order of a run and its report. Does not know: what each part does.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from chaos.chaos_model import build_model
from chaos.chaos_system import CLIENT_LINKS, ChaosSystem, SystemConfig, undisturbed_config
from chaos.departures import Departures, measure_departures
from chaos.fault_injector import FaultInjector
from chaos.fault_schedule import FaultKind, FaultLane, ScheduleConfig, schedule
from chaos.findings import Findings
from chaos.load_requests import RequestKind, lane_requests, make_documents
from chaos.streams import StreamLoad
from chaos.verifier import Tally, Verifier
from chaos.warm_restart import WarmRestart, measure_warm_restart

from demo.processes import ProcessDiedError
from demo.stack import ServingStack

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable
    from pathlib import Path
    from typing import Any

    from demo.leftovers import RunDirectory
    from demo.processes import ManagedProcess

# Without progress for longer than this a stream is broken; every outage has to be shorter.
STALL_LIMIT_S = 150.0
_END_LIMIT_S = 240.0
_POLL_S = 0.2
_PROGRESS_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosConfig:
    """What to run.

    Attributes:
        base_dir: Logs, model, the store's data.
        seed: Of faults and requests.
        seconds: How long faults are injected at most.
        max_faults_per_lane: How many at most.
        num_lanes: Concurrent streams.
        mean_gap_s: Between the beginnings of two faults of a lane.
        measures_warm_restart: Also say what a restart of the control plane costs.
    """

    base_dir: Path
    seed: int
    seconds: float
    max_faults_per_lane: int = 1_000_000
    num_lanes: int = 16
    mean_gap_s: float = 1.5
    measures_warm_restart: bool = True


@dataclass(slots=True)
class ChaosReport:
    """What came of it."""

    seed: int
    findings: Findings
    seconds: float = 0.0
    faults: Counter[FaultKind] | None = None
    active_faults: Counter[FaultKind] | None = None
    ends: dict[str, int] = field(default_factory=dict[str, int])
    logged: dict[str, int] = field(default_factory=dict[str, int])
    tallies: dict[RequestKind, Tally] = field(default_factory=dict[RequestKind, Tally])
    num_ties: int = 0
    departures: Departures | None = None
    warm_restart: WarmRestart | None = None

    @property
    def num_faults(self) -> int:
        return sum(self.faults.values()) if self.faults else 0

    @property
    def num_active_faults(self) -> int:
        return sum(self.active_faults.values()) if self.active_faults else 0


async def run_chaos(
    config: ChaosConfig, log: Callable[[str], None], registry: RunDirectory | None = None
) -> ChaosReport:
    """Run it to the end of its time, or to the first finding.

    Args:
        config: What to run.
        log: Gets a line for everything that happens.
        registry: Where children are noted.
    """
    run = _Run(config, log, registry)
    started_at = time.monotonic()
    try:
        await run.run()
    finally:
        run.report.seconds = time.monotonic() - started_at
    return run.report


class _Run:
    def __init__(
        self, config: ChaosConfig, log: Callable[[str], None], registry: RunDirectory | None
    ) -> None:
        self._config = config
        self._log = log
        self._findings = Findings()
        self.report = ChaosReport(config.seed, self._findings)
        self._registry = registry

    async def run(self) -> None:
        config = self._config
        model_dir = await asyncio.to_thread(build_model, config.base_dir / "model")
        system = ChaosSystem(
            SystemConfig(base_dir=config.base_dir / "system", model_dir=model_dir), self._registry
        )
        undisturbed = ServingStack(
            undisturbed_config(config.base_dir / "undisturbed", model_dir), registry=self._registry
        )
        async with system, undisturbed:
            undisturbed.start_control_plane()
            undisturbed.start_worker("undisturbed")
            await undisturbed.wait_until_ready()
            self._log("both systems serve")
            async with undisturbed.client() as answers:
                verifier = Verifier(answers, model_dir, self._findings)
                load = StreamLoad(self._findings, verifier.put, stall_limit_s=STALL_LIMIT_S)
                injector = FaultInjector(system, load.calls, self._findings)
                try:
                    await self._serve(system, undisturbed, verifier, load, injector)
                finally:
                    self._fill_report(system, verifier, load, injector)

    async def _serve(
        self,
        system: ChaosSystem,
        undisturbed: ServingStack,
        verifier: Verifier,
        load: StreamLoad,
        injector: FaultInjector,
    ) -> None:
        """Everything that happens at once; the first finding ends it."""
        work = asyncio.create_task(self._work(system, verifier, load, injector), name="work")
        beside: list[asyncio.Task[None]] = [
            asyncio.create_task(coroutine)
            for coroutine in (
                self._findings.wait(),
                verifier.run(),
                load.calls.watch(),
                self._watch_processes(system, undisturbed),
                self._tell(verifier, load, injector),
            )
        ]
        try:
            await asyncio.wait([work, *beside], return_when=asyncio.FIRST_COMPLETED)
            for task in (work, *beside[1:]):
                if task.done():
                    task.result()
        except TimeoutError as error:
            self._findings.add("stalled", str(error))
        finally:
            await injector.cancel()
            await _cancel(work, *beside)

    async def _work(
        self, system: ChaosSystem, verifier: Verifier, load: StreamLoad, injector: FaultInjector
    ) -> None:
        config = self._config
        documents = make_documents(config.seed)
        what = ScheduleConfig(
            workers=list(system.slots),
            worker_links=[f"link of {name}" for name in system.slots],
            other_links=[name for name in system.links if not name.startswith("link of")],
            lease_s=system.config.lease_s,
            mean_gap_s=config.mean_gap_s,
        )
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(system.client(n)) for n in CLIENT_LINKS]
            lanes: list[asyncio.Task[None]] = [
                asyncio.create_task(
                    load.run_lane(
                        clients[lane % len(clients)], lane_requests(config.seed, lane, documents)
                    ),
                    name=f"lane {lane}",
                )
                for lane in range(config.num_lanes)
            ]
            try:
                await _until(lambda: load.calls.num_active > 0, "the first tokens")
                await injector.run(
                    [schedule(config.seed, lane, what) for lane in FaultLane],
                    most=config.max_faults_per_lane,
                    until=time.monotonic() + config.seconds,
                    log=self._log,
                )
                self._log("no more faults: everything has to come to its end")
                load.close()
                await asyncio.wait_for(asyncio.gather(*lanes), _END_LIMIT_S)
                await system.wait_until_whole(_END_LIMIT_S)
            finally:
                await _cancel(*lanes)
        await self._check_end(system, verifier)

    async def _check_end(self, system: ChaosSystem, verifier: Verifier) -> None:
        """Nothing is held by anybody, everything is right, and everybody leaves in good order."""
        await _until(lambda: system.is_free, "every block and row is free")
        self._log("everything is free")
        await asyncio.wait_for(verifier.finish(), _END_LIMIT_S)
        departures = self.report.departures = await measure_departures(system)
        if not departures.were_noticed:
            self._findings.add("leaked", f"who has left is served to the end: {departures}")
        last, *others = system.slots.values()
        for slot in others:
            await self._check_departure(system, slot.process)
            slot.process = None
        if self._config.measures_warm_restart:
            # With one worker: of several, another one may be back first and take the request.
            self.report.warm_restart = await measure_warm_restart(system)
        await system.wait_until_whole()
        await self._check_departure(system, last.process)
        await self._check_departure(system, system.control_plane)

    async def _check_departure(self, system: ChaosSystem, process: ManagedProcess | None) -> None:
        """Idle processes leave at once: a row or a request that was left would hold them up."""
        if process is not None:
            process.is_expected_to_end = True
            code = await process.stop(60.0)
            log = process.log_tail(400)
            if code != 0:
                self._findings.add("died", f"{process.name} left with code {code}")
            if "grace period over" in log or "drain ran out of time" in log:
                self._findings.add("leaked", f"{process.name} waited for something: {log[-800:]}")
            for line in await system.forget(process):
                self._findings.add("logged", line)

    async def _watch_processes(self, system: ChaosSystem, undisturbed: ServingStack) -> None:
        while True:
            for line in await system.revive_control_plane():
                self._findings.add("logged", line)
            for group in (system.stack.processes, undisturbed.processes):
                try:
                    group.check()
                except ProcessDiedError as error:
                    self._findings.add("died", str(error))
                    error.process.is_expected_to_end = True
            await asyncio.sleep(_POLL_S)

    async def _tell(self, verifier: Verifier, load: StreamLoad, injector: FaultInjector) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_S)
            self._log(
                f"{sum(injector.counts.values())} faults, {load.counts['complete']} requests "
                f"complete, {verifier.num_tokens} tokens right, {verifier.num_waiting} requests "
                f"to compare, {load.counts['resumes']} resumes"
            )

    def _fill_report(
        self, system: ChaosSystem, verifier: Verifier, load: StreamLoad, injector: FaultInjector
    ) -> None:
        report = self.report
        # After a finding these may say why; after a good end there are none.
        for line in system.read_live_logs():
            self._findings.add("logged", line)
        report.faults, report.active_faults = injector.counts, injector.active_counts
        report.ends, report.logged = dict(load.counts), dict(system.logs.counts)
        report.tallies, report.num_ties = verifier.tallies, verifier.num_ties


async def _until(condition: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(_END_LIMIT_S):
            while not condition():  # noqa: ASYNC110 - conditions without events
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise TimeoutError(f"not within {_END_LIMIT_S:.0f} s: {what}") from None


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
