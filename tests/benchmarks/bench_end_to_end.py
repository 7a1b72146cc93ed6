"""`make bench-end-to-end`: both processes and gRPC between them, beside the worker alone.

    python tests/benchmarks/bench_end_to_end.py [--models NAME ...] [--json FILE]

For every model, one after the other on the same GPU:

- a control plane and a worker with random weights, as processes with their default settings, and
  `pagewire bench` as a third: decode rows over Generate, then 256 requests at once over
  GenerateBatch and over Generate;
- `bench_worker.py` with the same 256 requests, its plans made beforehand: what the split costs is
  the difference.

Weights are random and texts meaningless; the tokenizer is that of the demo model or `--tokenizer`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import gpu_workloads as w
from bench_fleet import machine
from bench_fleet_stack import ROOT, cpu_s, starved_s

from demo.stack import ServingStack, StackConfig

if TYPE_CHECKING:
    from collections.abc import Generator

DEMO_MODEL = ROOT / ".pagewire" / "models" / "smollm2-135m-instruct"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
# Output tokens/s of 256 requests through both processes, and the share of the worker alone.
GOALS = {"qwen3-0.6b": 27_500, "llama-3.1-8b": 10_000}
SHARE_GOAL = 0.98
BURSTS = {
    "GenerateBatch": "--workload burst-256 --processes 4 --via batch",
    "Generate": "--workload burst-256 --processes 4",
}
COUNTERS = ("steps", "wasted_steps", "wasted_rows", "device_time_seconds", "plan_bytes", "stalls")
GAUGES = ("lookahead", "round_trip_seconds")

Row = dict[str, Any]


def write_model(name: str, root: Path, tokenizer: Path) -> Path:
    """A directory that both planes load: configuration, tokenizer, and no weights to speak of."""
    path = w.write_model(name, root)
    for file in TOKENIZER_FILES:
        shutil.copy(tokenizer / file, path)
    # A model is told from another by its weight files, so there is one, with a single number.
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    header = json.dumps({"nothing": entry}).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    return path


def read_metrics(text: str) -> dict[str, float]:
    """The server's values by name, without prefix, labels and `_total`; of one replica."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("pagewire_"):
            metric, _, value = line.rpartition(" ")
            name = metric.partition("{")[0].removeprefix("pagewire_").removesuffix("_total")
            values[name] = float(value)
    return values


class Deployment:
    """The two processes and what they have used so far."""

    def __init__(self, stack: ServingStack) -> None:
        self.stack = stack
        assert stack.control_plane is not None
        self._control_plane = stack.control_plane
        (self._worker,) = stack.workers.values()

    def counters(self) -> dict[str, float]:
        """The server's own, and the processor time of both."""
        url = f"http://127.0.0.1:{self.stack.ports.metrics}/metrics"
        with urllib.request.urlopen(url, timeout=30) as answer:
            values = read_metrics(answer.read().decode())
        got = {name: values.get(name, 0.0) for name in (*COUNTERS, *GAUGES)}
        return got | {
            "control_plane_cpu_s": cpu_s(self._control_plane.pid),
            "control_plane_starved_s": starved_s(self._control_plane.pid),
            "worker_cpu_s": cpu_s(self._worker.pid),
        }

    async def bench(self, arguments: str, root: Path) -> Row:
        """Run `pagewire bench` once; its results, and what the server did meanwhile."""
        file = root / "bench.json"
        before = self.counters()
        with gpu_clocks(root) as clocks:
            await self.stack.processes.run(
                "bench",
                [
                    *(sys.executable, "-m", "pagewire_client.cli", "bench"),
                    *("--server", self.stack.address, "--no-progress", "--json", str(file)),
                    *shlex.split(arguments),
                ],
            )
        after = self.counters()
        row: Row = {"arguments": arguments, **json.loads(file.read_text())["results"]}
        row["server"] = {
            name: after[name] - (0.0 if name in GAUGES else before[name]) for name in after
        }
        row["gpu"] = clocks
        return row


@contextlib.contextmanager
def gpu_clocks(root: Path) -> Generator[dict[str, float]]:
    """Fills what it yields, at its end, with the medians of clock (MHz) and power (W) under load.

    Samples below half of the highest power count as idle. Stays empty without nvidia-smi.
    """
    found: dict[str, float] = {}
    if shutil.which("nvidia-smi") is None:
        yield found
        return
    file = root / "smi.csv"
    query = ["--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "200"]
    with file.open("w") as out:
        sampler = subprocess.Popen(["nvidia-smi", *query], stdout=out)
    try:
        yield found
    finally:
        sampler.terminate()
        sampler.wait()
    found |= medians_under_load(file.read_text())


def medians_under_load(text: str) -> dict[str, float]:
    """Of lines "clock, power"; a line that was cut short is left out."""
    samples: list[tuple[float, float]] = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            clock_mhz, power_w = map(float, line.split(","))
            samples.append((clock_mhz, power_w))
    highest = max((power_w for _, power_w in samples), default=0.0)
    busy = [sample for sample in samples if sample[1] >= highest / 2]
    if not busy:
        return {}
    return {
        "clock_mhz": statistics.median(clock_mhz for clock_mhz, _ in busy),
        "power_w": statistics.median(power_w for _, power_w in busy),
    }


async def through_both(name: str, options: argparse.Namespace, root: Path) -> list[Row]:
    """The loads, one after the other, against one deployment."""
    is_gpu = options.device == "cuda"
    config = StackConfig(
        root=ROOT,
        base_dir=root,
        model_dir=write_model(name, root / "models", options.tokenizer),
        model_name=name,
        python=sys.executable,
        environment=dict(os.environ),
        store="memory://",
        device=options.device,
        random_ports=True,
        control_plane_args=tuple(shlex.split(options.control_plane_args)),
        worker_args=(
            # A simulated worker, for trying this without a GPU, has no weights at all.
            *(() if "--simulate" in options.worker_args else ("--load-format", "dummy")),
            *("--max-model-len", str(w.MAX_MODEL_LEN if is_gpu else 2304)),
            *shlex.split(options.worker_args),
        ),
    )
    loads = [f"--workload decode-rows --batch {batch}" for batch in options.batches]
    for _ in range(options.rounds):
        loads += BURSTS.values()
    rows: list[Row] = []
    started_s = time.monotonic()
    task = asyncio.current_task()
    assert task is not None
    # The processes lead sessions of their own: who ends this one ends them as well.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with ServingStack(config) as stack:
        stack.start_control_plane()
        stack.start_worker("worker")
        await stack.wait_until_ready(timeout_s=300.0)
        print(f"[{name}: ready after {time.monotonic() - started_s:.1f} s]", flush=True)
        deployment = Deployment(stack)
        for load in loads:
            rows.append({"model": name, **await deployment.bench(load, root)})
            print_row(rows[-1])
    return rows


def alone(name: str, options: argparse.Namespace, root: Path) -> list[Row]:
    """The same 256 requests on the worker alone."""
    file = root / "alone.json"
    subprocess.run(
        [
            *(sys.executable, str(ROOT / "tests/benchmarks/bench_worker.py"), "--models", name),
            *("--measures", "throughput", "--repeats", str(options.alone_rounds)),
            *("--device", options.device, "--json", str(file)),
        ],
        check=True,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    engine: Row = json.loads(file.read_text())["engines"][0]
    return engine["rows"]


def print_row(row: Row) -> None:
    server, client = row["server"], row["client"]
    seconds = row["seconds"]
    what = f"{row['output_tok_s']:.0f} tok/s"
    if "decode" in row:
        what = f"step {row['decode']['step_ms'] or float('nan'):.3f} ms, {what}"
    if "ttft_ms" in row:
        what += f", first token {row['ttft_ms']['p50']:.1f} ms"
    print(
        f"{row['model']:13} {row['arguments']:40} {what}; {seconds:.2f} s, "
        f"{row['requests']['good']} of {row['requests']['sent']} good, {server['steps']:.0f} steps "
        f"({server['wasted_steps']:.0f} wasted), device {server['device_time_seconds']:.2f} s, "
        f"lookahead {server['lookahead']:.0f}, round trip "
        f"{server['round_trip_seconds'] * 1e3:.2f} ms; CPU s: control plane "
        f"{server['control_plane_cpu_s']:.2f} (starved {server['control_plane_starved_s']:.2f}), "
        f"worker {server['worker_cpu_s']:.2f}, client {sum(client['cpu_s']):.2f}; {row['gpu']}",
        flush=True,
    )


def compare(rows: list[Row], alone_rows: list[Row]) -> list[Row]:
    """Per model and way to send: the median of the rounds, and its share of the worker alone."""
    found: list[Row] = []
    for name in dict.fromkeys(row["model"] for row in rows):
        rates = [row["output_tok_s"] for row in alone_rows if row["model"] == name]
        base = statistics.median(rates) if rates else None
        if base is not None:
            found.append({"model": name, "what": "worker alone", "tok_s": base, "share": None})
        for what, arguments in BURSTS.items():
            got = [
                row["output_tok_s"]
                for row in rows
                if row["model"] == name and row["arguments"] == arguments
            ]
            if got:
                rate = statistics.median(got)
                share = None if base is None else rate / base
                found.append({"model": name, "what": what, "tok_s": rate, "share": share})
    return found


def misses(row: Row) -> list[str]:
    """What a row of `compare` does not reach."""
    if row["what"] not in BURSTS:
        return []
    found: list[str] = []
    if row["share"] is not None and row["share"] < SHARE_GOAL:
        found.append(f"below {SHARE_GOAL:.0%} of the worker alone")
    if row["tok_s"] < (goal := GOALS.get(row["model"], 0)):
        found.append(f"below {goal} tok/s")
    return found


def report(rows: list[Row]) -> None:
    print(f"\n{'model':13} {'256 requests':15} {'tok/s':>8} {'of the worker alone':>20}")
    for row in rows:
        share = "-" if row["share"] is None else f"{row['share']:.1%}"
        notes = "; ".join(misses(row))
        print(f"{row['model']:13} {row['what']:15} {row['tok_s']:8.0f} {share:>20}  {notes}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["qwen3-0.6b", "llama-3.1-8b"])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 32, 128, 256])
    parser.add_argument("--rounds", type=int, default=2, help="of each load of 256 requests")
    parser.add_argument("--alone-rounds", type=int, default=2, help="of the worker alone; 0: none")
    parser.add_argument("--tokenizer", type=Path, default=DEMO_MODEL, metavar="DIR")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--control-plane-args", default="", help="further flags, one string")
    parser.add_argument("--worker-args", default="", help="likewise")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args(argv)
    if not (options.tokenizer / TOKENIZER_FILES[0]).is_file():
        parser.error(f"no tokenizer in {options.tokenizer}: run `make demo` once, or --tokenizer")
    about = machine()
    print(" ".join(f"{key}={value}" for key, value in about.items()))
    rows: list[Row] = []
    alone_rows: list[Row] = []
    for name in options.models:
        with tempfile.TemporaryDirectory(prefix="pagewire-bench-") as root:
            rows += asyncio.run(through_both(name, options, Path(root)))
            if options.alone_rounds:
                alone_rows += alone(name, options, Path(root))
        if options.json:
            results = {
                "machine": about,
                "rows": rows,
                "alone": alone_rows,
                "compared": compare(rows, alone_rows),
            }
            options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    report(compare(rows, alone_rows))


if __name__ == "__main__":
    main()
