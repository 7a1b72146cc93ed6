"""What one step costs the scheduler, by decoding rows, and what an admission costs.

    python tests/benchmarks/bench_scheduler.py [--steps N] [--json FILE]

512-token prompts, blocks of 16, prefix caching on, one step in flight beyond the awaited one. Rows
start at staggered lengths, as they do in service: in every step, one row in 16 fills a block and
takes another. The peer is vLLM 0.24, its own scheduler and KV manager on this kind of machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from typing import TYPE_CHECKING

from control_plane.block_hash import BlockHasher
from control_plane.kv_cache_manager import KVCacheConfig, KVCacheManager
from control_plane.request import Request, SamplingParams, Version
from control_plane.scheduler import Scheduler
from control_plane.scheduler_config import SchedulerConfig

if TYPE_CHECKING:
    from control_plane.scheduled_step import ScheduledStep

BLOCK_SIZE = 16
PROMPT_TOKENS = 512
MAX_MODEL_LEN = 4096
PEER_STEP_MS = {32: 0.41, 256: 3.87, 1024: 23.9}
PEER_ADMISSION_MS = 0.42


@dataclass(frozen=True, slots=True)
class Measurement:
    """Milliseconds. Medians, and the mean where rare work counts."""

    rows: int
    schedule_ms: float
    update_ms: float
    step_ms: float
    step_mean_ms: float
    admission_ms: float


class Bench:
    """A scheduler whose worker answers every step with token 1."""

    def __init__(self, rows: int, *, max_model_len: int = MAX_MODEL_LEN) -> None:
        hasher = BlockHasher(
            deployment_seed=b"bench", model_fingerprint=bytes(32), block_size=BLOCK_SIZE
        )
        manager = KVCacheManager(
            KVCacheConfig(
                block_size=BLOCK_SIZE, num_blocks=rows * max_model_len // BLOCK_SIZE // 2 + 2
            ),
            hasher,
            max_num_seqs=rows,
            max_model_len=max_model_len,
        )
        config = SchedulerConfig(
            max_num_seqs=rows, max_num_batched_tokens=8192, max_model_len=max_model_len
        )
        self.scheduler = Scheduler(config, manager)
        self.in_flight: deque[ScheduledStep] = deque()
        self.version = 0
        self.schedule_ms: list[float] = []
        self.update_ms: list[float] = []

    def order(self) -> bool:
        started = time.perf_counter()
        step = self.scheduler.schedule(Version(self.version + 1))
        self.schedule_ms.append((time.perf_counter() - started) * 1e3)
        if step is None:
            return False
        self.version += 1
        self.in_flight.append(step)
        return True

    def answer(self) -> None:
        step = self.in_flight.popleft()
        size = step.sampled_rows.size
        counts, tokens = np.ones(size, np.uint8), np.ones(size, np.int32)
        rows, reasons = np.zeros(0, np.int32), np.zeros(0, np.uint8)
        started = time.perf_counter()
        self.scheduler.update(step.version, 0, counts, tokens, rows, reasons)
        self.update_ms.append((time.perf_counter() - started) * 1e3)


def new_requests(
    count: int, *, stagger: bool, prompt_tokens: int = PROMPT_TOKENS, salt: str = ""
) -> list[Request]:
    rng = np.random.default_rng(0)
    return [
        Request(
            req_id=f"r{i}",
            prompt_token_ids=rng.integers(
                0, 150_000, prompt_tokens + (i % BLOCK_SIZE if stagger else 0), dtype=np.int32
            ),
            sampling=SamplingParams(),
            cache_salt=salt,
            seed=i,
            max_total_tokens=prompt_tokens + 32 if salt else MAX_MODEL_LEN // 2,
            arrival=i,
        )
        for i in range(count)
    ]


def measure_admission(rows: int) -> float:
    """Per request of exactly 512 tokens: add, hash, look up, allocate, order and confirm."""
    bench = Bench(rows)
    requests = new_requests(rows, stagger=False)
    started = time.perf_counter()
    for request in requests:
        bench.scheduler.add(request)
    while bench.scheduler.num_waiting:
        bench.order()
        bench.answer()
    return (time.perf_counter() - started) * 1e3 / rows


def measure_lengths(prompt_tokens: int, count: int = 8) -> tuple[float, float]:
    """Per request of that length, alone in its step: not cached, and cached but for its last block.

    From `add` to the plan that orders it; medians.
    """
    bench = Bench(2 * count, max_model_len=2 * prompt_tokens)
    medians: list[float] = []
    for _ in range(2):
        times_ms: list[float] = []
        for request in new_requests(count, stagger=False, prompt_tokens=prompt_tokens, salt="s"):
            started = time.perf_counter()
            bench.scheduler.add(request)
            bench.order()
            times_ms.append((time.perf_counter() - started) * 1e3)
            bench.answer()
            bench.scheduler.abort(request)
            num_cached = prompt_tokens - BLOCK_SIZE if medians else 0
            assert request.sequences[0].num_cached_tokens == num_cached
        medians.append(statistics.median(times_ms))
    return medians[0], medians[1]


def decoding(rows: int) -> Bench:
    """A bench whose rows all decode, with one step in flight."""
    bench = Bench(rows)
    for request in new_requests(rows, stagger=True):
        bench.scheduler.add(request)
    while bench.scheduler.num_waiting:
        bench.order()
        bench.answer()
    bench.order()
    return bench


def measure(rows: int, steps: int) -> Measurement:
    gc.collect()
    # Too short to have a median of its own on a machine that others use.
    admission_ms = statistics.median(measure_admission(rows) for _ in range(7))
    bench = decoding(rows)
    bench.schedule_ms.clear()
    bench.update_ms.clear()
    for _ in range(steps):
        bench.order()
        bench.answer()
    totals = [a + b for a, b in zip(bench.schedule_ms, bench.update_ms, strict=True)]
    return Measurement(
        rows=rows,
        schedule_ms=statistics.median(bench.schedule_ms),
        update_ms=statistics.median(bench.update_ms),
        step_ms=statistics.median(totals),
        step_mean_ms=statistics.fmean(totals),
        admission_ms=admission_ms,
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000, help="measured steps per row count")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args(argv)
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    print(
        f"{cpu}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; "
        f"Python {platform.python_version()}, numpy {np.__version__}"
    )
    print(f"{options.steps} steps, prompts of {PROMPT_TOKENS} tokens, blocks of {BLOCK_SIZE}")
    print("ms; the peer is vLLM 0.24")
    print("rows  schedule  update    step  (mean)    peer  peer/ours  admission  peer/ours")
    results = [measure(rows, options.steps) for rows in PEER_STEP_MS]
    for one in results:
        peer = PEER_STEP_MS[one.rows]
        print(
            f"{one.rows:<5} {one.schedule_ms:8.3f} {one.update_ms:7.3f} {one.step_ms:7.3f} "
            f"{one.step_mean_ms:7.3f} {peer:7.2f} {peer / one.step_ms:9.1f}x "
            f"{one.admission_ms:10.3f} {PEER_ADMISSION_MS / one.admission_ms:9.1f}x"
        )
    print("admission of one prompt, ms: tokens  not cached  cached")
    for prompt_tokens in (512, 8192):
        fresh_ms, cached_ms = measure_lengths(prompt_tokens)
        print(f"{prompt_tokens:>29} {fresh_ms:11.3f} {cached_ms:7.3f}")
    if options.json:
        figures = [asdict(one) for one in results]
        options.json.write_text(json.dumps({"cpu": cpu, "results": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
