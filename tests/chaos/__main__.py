"""`make chaos MINUTES=10 SEED=1`: faults for that long, then a report; exit 1 if it found any."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from chaos.chaos_report import render
from chaos.chaos_run import ChaosConfig, ChaosReport, run_chaos

from demo.leftovers import AlreadyRunningError, RunDirectory

if TYPE_CHECKING:
    from collections.abc import Callable

_BASE_DIR = Path(__file__).resolve().parents[2] / ".pagewire" / "chaos"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of faults (default: 10)")
    parser.add_argument(
        "--seed", type=int, default=None, help="of faults and requests (default: from the clock)"
    )
    parser.add_argument(
        "--gap",
        type=float,
        default=1.5,
        help="seconds between faults of a lane (default: 1.5)",
    )
    parser.add_argument("--lanes", type=int, default=16, help="concurrent streams (default: 16)")
    parser.add_argument(
        "--dir", type=Path, default=_BASE_DIR, help="logs and data (default: .pagewire/chaos)"
    )
    parser.add_argument("--quiet", action="store_true", help="no line per fault")
    args = parser.parse_args()
    seed = int(time.time()) % 1_000_000 if args.seed is None else args.seed
    started_at = time.monotonic()

    def log(line: str) -> None:
        if not args.quiet or not line.startswith("fault "):
            print(f"{time.monotonic() - started_at:7.1f} s  {line}", flush=True)

    print(f"seed {seed}, {args.minutes:g} minutes, logs in {args.dir}/system/logs", flush=True)
    config = ChaosConfig(
        base_dir=args.dir,
        seed=seed,
        seconds=args.minutes * 60,
        num_lanes=args.lanes,
        mean_gap_s=args.gap,
    )
    try:
        with RunDirectory(args.dir / "run", command="make chaos") as registry:
            registry.end_leftovers(log)
            report = asyncio.run(_run(config, log, registry))
    except asyncio.CancelledError:
        print("interrupted", file=sys.stderr)
        return 130
    except AlreadyRunningError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"\n{render(report)}", flush=True)
    return 1 if report.findings.any else 0


async def _run(
    config: ChaosConfig, log: Callable[[str], None], registry: RunDirectory
) -> ChaosReport:
    """Run it so that a signal ends it in good order, children first."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await run_chaos(config, log, registry)


if __name__ == "__main__":
    sys.exit(main())
