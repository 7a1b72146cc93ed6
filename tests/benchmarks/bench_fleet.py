"""`make bench-fleet`: what one control-plane process on one core can keep busy.

    python tests/benchmarks/bench_fleet.py [--workers N] [--rows N] [--steps-per-s N] [--json FILE]

Simulated workers, the real protocol, everything in processes of its own, the control plane pinned
to one core. On a machine with few cores workers and load generator compete with it, so that what is
sustained here and now says little; processor time of the control plane says more. So:

1. Decode cells: W workers x R rows at a step time, no request comes or goes: the processor time of
   the control plane over the window, per step and per token. Token-only: no text is made before it
   is sent. More steps a second cost less each: one turn of the event loop then serves several.
   The goal's own shape comes last and is what counts; two cells of equal workers tell what a row
   costs and what a step does whatever runs in it.
2. A token's text: the detokenizer and the response of 500 tokens alone, in this process.
3. Request cells: a closed loop over GenerateBatch. What the costs so far do not explain of the one
   with short outputs is that of a request (admission, prompt, response); the one with long outputs
   checks it: how much of its time all costs together explain.
4. Stream cells: `Generate` with the server's own flush interval and two others: the same for the
   cost of a message.

From those: tokens per second of one core at the goal's shape, token-only, with text and requests of
500 tokens, and streamed.
Processor time includes what sharing caches and hyperthreads costs, so a quiet machine does better.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_fleet_stack import ROOT, Counters, SimulatedStack

from control_plane.model_catalog import load_model
from data_plane.simulated_worker import read_token_pool
from demo.model import ensure_demo_model
from protos.pagewire.v1 import inference_pb2

GOAL_TOK_S = 410_000
# (workers, rows) of the decode cells, beside the goal's own shape.
DECODE_CELLS = ((1, 16), (1, 256), (4, 64), (4, 256), (8, 256))
# Of equal workers, as many as the request cells have.
BASE_WORKERS = 4
PROMPT_LENGTH = 64
OUTPUT_LENGTHS = (50, 500)
# 0: the server's own.
FLUSHES_MS = (0.0, 20.0, 200.0)

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Processor time of the control plane, in microseconds, at the load of the base cells.

    Attributes:
        step: A step, whatever runs in it: plan, result, messages.
        row: A row in it: a token.
        request: A request over GenerateBatch with a prompt of 64 tokens.
        text: A token's text, made once for many.
        message: A message of a stream with its tokens' text, beyond that.
    """

    step: float
    row: float
    request: float = 0.0
    text: float = 0.0
    message: float = 0.0


def between(before: Counters, after: Counters) -> Row:
    seconds = after.at_s - before.at_s
    cpu_s = after.cpu_s - before.cpu_s
    tokens, steps = after.tokens - before.tokens, after.plans - before.plans
    return {
        "seconds": seconds,
        "cpu_s": cpu_s,
        "busy": cpu_s / seconds,
        "starved": (after.starved_s - before.starved_s) / seconds,
        "worker_cpu_s": after.worker_cpu_s - before.worker_cpu_s,
        "tokens": tokens,
        "steps": steps,
        "tok_s": tokens / seconds,
        "steps_s": steps / seconds,
        "us_per_step": cpu_s / max(steps, 1) * 1e6,
        "us_per_token": cpu_s / max(tokens, 1) * 1e6,
        "bytes_per_step": (after.plan_bytes - before.plan_bytes) / max(steps, 1),
    }


async def decode_cell(
    options: argparse.Namespace, workers: int, rows: int, profile: str | None = None
) -> Row:
    step_ms = 1000 / options.steps_per_s
    # Rows start over some time; none may end before the window does.
    num_steps = int((options.seconds + options.ramp_s) * options.steps_per_s)
    # Twice the rows: the router need not spread a burst evenly for all of it to run at once.
    slots = rows if workers == 1 else 2 * rows
    blocks = slots * (-(-(num_steps + 16) // 16) + 1) + 2
    async with SimulatedStack(
        profile=f"{step_ms:g}ms",
        num_workers=workers,
        num_processes=min(workers, options.worker_processes),
        pinned_to=options.core,
        control_plane_args=tuple(shlex.split(options.control_plane_args)),
        worker_args=(
            *("--max-num-seqs", str(slots), "--num-blocks", str(max(blocks, 600))),
            *("--log-level", "warning"),
        ),
    ) as stack:
        async with stack.decoding(workers * rows, max_tokens=min(num_steps, 8000)):
            before = await stack.counters()
            if profile is not None and stack.control_plane is not None:
                await record_profile(stack.control_plane.pid, profile, options.seconds)
            else:
                await asyncio.sleep(options.seconds)
            after = await stack.counters()
        if after.running != workers * rows:
            raise RuntimeError(
                f"{after.running} of {workers * rows} rows were left at the end: raise --ramp-s"
            )
    wanted_steps = workers * options.steps_per_s * (after.at_s - before.at_s)
    row = between(before, after)
    return row | {
        "cell": "decode",
        "workers": workers,
        "rows": rows,
        "kept_busy": row["steps"] / wanted_steps,
    }


async def request_cell(options: argparse.Namespace, output: int, **sending: Any) -> Row:
    """A closed loop of requests on four workers; everything from the first to the last counts."""
    async with SimulatedStack(
        profile=f"{1000 / options.steps_per_s:g}ms",
        num_workers=BASE_WORKERS,
        num_processes=min(BASE_WORKERS, options.worker_processes),
        pinned_to=options.core,
        control_plane_args=tuple(shlex.split(options.control_plane_args)),
        worker_args=(*("--max-num-seqs", "64", "--num-blocks", "8000", "--log-level", "warning"),),
    ) as stack:
        load = stack.load(
            concurrency=256,
            num_requests=max(512, options.request_tokens // output),
            prompt_lengths=str(PROMPT_LENGTH),
            output_lengths=str(output),
            timeout_s=3600.0,
            channels=4,
            **sending,
        )
        before = await stack.counters()
        outcome = await load.run()
        after = await stack.counters()
    failed = Counter(record.reason for record in outcome.records if record.reason)
    if failed:
        raise RuntimeError(f"requests failed: {dict(failed)}")
    return between(before, after) | {
        "cell": "requests" if sending["via"] == "batch" else "streams",
        "requests": len(outcome.records),
        "messages": sum(record.num_messages for record in outcome.records),
        "output": output,
        "flush_ms": sending.get("flush_ms", 0.0),
    }


def fit(decode: list[Row], requests: list[Row], streams: list[Row]) -> Costs:
    """The costs that explain the cells, none of them negative."""
    base = sorted(
        (cell for cell in decode if cell["workers"] == BASE_WORKERS), key=lambda cell: cell["rows"]
    ) or sorted(decode, key=lambda cell: cell["rows"])
    few, many = base[0], base[-1]
    rows = [cell["tokens"] / cell["steps"] for cell in (few, many)]
    row = max(0.0, (many["us_per_step"] - few["us_per_step"]) / max(rows[1] - rows[0], 1.0))
    step = few["us_per_step"] - row * rows[0]
    if not requests:
        return Costs(step=step, row=row)
    text = text_us()
    short = requests[0]
    request = (_left(short, step, row) - text * short["tokens"]) / short["requests"]
    request = max(0.0, request)
    left = sum(
        _left(cell, step, row) - request * cell["requests"] - text * cell["tokens"]
        for cell in streams
    )
    num_messages = sum(cell["messages"] for cell in streams)
    message = max(0.0, left / num_messages) if num_messages else 0.0
    return Costs(step=step, row=row, request=request, text=text, message=message)


def text_us() -> float:
    """Microseconds of processor time that a token's text and its place in a response take."""
    model_dir = ensure_demo_model(ROOT / ".pagewire" / "models", progress=print)
    tokenizer = load_model(model_dir, "bench").tokenizer
    pool = read_token_pool(model_dir, 49_152).tolist()
    rng = random.Random(0)
    outputs = [rng.choices(pool, k=500) for _ in range(200)]
    started_s = time.process_time()
    for ids in outputs:
        detokenizer = tokenizer.detokenizer([1, 2, 3], skip_special_tokens=True)
        detokenizer.extend(ids)
        output = inference_pb2.SequenceOutput(text=detokenizer.text(final=True), token_ids=ids)
        inference_pb2.GenerateResponse(outputs=[output]).SerializeToString()
    return (time.process_time() - started_s) / (len(outputs) * 500) * 1e6


def explained(costs: Costs, cell: Row) -> float:
    """The share of a request cell's time that the costs add up to."""
    time_us = costs.step * cell["steps"] + (costs.row + costs.text) * cell["tokens"]
    time_us += costs.request * cell["requests"] + costs.message * cell["messages"]
    return time_us / (cell["cpu_s"] * 1e6)


def _left(cell: Row, step: float, row: float) -> float:
    return cell["cpu_s"] * 1e6 - step * cell["steps"] - row * cell["tokens"]


def derived(costs: Costs, goal: Row) -> Row:
    """Tokens per second of one core that does nothing else, at the shape of the goal's cell."""
    token = goal["us_per_token"]
    with_text = token + costs.text + costs.request / 500
    return {
        "workers": goal["workers"],
        "rows": goal["rows"],
        "token_only_tok_s": 1e6 / token,
        "with_text_tok_s": 1e6 / with_text,
        # Ten tokens a message, which is a flush every 100 ms at 100 steps a second.
        "streamed_tok_s": 1e6 / (with_text + costs.message / 10),
    }


async def record_profile(pid: int, path: str, seconds: float) -> None:
    """py-spy over the window, if it is installed."""
    tool = shutil.which("py-spy") or str(Path(sys.executable).with_name("py-spy"))
    process = await asyncio.create_subprocess_exec(
        *(tool, "record", "--pid", str(pid), "--duration", str(int(seconds)), "--rate", "200"),
        *("--gil", "--nonblocking", "--format", "raw", "--output", path),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    await process.wait()


def top(path: str, count: int = 10) -> tuple[list[Row], list[Row]]:
    """The functions that hold the interpreter most: by themselves, and with what they call."""
    own: Counter[str] = Counter()
    whole: Counter[str] = Counter()
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        stack, _, samples = line.rpartition(" ")
        # Lines of one function belong together.
        frames = [f"{frame.rpartition(':')[0]})" for frame in stack.split(";")]
        own[frames[-1]] += int(samples)
        for frame in set(frames):
            whole[frame] += int(samples)
    total = max(sum(own.values()), 1)

    def rows(counted: Counter[str]) -> list[Row]:
        ours = [
            (name, n)
            for name, n in counted.most_common()
            if "control_plane/" in name and "__main__" not in name
        ]
        return [{"function": name, "share": n / total} for name, n in ours[:count]]

    return rows(own), rows(whole)


def report(cells: list[Row], costs: Costs, figures: Row) -> None:
    print(
        f"\n{'decode cell':16} {'tok/s':>9} {'kept busy':>9} {'core':>6} {'starved':>8} "
        f"{'us/step':>8} {'us/token':>8} {'B/step':>7}"
    )
    for cell in cells:
        if cell["cell"] != "decode":
            continue
        name = f"{cell['workers']} x {cell['rows']}"
        print(
            f"{name:16} {cell['tok_s']:9.0f} {cell['kept_busy']:9.1%} {cell['busy']:6.0%} "
            f"{cell['starved']:8.0%} {cell['us_per_step']:8.0f} {cell['us_per_token']:8.2f} "
            f"{cell['bytes_per_step']:7.0f}"
        )
    print(
        f"\n{'request cell':24} {'tok/s':>9} {'core':>6} {'requests':>9} {'messages':>9} "
        f"{'cpu s':>7} {'us/token':>8} {'explained':>9}"
    )
    for cell in cells:
        if cell["cell"] == "decode":
            continue
        name = f"{cell['cell']} {cell['output']} out"
        name += f" {cell['flush_ms']:g} ms" if cell["flush_ms"] else ""
        print(
            f"{name:24} {cell['tok_s']:9.0f} {cell['busy']:6.0%} {cell['requests']:9} "
            f"{cell['messages']:9} {cell['cpu_s']:7.2f} {cell['us_per_token']:8.2f} "
            f"{explained(costs, cell):9.0%}"
        )
    parts = ", ".join(f"{name} {value:.2f}" for name, value in asdict(costs).items())
    print(f"\ncosts of the control plane in us: {parts}")
    print(
        f"one core at {figures['workers']} x {figures['rows']}: token-only "
        f"{figures['token_only_tok_s']:.0f} tok/s (goal {GOAL_TOK_S}), with text "
        f"{figures['with_text_tok_s']:.0f}, streamed in tens {figures['streamed_tok_s']:.0f}"
    )


def machine() -> Row:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "commit": commit.stdout.strip(),
    }


async def measure(options: argparse.Namespace) -> Row:
    cells: list[Row] = []
    shapes = list(dict.fromkeys([*DECODE_CELLS, (options.workers, options.rows)]))
    if options.quick:
        shapes = [(1, 16), (2, 64)]
    for workers, rows in shapes:
        cells.append(await decode_cell(options, workers, rows))
        print(f"[{workers} x {rows}: {cells[-1]['us_per_step']:.0f} us/step]", flush=True)
    decode = list(cells)
    requests: list[Row] = []
    streams: list[Row] = []
    if not options.decode_only:
        for output in OUTPUT_LENGTHS:
            requests.append(await request_cell(options, output, via="batch"))
            print(f"[requests of {output}: {requests[-1]['cpu_s']:.2f} s]", flush=True)
        for flush_ms in FLUSHES_MS:
            streams.append(
                await request_cell(options, OUTPUT_LENGTHS[-1], via="stream", flush_ms=flush_ms)
            )
            print(f"[streams at {flush_ms:g} ms: {streams[-1]['cpu_s']:.2f} s]", flush=True)
    cells += requests + streams
    costs = fit(decode, requests, streams)
    figures = derived(costs, decode[-1])
    report(cells, costs, figures)
    result: Row = {"machine": machine(), "cells": cells, "costs_us": asdict(costs)}
    result["derived"] = figures
    if options.profile:
        with tempfile.TemporaryDirectory() as directory:
            path = str(Path(directory, "profile.txt"))
            await decode_cell(options, min(4, options.workers), options.rows, path)
            own, whole = top(path)
        for title, rows in (("own time", own), ("with what it calls", whole)):
            print(f"\n{title}, share of the interpreter's time in steady decode:")
            for row in rows:
                print(f"  {row['share']:6.1%} {row['function']}")
        result["profile"] = {"own": own, "whole": whole}
    return result


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=16, help="of the goal's shape")
    parser.add_argument("--rows", type=int, default=256, help="of each worker")
    parser.add_argument("--steps-per-s", type=int, default=100, help="of each worker")
    parser.add_argument(
        "--control-plane-args", default="", help="such as --control-plane-args='--lookahead 4'"
    )
    parser.add_argument(
        "--worker-processes", type=int, default=2, help="that share the simulated workers"
    )
    parser.add_argument("--core", type=int, default=0, help="the control plane's; -1: any")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a decode window")
    parser.add_argument("--ramp-s", type=float, default=25.0, help="for all rows to start")
    parser.add_argument("--request-tokens", type=int, default=300_000, help="of a request cell")
    parser.add_argument("--decode-only", action="store_true", help="no request cells")
    parser.add_argument("--quick", action="store_true", help="two small cells, to try it")
    parser.add_argument("--profile", action="store_true", help="the ten hottest functions (py-spy)")
    parser.add_argument("--json", type=Path, help="file for the result")
    options = parser.parse_args(argv)
    options.core = None if options.core < 0 else options.core
    result = asyncio.run(measure(options))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
