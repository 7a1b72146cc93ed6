"""`make bench-scale`: many control planes, simulated; and what the real parts cost here.

    python -m tests.benchmarks.scale [--only TABLE ...] [--replicas N ...] [--quick] [--json FILE]

Tables: sizes, loads, keys, costs, hot, outages (simulated time: the same on any machine), index,
store, router, workers, check (measured on this machine; check: the simulation against real
processes). The simulated ones take some twelve minutes of processor time and 150 MB, the others
some five minutes; `--quick` leaves out check and the large fleets.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.benchmarks.scale import check, measured, scenarios, simulated_workers
from tests.benchmarks.scale.outcome import Outcome
from tests.benchmarks.scale.simulation import Setup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

SIMULATED = ("sizes", "loads", "keys", "costs", "hot", "outages")
MEASURED = ("index", "store", "router", "workers", "check")


class Progress:
    """One line on a terminal that says how far the run is; nothing elsewhere."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._began_s = time.monotonic()
        self._is_shown = sys.stderr.isatty()

    def __call__(self, share: float) -> None:
        if self._is_shown:
            elapsed_s = time.monotonic() - self._began_s
            print(f"\r{self._label:<30} {share:4.0%} {elapsed_s:4.0f} s", end="", file=sys.stderr)

    def close(self) -> None:
        if self._is_shown:
            print("\r" + " " * 50 + "\r", end="", file=sys.stderr)


def runs_of(table: str, options: argparse.Namespace) -> Iterator[scenarios.Run]:
    """The runs of one table."""
    planes, replicas = options.planes, options.fleet
    if table == "sizes":
        return scenarios.size_runs(tuple(options.replicas))
    function: Callable[[int, int], Iterator[scenarios.Run]] = {
        "loads": scenarios.load_runs,
        "keys": scenarios.key_runs,
        "costs": scenarios.cost_runs,
        "hot": scenarios.hot_runs,
        "outages": scenarios.outage_runs,
    }[table]
    return function(replicas, planes)


def simulate(
    table: str, runs: Iterable[scenarios.Run], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Perform a table's runs, a line as each ends."""
    print(f"\n{table} (simulated)\n{scenarios.HEADER}")
    rows: list[dict[str, Any]] = []
    for run in runs:
        progress = Progress(run.label)
        setup = replace(run.setup, seed=options.seed)
        row = scenarios.perform(scenarios.Run(run.label, setup), progress)
        progress.close()
        rows.append(row)
        print(scenarios.quality_row(run.label, Outcome(**row["outcome"])), flush=True)
        if table == "outages":
            by_second = " ".join(f"{rate:.0%}" for rate in row["hit_rate_by_second"][:14])
            print(f"{'':<26} hit rate by second: {by_second}", flush=True)
    if table == "sizes":
        print(f"\nrates (simulated)\n{scenarios.RATES_HEADER}")
        for row in rows:
            print(scenarios.rates_row(row["label"], Outcome(**row["outcome"])))
    return rows


def measure(table: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the real parts here."""
    print(f"\n{table} (measured)")
    if table == "index":
        rows = [measured.measure_index(1_000_000)]
    elif table == "store":
        rows = [measured.measure_store()]
    elif table == "workers":
        plan = simulated_workers.Plan()
        if options.quick:
            plan = simulated_workers.Plan(num_workers=40, concurrency=(40, 160), seconds=5)
        rows = [asyncio.run(simulated_workers.measure(plan, lambda line: print(line, flush=True)))]
    elif table == "check":
        setup = Setup(num_replicas=4, load=0.5, warm_up=40, measured=60, seed=options.seed)
        progress = Progress(table)
        rows = asyncio.run(check.compare(setup, slower=10.0, say=print, progress=progress))
        progress.close()
    else:
        rows = list(measured.measure_router())
    for row in rows:
        # Lists were printed line by line, as they came.
        figures = {name: value for name, value in row.items() if not isinstance(value, list)}
        texts = [
            f"{name} {value if isinstance(value, str) else f'{value:.5g}'}"
            for name, value in figures.items()
        ]
        print("  ".join(texts), flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make bench-scale",
        description="Many control planes, simulated, and what the real parts cost.",
    )
    parser.add_argument("--only", nargs="+", choices=SIMULATED + MEASURED, help="these tables")
    parser.add_argument(
        "--replicas",
        nargs="+",
        type=int,
        default=list(scenarios.REPLICAS),
        help="fleets of the table of sizes (default: %(default)s)",
    )
    parser.add_argument(
        "--fleet", type=int, default=200, help="replicas of the other tables (default: %(default)s)"
    )
    parser.add_argument(
        "--planes", type=int, default=16, help="their control planes (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the workload")
    parser.add_argument("--quick", action="store_true", help="small fleets, without check")
    parser.add_argument("--json", type=Path, help="also write everything there")
    options = parser.parse_args(argv)
    if options.quick:
        options.replicas, options.fleet, options.planes = [10, 50], 48, 4
    tables = options.only or [
        t for t in SIMULATED + MEASURED if not (options.quick and t == "check")
    ]
    print(f"python {platform.python_version()}, {platform.machine()}, {time.strftime('%Y-%m-%d')}, "
          f"seed {options.seed}")  # fmt: skip
    report: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "seed": options.seed}
    for table in tables:
        if table in SIMULATED:
            report[table] = simulate(table, runs_of(table, options), options)
        else:
            report[table] = measure(table, options)
        if table == "outages":
            report["ring"] = [scenarios.moved_keys(planes) for planes in (4, 16, 64)]
            print("\nring: share of keys that move")
            for row in report["ring"]:
                print("  ".join(f"{name} {value:.4g}" for name, value in row.items()))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
