"""`make bench-worker`: one GPU worker alone, plans from memory, beside targets and a peer.

    python tests/benchmarks/bench_worker.py [--models NAME ...] [--measures NAME ...] [--json FILE]

Plans are made beforehand (`recorded_plans.py`) and replayed as messages: parsed, checked, applied,
launched, results waited for, with as many steps ordered ahead as in service. No network, no control
plane, random weights.

- decode: gap between the results of two steps at a context of about 1024 tokens;
- ttft: one prompt, from before its plan is parsed to its first token on the host;
- throughput: 256 requests, prompts and outputs of 100 to 1024 tokens;
- breakdown: a decode step's graphs replayed, whole, without attention, without the sampler, and as
  many empty kernels.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gpu_workloads as w
import torch
from recorded_plans import Limits, record
from step_breakdown import break_down

from data_plane.model_runner import ModelRunner, RunnerConfig
from data_plane.models.loader import load_model
from data_plane.row_table import RowTable
from protos.pagewire.v1 import worker_pb2

ROOT = Path(__file__).resolve().parents[2]
MEASURES = ("decode", "ttft", "throughput", "breakdown")
LOOKAHEAD = 2

Row = dict[str, Any]
Event = tuple[float, list[int]]


class WorkerAlone:
    """A warm worker and the plans' way into it."""

    def __init__(self, name: str, options: argparse.Namespace, root: Path) -> None:
        started_s = time.perf_counter()
        model = load_model(w.write_model(name, root), device=options.device, load_format="dummy")
        loaded_s = time.perf_counter()
        self.runner = ModelRunner(
            model,
            RunnerConfig(
                max_num_seqs=options.max_num_seqs,
                max_num_batched_tokens=options.max_num_batched_tokens,
                max_model_len=w.MAX_MODEL_LEN,
                attention_backend=options.attention_backend,
                enforce_eager=options.enforce_eager,
                num_blocks=options.num_blocks,
                resident=True,
            ),
        )
        planned_s = time.perf_counter()
        self.runner.warm_up()
        self.vocab_size = model.config.vocab_size
        self.limits = Limits(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=w.MAX_MODEL_LEN,
            block_size=self.runner.kv_cache.block_size,
            num_blocks=self.runner.num_blocks,
        )
        self.startup = {
            "load_s": loaded_s - started_s,
            "measure_and_allocate_s": planned_s - loaded_s,
            "warm_up_s": time.perf_counter() - planned_s,
        }
        self.launch_us: list[float] = []
        self.device_us = 0

    def run(self, prompts: list[list[int]], max_tokens: list[int]) -> tuple[float, list[Event]]:
        """Start time, and per step when its tokens were there and for which requests."""
        recorded = record(prompts, max_tokens, self.limits, lookahead=LOOKAHEAD)
        limits = self.limits
        table = RowTable(
            max_num_seqs=limits.max_num_seqs,
            num_blocks=limits.num_blocks,
            max_model_len=limits.max_model_len,
            block_size=limits.block_size,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            vocab_size=self.vocab_size,
        )
        self.runner.reset()
        self._synchronize()
        self.launch_us.clear()
        self.device_us = 0
        events: list[Event] = []
        in_flight: deque[tuple[Any, list[int]]] = deque()
        gc.collect()
        gc.freeze()
        started_s = time.perf_counter()
        for message, sampled in zip(recorded.plans, recorded.sampled, strict=True):
            ordered_s = time.perf_counter()
            for work in table.apply(worker_pb2.Plan.FromString(message)):
                in_flight.append((self.runner.launch(work), sampled))
            self.launch_us.append((time.perf_counter() - ordered_s) * 1e6)
            if len(in_flight) > LOOKAHEAD:
                self._collect(*in_flight.popleft(), events)
        while in_flight:
            self._collect(*in_flight.popleft(), events)
        return started_s, events

    def _collect(self, pending: Any, sampled: list[int], events: list[Event]) -> None:
        output = pending.wait()
        self.device_us += output.device_time_us
        events.append(
            (
                time.perf_counter(),
                [
                    index
                    for index, count in zip(sampled, output.counts.tolist(), strict=True)
                    if count
                ],
            )
        )

    def _synchronize(self) -> None:
        if self.runner.device.type == "cuda":
            torch.cuda.synchronize()


def summary(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "mean": statistics.fmean(ordered),
        "median": statistics.median(ordered),
        "min": ordered[0],
        "p99": ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))],
        "max": ordered[-1],
        "n": len(ordered),
    }


def measure_decode(worker: WorkerAlone, name: str, batches: list[int]) -> list[Row]:
    rows: list[Row] = []
    steps = w.DECODE_STEPS
    for batch in batches:
        prompts = w.uniform_prompts(batch, w.DECODE_CONTEXT - steps // 2, seed=100 + batch)
        # Early prompts decode while late ones are in prefill, so some more are asked for.
        _, events = worker.run(prompts, [steps + 8 + batch // 8] * batch)
        gaps: list[float] = []
        contexts: list[float] = []
        have = [0] * batch
        last: float | None = None
        for at_s, got in events:
            was_full = all(have)
            for index in got:
                have[index] += 1
            if was_full and len(got) == batch:
                if last is not None:
                    gaps.append(at_s - last)
                    contexts.append(w.DECODE_CONTEXT - steps // 2 + statistics.fmean(have))
                last = at_s
            else:
                last = None
        # The edges overlap prefill and shutdown.
        gaps, contexts = gaps[2:-2], contexts[2:-2]
        step_s = summary(gaps)
        floor_s = w.step_bytes(name, batch, statistics.fmean(contexts)) / w.COPY_BYTES_PER_S
        rows.append(
            {
                "measure": "decode",
                "params": {"batch": batch},
                "context": statistics.fmean(contexts),
                "step_s": step_s,
                "floor_s": floor_s,
                "floor_pct": 100 * floor_s / step_s["median"],
                "host_us": statistics.median(worker.launch_us),
                "value": step_s["median"] * 1e3,
            }
        )
    return rows


def measure_ttft(worker: WorkerAlone, name: str, lengths: list[int]) -> list[Row]:
    rows: list[Row] = []
    for length in lengths:
        times: list[float] = []
        for repeat in range(17 if length <= 1024 else 9):
            prompts = w.uniform_prompts(1, length, seed=200 + length + repeat)
            started_s, events = worker.run(prompts, [1])
            if repeat > 1:
                first_s = next(at_s for at_s, got in events if got)
                times.append(first_s - started_s)
        ttft_s = summary(times)
        flops = w.prefill_flops(name, length)
        rows.append(
            {
                "measure": "ttft",
                "params": {"prompt": length},
                "ttft_s": ttft_s,
                "tok_s": length / ttft_s["median"],
                "matmul_pct": 100 * flops / ttft_s["median"] / w.MATMUL_FLOPS_PER_S,
                "value": ttft_s["median"] * 1e3,
            }
        )
    return rows


def measure_throughput(worker: WorkerAlone, repeats: int) -> list[Row]:
    prompts, outputs = w.throughput_requests(min(256, worker.limits.max_num_seqs))
    rows: list[Row] = []
    for repeat in range(repeats):
        started_s, events = worker.run(prompts, outputs)
        seconds = events[-1][0] - started_s
        num_outputs = sum(len(got) for _, got in events)
        if num_outputs != sum(outputs):
            raise RuntimeError(f"{num_outputs} tokens came, {sum(outputs)} were asked for")
        rows.append(
            {
                "measure": "throughput",
                "params": {"requests": len(prompts), "repeat": repeat},
                "output_tokens": num_outputs,
                "s": seconds,
                "steps": len(events),
                "output_tok_s": num_outputs / seconds,
                "total_tok_s": (num_outputs + sum(map(len, prompts))) / seconds,
                "host_us": statistics.median(worker.launch_us),
                "device_busy_pct": worker.device_us / seconds / 1e4,
                "value": num_outputs / seconds,
            }
        )
    return rows


def report(rows: list[Row]) -> None:
    print(f"{'model':13} {'measure':11} {'size':>6} {'ours':>9} {'must':>8} {'aim':>8} {'peer':>8}")
    for row in rows:
        size = next(iter(row["params"].values()))
        if row["measure"] == "breakdown":
            parts = "  ".join(f"{part} {us:.0f}" for part, us in row["us"].items())
            print(f"{row['model']:13} {'breakdown':11} {size:6} us: {parts}")
            continue
        targets = w.TARGETS.get((row["model"], row["measure"], size), (0.0, 0.0, 0.0))
        is_rate = row["measure"] == "throughput"
        form = "{:.0f}" if is_rate else "{:.2f}"
        texts = [form.format(value) if value else "-" for value in (row["value"], *targets)]
        must = targets[0]
        is_met = not must or (row["value"] >= must if is_rate else row["value"] <= must)
        notes = "" if is_met else "  MISSED"
        if "floor_pct" in row:
            notes += f"  {row['floor_pct']:.0f} % of the byte floor, host {row['host_us']:.0f} us"
        if "device_busy_pct" in row:
            notes += f"  {row['steps']} steps, device busy {row['device_busy_pct']:.0f} %"
        if "matmul_pct" in row:
            notes += f"  {row['matmul_pct']:.0f} % of the matrix ceiling"
        print(
            f"{row['model']:13} {row['measure']:11} {size:6} {texts[0]:>9} {texts[1]:>8} "
            f"{texts[2]:>8} {texts[3]:>8}{notes}"
        )


def machine() -> dict[str, str]:
    import triton

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    is_cuda = torch.cuda.is_available()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if is_cuda else platform.processor(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
        "command": " ".join(sys.argv),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["qwen3-0.6b", "llama-3.1-8b"])
    parser.add_argument("--measures", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--batches", nargs="+", type=int, default=list(w.DECODE_BATCHES))
    parser.add_argument("--prompts", nargs="+", type=int, default=list(w.PREFILL_LENGTHS))
    parser.add_argument("--repeats", type=int, default=1, help="of the throughput workload")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--num-blocks", type=int)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args(argv)
    sys.setswitchinterval(2e-4)
    about = machine()
    print(" ".join(f"{key}={value}" for key, value in about.items()))
    rows: list[Row] = []
    for name in options.models:
        with tempfile.TemporaryDirectory() as root:
            worker = WorkerAlone(name, options, Path(root))
        startup = " ".join(f"{key}={value:.1f}" for key, value in worker.startup.items())
        print(f"[{name}: {startup}; {worker.runner.kv_cache.describe()}]", flush=True)
        worker.run(w.uniform_prompts(2, 50, 1), [8, 8])
        for measure in options.measures:
            started_s = time.perf_counter()
            if measure == "decode":
                got = measure_decode(worker, name, options.batches)
            elif measure == "ttft":
                got = measure_ttft(worker, name, options.prompts)
            elif measure == "throughput":
                got = measure_throughput(worker, options.repeats)
            else:
                got = break_down(worker.runner, options.batches, w.DECODE_CONTEXT)
            for row in got:
                row.update(model=name, system=f"ours-{about['commit']}")
            rows += got
            print(f"[{name} {measure}: {time.perf_counter() - started_s:.1f} s]", flush=True)
            if options.json:
                results = {"machine": about, "startup": worker.startup, "engines": [{"rows": rows}]}
                options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        del worker
        gc.unfreeze()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    report(rows)


if __name__ == "__main__":
    main()
