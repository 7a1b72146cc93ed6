"""One process's part of a run: who is sent when, until there is no more or somebody says stop.

Owns: the loops (closed, open), conversations, the end of a run. Does not know: flags, other
processes; it takes the jobs whose number leaves its own as remainder.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from google.protobuf import duration_pb2

from pagewire_client.bench.calls import UNFINISHED, Caller, Meter
from pagewire_client.bench.records import Gaps, Outcome, RequestRecord
from pagewire_client.bench.workload import Workload, joined
from protos.pagewire.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from pagewire_client.bench.calls import Access, Output
    from pagewire_client.bench.config import BenchConfig
    from pagewire_client.bench.workload import Job, Prompt

# Messages of a burst are made before its time begins, up to this many.
_MAX_PREPARED = 20_000
_WARMUP_SALT = "/warm-up"


class Load:
    """Sends a part of a workload. `run` once.

    Attributes:
        meter: What has been measured so far.
        num_done: Requests that ended, in whatever way.
        num_failed: Those that failed.
    """

    def __init__(self, config: BenchConfig, access: Access, *, process: int = 0) -> None:
        """Prepare it.

        Raises:
            ValueError: A trace, TLS file or token is not what it should be.
            OSError: Likewise.
        """
        self.config = config
        self.meter = Meter(
            origin_s=time.monotonic(),
            gaps=Gaps(),
            keeps_times=config.workload == "decode-rows",
            keeps_output=config.workload == "multi-turn",
        )
        self.num_done = 0
        self.num_failed = 0
        self._workload = Workload(config)
        self._access = access
        self._process = process
        self._records: list[RequestRecord] = []
        self._stopped = asyncio.Event()
        self._is_interrupted = False
        self._prepared: dict[int, bytes] = {}

    @property
    def num_requests(self) -> int:
        """Requests of this process, if nothing ends the run before."""
        return len(self._jobs()) * self._workload.turns_per_job

    def stop(self) -> None:
        """Send nothing more and give up what is under way."""
        self._is_interrupted = True
        self._stopped.set()

    async def run(self, start: Callable[[], Awaitable[float]] | None = None) -> Outcome:
        """Send everything.

        Args:
            start: Awaited when all is prepared; gives the monotonic time at which the run begins.
                None: at once.
        """
        config = self.config
        self._prepare()
        async with Caller(
            self._access,
            self.meter,
            channels=config.channels,
            via=config.via,
            timeout_s=config.timeout_s,
        ) as caller:
            if self._process == 0:
                await self._warm_up(caller)
            start_at_s = time.monotonic() if start is None else await start()
            await self._sleep_until(start_at_s)
            self.meter.origin_s = start_at_s
            cpu_s = time.process_time()
            await self._send_all(caller)
            wall_s = self.meter.now()
            return Outcome(
                records=self._records,
                gaps=self.meter.gaps,
                tokens_by_second=self.meter.tokens_by_second,
                client_cpu_s=[time.process_time() - cpu_s],
                wall_s=wall_s,
                is_interrupted=self._is_interrupted,
            )

    def _jobs(self) -> range:
        return range(self._process, self._workload.num_jobs, self.config.processes)

    def _prepare(self) -> None:
        """Make the messages of a burst, so that making them does not spread it out."""
        if self.config.arrivals != "burst" or self.config.workload == "multi-turn":
            return
        for index in self._jobs()[:_MAX_PREPARED]:
            turn = self._workload.job(index).turns[0]
            self._prepared[index] = self._message(index, turn.prompt, turn.max_tokens)

    async def _warm_up(self, caller: Caller) -> None:
        """Connect, and let everything on the way run once; nothing of it is kept."""
        meter = self.meter
        for number in range(self.config.warmup):
            if self._stopped.is_set():
                return
            turn = self._workload.job(number % self._workload.num_jobs).turns[0]
            # Not the run's own prefixes: it must find the cache as it was.
            message = self._message(number, turn.prompt, min(turn.max_tokens, 16), _WARMUP_SALT)
            await caller.send(message, RequestRecord(number, 0.0))
        meter.gaps.buckets.clear()
        meter.tokens_by_second.clear()
        meter.num_tokens = 0

    async def _send_all(self, caller: Caller) -> None:
        config = self.config
        sender = asyncio.create_task(
            self._closed_loop(caller) if config.arrivals == "closed" else self._open_loop(caller)
        )
        stopped = asyncio.create_task(self._stopped.wait())
        limit_s = config.duration_s + config.drain_s if config.duration_s else None
        try:
            await asyncio.wait(
                [sender, stopped], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for task in (sender, stopped):
                task.cancel()
            ended = await asyncio.gather(sender, stopped, return_exceptions=True)
        if isinstance(ended[0], Exception):
            raise ended[0]

    async def _closed_loop(self, caller: Caller) -> None:
        config = self.config
        mine = config.concurrency // config.processes
        mine += self._process < config.concurrency % config.processes
        jobs = iter(self._jobs())
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(mine, len(self._jobs()))):
                tasks.create_task(self._one_after_another(jobs, caller))

    async def _one_after_another(self, jobs: Iterator[int], caller: Caller) -> None:
        for index in jobs:
            if self._is_over():
                return
            await self._run_job(self._workload.job(index), self.meter.now(), caller)

    async def _open_loop(self, caller: Caller) -> None:
        config = self.config
        limit = config.concurrency if config.arrivals == "poisson" else 0
        slots = asyncio.Semaphore(max(1, limit // config.processes)) if limit else None
        async with asyncio.TaskGroup() as tasks:
            for index in self._jobs():
                due_s = self._workload.arrival_s(index)
                await self._sleep_until(self.meter.origin_s + due_s)
                if slots is not None:
                    await slots.acquire()
                if self._is_over():
                    return
                tasks.create_task(self._run_and_release(index, due_s, caller, slots))

    async def _run_and_release(
        self, index: int, due_s: float, caller: Caller, slots: asyncio.Semaphore | None
    ) -> None:
        try:
            await self._run_job(self._workload.job(index), due_s, caller)
        finally:
            if slots is not None:
                slots.release()

    async def _run_job(self, job: Job, due_s: float, caller: Caller) -> None:
        history: Prompt | None = None
        for number, turn in enumerate(job.turns):
            if number:
                await asyncio.sleep(self.config.think_s)
                due_s = self.meter.now()
                if self._is_over():
                    return
            prompt = turn.prompt if history is None else joined(history, turn.prompt)
            index = job.index * len(job.turns) + number
            message = self._prepared.pop(index, None)
            if message is None:
                message = self._message(index, prompt, turn.max_tokens)
            record, output = await self._send(index, message, turn.max_tokens, due_s, caller)
            if record.reason:
                # A conversation that misses an answer has no next turn.
                return
            history = joined(prompt, output.text if isinstance(prompt, str) else output.token_ids)

    async def _send(
        self, index: int, message: bytes, max_tokens: int, due_s: float, caller: Caller
    ) -> tuple[RequestRecord, Output]:
        now_s = self.meter.now()
        record = RequestRecord(
            index, now_s, late_s=max(0.0, now_s - due_s), wanted_tokens=max_tokens
        )
        self._records.append(record)
        try:
            output = await caller.send(message, record)
            if self.config.ignore_eos and not record.reason and record.output_tokens != max_tokens:
                record.reason = "WRONG_LENGTH"
        finally:
            self.num_done += 1
            self.num_failed += record.reason not in ("", UNFINISHED)
        return record, output

    def _message(self, index: int, prompt: Prompt, max_tokens: int, salt: str = "") -> bytes:
        config = self.config
        request = inference_pb2.GenerateRequest(
            model=config.model, cache_salt=config.cache_salt + salt
        )
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        sampling = request.sampling
        sampling.max_tokens = max_tokens
        sampling.temperature = config.temperature
        sampling.ignore_eos = config.ignore_eos
        sampling.seed = (config.seed << 20) + index & ((1 << 64) - 1)
        if config.flush_ms:
            request.flush_interval.CopyFrom(
                duration_pb2.Duration(nanos=int(config.flush_ms * 1e6) % 1_000_000_000)
            )
            request.flush_interval.seconds = int(config.flush_ms // 1000)
        return request.SerializeToString()

    def _is_over(self) -> bool:
        limit_s = self.config.duration_s
        return self._stopped.is_set() or bool(limit_s and self.meter.now() >= limit_s)

    async def _sleep_until(self, at_s: float) -> None:
        # Also yields when it is late already: a burst must not starve what reads its answers.
        await asyncio.sleep(max(0.0, at_s - time.monotonic()))
