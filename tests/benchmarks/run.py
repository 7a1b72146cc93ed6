"""`make bench`: what the split costs on this machine, and what the demo model does on it.

    python tests/benchmarks/run.py [--json FILE] [--skip-model]

Every figure about speed is a ratio to something measured in the same run or to a published peer,
because a shared machine's clock means little. Rows:

- the scheduler's cost per step and per admission (`bench_scheduler.py`);
- bytes of a plan in steady decode, against sending every row's whole block table;
- tokens/s of the demo model through client, control plane and worker, against transformers'
  `generate` in turns;
- resident memory of the control plane while it serves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "clients" / "python")]

import psutil  # noqa: E402 - this one and the following need the path
from pagewire_client import AsyncClient, build_request  # noqa: E402

from demo.model import ensure_demo_model  # noqa: E402
from demo.stack import ServingStack, StackConfig  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

PROMPT_TOKENS = 64
MAX_TOKENS = 64
BATCHES = (1, 8)
ROUNDS = 5
GOALS = {1: 1.0, 8: 1.3}


@dataclass(slots=True)
class Throughput:
    """Output tokens per second, one entry per round; prefill included on both sides."""

    batch: int
    ours: list[float] = field(default_factory=list)
    transformers: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return statistics.median(self.ours) / statistics.median(self.transformers)


def prompts(batch: int, seed: int) -> list[list[int]]:
    """Ordinary token ids, no two prompts alike, so that nothing is a prefix hit."""
    return [[100 + (seed * 7919 + row * 613 + i * 31) % 40_000 for i in range(PROMPT_TOKENS)]
            for row in range(batch)]  # fmt: skip


async def run_ours(client: AsyncClient, batch: int, seed: int) -> float:
    started_s = time.perf_counter()
    requests = [
        build_request(prompt, {"max_tokens": MAX_TOKENS, "temperature": 0.0, "ignore_eos": True})
        for prompt in prompts(batch, seed)
    ]
    results = await asyncio.gather(*(client.start(request).result() for request in requests))
    elapsed_s = time.perf_counter() - started_s
    return sum(len(result.token_ids) for result in results) / elapsed_s


class Transformers:
    """`generate` in a process of its own, as a user would run it, asked over a pipe."""

    def __init__(self, model_dir: Path, threads: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve-transformers", str(model_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def run(self, batch: int, seed: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([batch, seed]) + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait(timeout=30)


def serve_transformers(model_dir: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    print("ready", flush=True)
    for line in sys.stdin:
        batch, seed = json.loads(line)
        ids = torch.tensor(prompts(batch, seed))
        started_s = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=MAX_TOKENS,
                min_new_tokens=MAX_TOKENS,
                do_sample=False,
                pad_token_id=0,
            )
        elapsed_s = time.perf_counter() - started_s
        print(output[:, PROMPT_TOKENS:].numel() / elapsed_s, flush=True)


async def measure_model(threads: int) -> dict[str, object]:
    model_dir = ensure_demo_model(ROOT / ".pagewire" / "models", progress=print)
    throughputs = [Throughput(batch) for batch in BATCHES]
    with tempfile.TemporaryDirectory(prefix="pagewire-bench-") as base_dir:
        config = StackConfig(
            root=ROOT,
            base_dir=Path(base_dir),
            model_dir=model_dir,
            model_name="bench",
            python=sys.executable,
            environment=os.environ,
            store="memory://",
            random_ports=True,
            worker_args=("--threads", str(threads), "--max-model-len", "2048",
                         "--kv-cache-memory", "512MiB"),
        )  # fmt: skip
        reference = Transformers(model_dir, threads)
        async with ServingStack(config) as stack:
            control_plane = stack.start_control_plane()
            stack.start_worker("w0")
            await stack.wait_until_ready()
            async with stack.client() as client:
                for batch in BATCHES:  # once for caches and first allocations of both
                    await run_ours(client, batch, seed=99)
                    await asyncio.to_thread(reference.run, batch, 99)
                for seed in range(ROUNDS):
                    for throughput in throughputs:
                        batch = throughput.batch
                        throughput.ours.append(await run_ours(client, batch, seed))
                        throughput.transformers.append(
                            await asyncio.to_thread(reference.run, batch, seed)
                        )
                        print(
                            f"round {seed + 1}/{ROUNDS} batch {batch}: "
                            f"{throughput.ours[-1]:.1f} tok/s, transformers "
                            f"{throughput.transformers[-1]:.1f}",
                            flush=True,
                        )
                [replica] = (await client.stats()).replicas
            rss_mb = psutil.Process(control_plane.pid).memory_info().rss / 1e6
        reference.close()
    return {
        "throughput": [asdict(t) | {"ratio": t.ratio} for t in throughputs],
        "control_plane_rss_mb": rss_mb,
        "plans_sent": replica.plans_sent,
        "plan_bytes": replica.plan_bytes,
        "threads": threads,
    }


def measure_plan_bytes(rows: int, context: int, block_size: int, steps: int) -> dict[str, float]:
    """Bytes of steady decode plans, from the real scheduler and encoder, against whole tables."""
    from bench_scheduler import decoding

    from control_plane.plan import encode_plan

    bench = decoding(rows)
    sizes: list[int] = []
    for _ in range(steps):
        bench.order()
        bench.answer()
        sizes.append(encode_plan(bench.in_flight[-1]).ByteSize())
    whole = rows * -(-context // block_size) * 4
    return {
        "rows": rows,
        "context": context,
        "mean_plan_bytes": statistics.fmean(sizes),
        "max_plan_bytes": max(sizes),
        "whole_table_bytes": whole,
        "share": statistics.fmean(sizes) / whole,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write everything there")
    parser.add_argument("--skip-model", action="store_true", help="the scheduler's figures only")
    parser.add_argument(
        "--threads",
        type=int,
        default=max(1, (os.cpu_count() or 2) // 2),
        help="of the worker and of transformers alike (default: half the cores)",
    )
    parser.add_argument("--serve-transformers", metavar="DIR", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve_transformers:
        serve_transformers(args.serve_transformers)
        return 0
    sys.path.insert(0, str(Path(__file__).parent))
    import bench_scheduler

    print(f"python {platform.python_version()}, {os.cpu_count()} cores, {platform.machine()}, "
          f"load {os.getloadavg()[0]:.1f}, {time.strftime('%Y-%m-%d')}")  # fmt: skip
    bench_scheduler.main([])
    report: dict[str, object] = {"date": time.strftime("%Y-%m-%d")}
    plan = measure_plan_bytes(rows=256, context=4096, block_size=16, steps=64)
    report["plan"] = plan
    print(
        f"\nplan bytes per decode step, 256 rows: mean {plan['mean_plan_bytes']:.0f}, whole tables "
        f"at 4096 tokens {plan['whole_table_bytes']:.0f}: {100 * plan['share']:.2f} %\n"
    )
    if not args.skip_model:
        model = asyncio.run(measure_model(args.threads))
        report["model"] = model
        print(f"\n{'batch':>5} {'ours tok/s':>11} {'transformers':>13} {'ratio':>6} {'goal':>5}")
        for row in model["throughput"]:  # type: ignore[attr-defined]
            print(
                f"{row['batch']:>5} {statistics.median(row['ours']):>11.1f} "
                f"{statistics.median(row['transformers']):>13.1f} {row['ratio']:>6.2f} "
                f"{GOALS[row['batch']]:>5}"
            )
        print(f"control plane resident memory: {model['control_plane_rss_mb']:.0f} MB (goal < 400)")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
