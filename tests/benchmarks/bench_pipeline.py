"""`make bench-rtt`: what a long way between control plane and worker costs.

    python tests/benchmarks/bench_pipeline.py [--rounds 3] [--json FILE]

Control plane, simulated worker and the link between them (`demo/link.py`) are processes of their
own. For each step time and number of rows, one after the other in every round, so that a busy
moment of the machine falls on all of them alike:

- rows decode over GenerateBatch, all but a few. Throughput is what the server counts in a window;
- the few are short requests over `Generate`, one after the other: time to the first token while the
  others decode, and the time between tokens.

Then, with nothing else running: the time to the first token of a single request.
Ratios are to 0 ms of the same round; the median over the rounds counts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_fleet import machine
from bench_fleet_stack import SimulatedStack
from bench_pipeline_link import LinkProcess
from pagewire_client.bench.report import spread

ROUND_TRIPS_MS = (0.0, 1.0, 5.0, 20.0)
STEPS_MS = (8.0, 2.5)
ROWS = (64, 256)
PROBES = 2
PROBE_TOKENS = 16
# Least share of the throughput at 0 ms.
GOALS = {5.0: 0.98, 20.0: 0.95}
# Most round trips that a first token may come later.
TTFT_GOAL = 2.0

Row = dict[str, Any]


async def window(stack: SimulatedStack, options: argparse.Namespace, round_trip_ms: float) -> Row:
    """Throughput and probes for a while, with rows decoding already."""
    await asyncio.sleep(options.settle_s)
    before = await stack.counters()
    probes = stack.load(
        concurrency=PROBES,
        num_requests=100_000,
        duration_s=options.seconds,
        prompt_lengths="16",
        output_lengths=str(PROBE_TOKENS),
        seed=int(before.at_s),
    )
    outcome = await probes.run()
    after = await stack.counters()
    good = [record for record in outcome.records if not record.reason]
    seconds = after.at_s - before.at_s
    return {
        "round_trip_ms": round_trip_ms,
        "tok_s": (after.tokens - before.tokens) / seconds,
        "steps_s": (after.plans - before.plans) / seconds,
        "busy_ttft_ms": spread(r.first_s - r.sent_s for r in good if r.first_s is not None),
        "itl_ms": {
            f"p{percent}": outcome.gaps.percentile(percent) * 1e3 for percent in (50, 90, 99)
        },
        "bytes_per_step": (after.plan_bytes - before.plan_bytes)
        / max(after.plans - before.plans, 1),
        "control_plane_busy": (after.cpu_s - before.cpu_s) / seconds,
        "control_plane_starved": (after.starved_s - before.starved_s) / seconds,
    }


async def idle_ttft(stack: SimulatedStack, options: argparse.Namespace) -> Row:
    """First tokens of single requests, nothing else running."""
    load = stack.load(
        concurrency=1,
        num_requests=options.singles,
        prompt_lengths="16",
        output_lengths="2",
        warmup=2,
    )
    outcome = await load.run()
    return spread(r.first_s - r.sent_s for r in outcome.records if r.first_s is not None)


async def measure_shape(
    options: argparse.Namespace, step_ms: float, rows: int
) -> tuple[list[list[Row]], dict[float, float]]:
    """Per round a row per round trip; and what the link really takes."""
    per_window_s = options.seconds + options.settle_s + 5.0
    num_steps = int(per_window_s * len(options.round_trips) * 1000 / step_ms)
    max_tokens = min(num_steps, 7000)
    blocks = rows * (-(-(max_tokens + 16) // 16) + 1) + 600
    link: LinkProcess | None = None
    rounds: list[list[Row]] = []
    measured: dict[float, float] = {}
    async with contextlib.AsyncExitStack() as exits:

        async def through_link(port: int) -> int:
            nonlocal link
            link = await exits.enter_async_context(LinkProcess(port))
            return link.port

        stack = await exits.enter_async_context(
            SimulatedStack(
                profile=f"{step_ms:g}ms",
                control_plane_args=tuple(shlex.split(options.control_plane_args)),
                worker_args=(
                    *("--max-num-seqs", str(rows), "--num-blocks", str(blocks)),
                    *("--log-level", "warning"),
                ),
                worker_port=through_link,
            )
        )
        assert link is not None
        for number in range(options.rounds):
            cells: list[Row] = []
            # Forwards and backwards: a machine that slows down favours nobody.
            order = options.round_trips[:: 1 if number % 2 == 0 else -1]
            for round_trip_ms in order:
                measured[round_trip_ms] = await link.set_round_trip(round_trip_ms)
                single = await idle_ttft(stack, options)
                async with stack.decoding(rows - PROBES, max_tokens=max_tokens):
                    cell = await window(stack, options, round_trip_ms)
                cells.append(cell | {"idle_ttft_ms": single})
            cells.sort(key=lambda cell: cell["round_trip_ms"])
            rounds.append(cells)
            rates = ", ".join(f"{c['round_trip_ms']:g} ms {c['tok_s']:.0f}" for c in cells)
            print(f"[{step_ms:g} ms x {rows}, round {number + 1}: tok/s {rates}]", flush=True)
    return rounds, measured


def summarize(
    rounds: list[list[Row]], measured: dict[float, float], step_ms: float, rows: int
) -> list[Row]:
    """A row per round trip: medians over the rounds, ratios within them."""
    summary: list[Row] = []
    for index, first in enumerate(rounds[0]):
        round_trip_ms = first["round_trip_ms"]
        cells = [cells[index] for cells in rounds]

        def median(values: list[float | None]) -> float:
            return statistics.median([value for value in values if value is not None] or [-1.0])

        def later(name: str, cells: list[Row] = cells) -> float:
            return statistics.median(
                cell[name]["p50"] - base[0][name]["p50"]
                for cell, base in zip(cells, rounds, strict=True)
            )

        summary.append(
            {
                "step_ms": step_ms,
                "rows": rows,
                "round_trip_ms": round_trip_ms,
                "link_ms": measured[round_trip_ms],
                "tok_s": median([cell["tok_s"] for cell in cells]),
                "of_device": median([cell["steps_s"] * step_ms / 1000 for cell in cells]),
                "ratio": median(
                    [c["tok_s"] / base[0]["tok_s"] for c, base in zip(cells, rounds, strict=True)]
                ),
                "idle_ttft_ms": median([cell["idle_ttft_ms"]["p50"] for cell in cells]),
                "busy_ttft_ms": median([cell["busy_ttft_ms"]["p50"] for cell in cells]),
                "idle_ttft_later_ms": later("idle_ttft_ms"),
                "busy_ttft_later_ms": later("busy_ttft_ms"),
                "itl_ms": median([cell["itl_ms"]["p50"] for cell in cells]),
                "itl_p99_ms": median([cell["itl_ms"]["p99"] for cell in cells]),
                "bytes_per_step": median([cell["bytes_per_step"] for cell in cells]),
                "busy": median([cell["control_plane_busy"] for cell in cells]),
                "starved": median([cell["control_plane_starved"] for cell in cells]),
            }
        )
    return summary


def verdict(row: Row) -> str:
    """What misses its goal."""
    misses: list[str] = []
    goal = GOALS.get(row["round_trip_ms"])
    if goal is not None and row["ratio"] < goal:
        misses.append(f"throughput below {goal:.0%}")
    base_ms = row["base_link_ms"]
    misses += [
        f"{name} first token later by more than {TTFT_GOAL:g} round trips"
        for name in ("idle", "busy")
        if row[f"{name}_ttft_later_ms"] > TTFT_GOAL * (row["link_ms"] - base_ms) + 1.0
    ]
    return "; ".join(misses)


def report(rows: list[Row]) -> None:
    print(
        f"\n{'step':>6} {'rows':>4} {'RTT':>5} {'link':>6} {'tok/s':>8} {'device':>7} {'ratio':>7} "
        f"{'TTFT idle':>9} {'later':>6} {'busy':>7} {'later':>6} {'ITL':>6} {'p99':>6} {'core':>5} "
        f"{'starved':>7}"
    )
    for row in rows:
        print(
            f"{row['step_ms']:6g} {row['rows']:4} {row['round_trip_ms']:5g} {row['link_ms']:6.1f} "
            f"{row['tok_s']:8.0f} {row['of_device']:7.1%} {row['ratio']:7.1%} "
            f"{row['idle_ttft_ms']:9.1f} {row['idle_ttft_later_ms']:6.1f} "
            f"{row['busy_ttft_ms']:7.1f} {row['busy_ttft_later_ms']:6.1f} {row['itl_ms']:6.1f} "
            f"{row['itl_p99_ms']:6.1f} {row['busy']:5.0%} {row['starved']:7.0%}  {verdict(row)}"
        )
    print("RTT: asked for; link: an echo of a byte. TTFT and ITL in ms, later: than over 0 ms.")


async def measure(options: argparse.Namespace) -> Row:
    summary: list[Row] = []
    raw: list[Row] = []
    for step_ms in options.steps_ms:
        for rows in options.rows:
            rounds, measured = await measure_shape(options, step_ms, rows)
            part = summarize(rounds, measured, step_ms, rows)
            for row in part:
                row["base_link_ms"] = part[0]["link_ms"]
            summary += part
            raw.append({"step_ms": step_ms, "rows": rows, "rounds": rounds})
    report(summary)
    return {
        "machine": machine(),
        "control_plane_args": options.control_plane_args,
        "rounds": options.rounds,
        "summary": summary,
        "raw": raw,
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--control-plane-args", default="", help="such as --control-plane-args='--lookahead 4'"
    )
    parser.add_argument("--rounds", type=int, default=3, help="over all round trips")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a window")
    parser.add_argument("--settle-s", type=float, default=1.0, help="before a window")
    parser.add_argument("--singles", type=int, default=15, help="requests for the idle first token")
    parser.add_argument(
        "--steps-ms", type=float, nargs="+", default=list(STEPS_MS), help="time of a step"
    )
    parser.add_argument(
        "--rows", type=int, nargs="+", default=list(ROWS), help="that decode at once"
    )
    parser.add_argument(
        "--round-trips", type=float, nargs="+", default=list(ROUND_TRIPS_MS), help="in ms"
    )
    parser.add_argument("--json", type=Path, help="file for the result")
    options = parser.parse_args(argv)
    if options.round_trips[0] != min(options.round_trips):
        parser.error("the smallest of --round-trips comes first: ratios are to it")
    result = asyncio.run(measure(options))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
