"""Two hundred workers that compute nothing, under one real control plane: real processes, loopback.

Everything but the device is real: the control plane's process, the workers' streams (several in a
process), the client. What is reported are counts, memory and CPU time, which say something on a
busy machine too; the wall times are those of this machine in this hour.

Owns: starting it, loading it, ending it in order. Does not know what a simulated worker is.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from demo.model import ensure_demo_model
from demo.stack import ServingStack, StackConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagewire_client import AsyncClient

_ROOT = Path(__file__).resolve().parents[3]
_PREFIX_TOKENS, _OWN_TOKENS, _NUM_PREFIXES = 256, 64, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run.

    Attributes:
        num_workers: Replicas in all.
        num_processes: That they live in; divides `num_workers`.
        step: Time of a step, as `--simulate` reads it.
        concurrency: Requests under way, one phase after the other.
        seconds: Of each phase.
        max_tokens: Of every answer.
    """

    num_workers: int = 200
    num_processes: int = 4
    step: str = "250ms"
    concurrency: tuple[int, ...] = (200, 800)
    seconds: float = 20.0
    max_tokens: int = 24

    def __post_init__(self) -> None:
        if self.num_workers % self.num_processes:
            raise ValueError(
                f"{self.num_workers} workers cannot live evenly in {self.num_processes} processes"
            )


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


class _Load:
    """A closed loop of requests; every answer is checked for its length."""

    def __init__(self, client: AsyncClient, max_tokens: int) -> None:
        self._client = client
        self._max_tokens = max_tokens
        self._rng = np.random.default_rng(0)
        self._prefixes = self._rng.integers(100, 40_000, (_NUM_PREFIXES, _PREFIX_TOKENS))
        self.num_answered = 0
        self.num_wrong = 0
        self.stops = False

    async def run(self, concurrency: int) -> None:
        await asyncio.gather(*(self._ask_again() for _ in range(concurrency)))

    async def _ask_again(self) -> None:
        while not self.stops:
            prefix = self._prefixes[self._rng.integers(_NUM_PREFIXES)]
            own = self._rng.integers(100, 40_000, _OWN_TOKENS)
            answer = await self._client.complete(
                [*prefix.tolist(), *own.tolist()],
                max_tokens=self._max_tokens,
                ignore_eos=True,
                flush_interval_s=0.5,
                timeout_s=300.0,
            )
            self.num_answered += 1
            self.num_wrong += len(answer.token_ids) != self._max_tokens


async def _counters(client: AsyncClient, process: psutil.Process) -> dict[str, float]:
    replicas = (await client.stats()).replicas
    return {
        "time_s": time.perf_counter(),
        "cpu_s": _cpu_s(process),
        "plans": sum(r.plans_sent for r in replicas),
        "plan_bytes": sum(r.plan_bytes for r in replicas),
        "tokens": sum(r.generation_tokens for r in replicas),
        "queries": sum(r.prefix_queries for r in replicas),
        "hits": sum(r.prefix_hits for r in replicas),
    }


async def _phase(
    client: AsyncClient, process: psutil.Process, plan: Plan, concurrency: int
) -> dict[str, Any]:
    load = _Load(client, plan.max_tokens)
    task = asyncio.create_task(load.run(concurrency))
    await asyncio.sleep(plan.seconds / 4)  # the loop fills
    before, answered = await _counters(client, process), load.num_answered
    await asyncio.sleep(plan.seconds)
    after, answered = await _counters(client, process), load.num_answered - answered
    load.stops = True
    await task
    change = {name: after[name] - before[name] for name in before}
    seconds, steps = change["time_s"], change["plans"]
    return {
        "concurrency": concurrency,
        "requests_per_s": answered / seconds,
        "steps_per_s": steps / seconds,
        "messages_per_s": 2 * steps / seconds,
        "tokens_per_s": change["tokens"] / seconds,
        "plan_bytes_mean": change["plan_bytes"] / steps,
        "control_plane_cpu_share": change["cpu_s"] / seconds,
        "cpu_us_per_step": change["cpu_s"] / steps * 1e6,
        "cpu_us_per_token": change["cpu_s"] / change["tokens"] * 1e6,
        "hit_rate": change["hits"] / max(change["queries"], 1),
        "rss_mb": process.memory_info().rss / 1e6,
        "answered": load.num_answered,
        "wrong": load.num_wrong,
    }


async def measure(plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    """Run it; every phase is said as it ends.

    Raises:
        ProcessDiedError: a process ended by itself.
        TimeoutError: the workers were not there within ten minutes.
    """
    model_dir = await asyncio.to_thread(
        ensure_demo_model, _ROOT / ".pagewire" / "models", progress=say
    )
    per_process = plan.num_workers // plan.num_processes
    with tempfile.TemporaryDirectory(prefix="pagewire-scale-") as base_dir:
        config = StackConfig(
            root=_ROOT,
            base_dir=Path(base_dir),
            model_dir=model_dir,
            model_name="scale",
            python=sys.executable,
            environment=os.environ,
            store="memory://",
            random_ports=True,
            worker_args=(
                *("--simulate", plan.step, "--simulate-workers", str(per_process)),
                *("--num-blocks", "4096", "--max-model-len", "4096"),
            ),
            grace_s=120.0,
        )
        async with ServingStack(config) as stack:
            process = psutil.Process(stack.start_control_plane().pid)
            await stack.wait_until_ready(0)
            report: dict[str, Any] = {"rss_empty_mb": process.memory_info().rss / 1e6}
            began_s, cpu_s = time.perf_counter(), _cpu_s(process)
            for i in range(plan.num_processes):
                stack.start_worker(f"sim{i}")
            await stack.wait_until_ready(plan.num_workers, timeout_s=600.0, on_change=say)
            report["attach_s"] = time.perf_counter() - began_s
            report["attach_control_plane_cpu_s"] = _cpu_s(process) - cpu_s
            report["rss_attached_mb"] = process.memory_info().rss / 1e6
            workers = [psutil.Process(worker.pid) for worker in stack.workers.values()]
            report["rss_worker_process_mb"] = max(w.memory_info().rss for w in workers) / 1e6
            async with stack.client() as client:
                report["phases"] = []
                idle_cpu_s = _cpu_s(process)
                await asyncio.sleep(5)
                report["idle_cpu_share"] = (_cpu_s(process) - idle_cpu_s) / 5
                for concurrency in plan.concurrency:
                    phase = await _phase(client, process, plan, concurrency)
                    report["phases"].append(phase)
                    say("  ".join(f"{name} {value:.5g}" for name, value in phase.items()))
                report |= await _drain(stack, client, plan)
            assert stack.control_plane is not None
            report["control_plane_exit"] = await stack.processes.stop(stack.control_plane)
        return report


async def _drain(stack: ServingStack, client: AsyncClient, plan: Plan) -> dict[str, Any]:
    """SIGTERM to one of the worker processes under load: nobody may notice."""
    load = _Load(client, plan.max_tokens)
    task = asyncio.create_task(load.run(plan.concurrency[0]))
    await asyncio.sleep(plan.seconds / 4)
    began_s = time.perf_counter()
    code = await stack.processes.stop(stack.workers["sim0"])
    took_s = time.perf_counter() - began_s
    await asyncio.sleep(plan.seconds / 4)
    load.stops = True
    await task
    left = len([r for r in (await client.stats()).replicas if r.workers])
    return {
        "drain_s": took_s,
        "drain_exit": code,
        "drain_answered": load.num_answered,
        "drain_wrong": load.num_wrong,
        "replicas_left": left,
    }
