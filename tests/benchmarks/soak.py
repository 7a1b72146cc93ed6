"""`make soak`: is the memory of the control plane flat over many requests?

    python tests/benchmarks/soak.py [--requests 50000] [--seed 0] [--json FILE] [--store memory]

A real control-plane process with a Valkey server, fake workers in a second process, clients in this
one, all over gRPC on loopback. The mix: whole answers, cancelled and unread streams, deadlines,
refused requests, resumes that take over a live id, stop strings, texts and chats, batches that are
cut; prefixes that are shared, under salts that are shared or of one request alone; workers whose
streams break, whose steps fail, that are killed, drained and come back as new processes. Whatever
comes back is compared with what an undisturbed worker gives.

The verdict is the slope of the resident memory after the warm-up, as a share of what the process
has: a leak of 100 bytes per request would be seen. Exit code 1 if it is not flat. What is known to
grow is in gRPC: docs/performance.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "benchmarks")]

from soak_clients import Clients  # noqa: E402 - this and the following need the path
from tiny_model_dir import EOS_TOKEN_ID, write_tiny_model  # noqa: E402
from valkey_process import ValkeyProcess  # noqa: E402

NUM_SAMPLES = 10
# Pools, caches and connections fill until then.
WARM_UP_SHARE = 0.3
# Growth from the end of the warm-up to the end, by the fitted line, that still counts as flat. Half
# of it is what gRPC does not give back of every cancelled call (grpc/grpc#43360): about 200 bytes.
MAX_GROWTH = 0.03


@dataclass(slots=True)
class Sample:
    """The control plane at one moment. Sizes in KiB."""

    num_requests: int
    rss_kib: int
    num_threads: int
    num_files: int
    seconds: float


@dataclass(slots=True)
class Report:
    """What `--json` writes."""

    requests: int
    seed: int
    date: str
    machine: str
    samples: list[Sample] = field(default_factory=list[Sample])
    bytes_per_request: float = 0.0
    growth: float = 0.0

    @property
    def is_flat(self) -> bool:
        return self.growth <= MAX_GROWTH

    def judge(self) -> None:
        """Fit a line through everything after the warm-up."""
        warm = [s for s in self.samples if s.num_requests >= WARM_UP_SHARE * self.requests]
        line = statistics.linear_regression(
            [s.num_requests for s in warm], [s.rss_kib for s in warm]
        )
        self.bytes_per_request = line.slope * 1024
        num_requests = warm[-1].num_requests - warm[0].num_requests
        self.growth = line.slope * num_requests / statistics.mean(s.rss_kib for s in warm)


def sample(pid: int, num_requests: int, seconds: float) -> Sample:
    status = Path(f"/proc/{pid}/status").read_text()
    values = dict(re.findall(r"^(VmRSS|Threads):\s+(\d+)", status, re.MULTILINE))
    return Sample(
        num_requests,
        int(values["VmRSS"]),
        int(values["Threads"]),
        len(os.listdir(f"/proc/{pid}/fd")),
        seconds,
    )


async def listening(process: asyncio.subprocess.Process) -> tuple[str, str]:
    """The public and the worker address, from the line that the control plane prints."""
    assert process.stdout is not None
    async with asyncio.timeout(120):
        line = (await process.stdout.readline()).decode()
    found = re.search(r"public=(\S+) workers=(\S+)", line)
    if found is None:
        raise RuntimeError(f"the control plane did not start: {line!r}")
    return found[1], found[2]


async def stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(30):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def soak(args: argparse.Namespace, directory: Path) -> Report:
    report = Report(
        requests=args.requests,
        seed=args.seed,
        date=time.strftime("%Y-%m-%d"),
        machine=f"{os.cpu_count()} cores, {platform.machine()}, Python {sys.version.split()[0]}",
    )
    model_dir = write_tiny_model(directory / "tiny")
    config = json.loads((model_dir / "config.json").read_text())
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    store = None
    url = "memory://"
    if args.store == "redis":
        store = ValkeyProcess(directory)
        await store.start()
        url = store.url
    control = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "control_plane", "--model", str(model_dir), "--redis-url", url),
        *("--port", "0", "--worker-port", "0", "--metrics-port", "0", "--lease-s", "20"),
        *("--log-level", "error"),
        stdout=asyncio.subprocess.PIPE,
        env=environment,
        cwd=ROOT,
    )
    workers = None
    try:
        public, worker_address = await listening(control)
        workers = await asyncio.create_subprocess_exec(
            *(sys.executable, str(ROOT / "tests" / "benchmarks" / "soak_workers.py")),
            *(worker_address, str(model_dir), "--seed", str(args.seed)),
            stdout=asyncio.subprocess.PIPE,
            # What they say about every cut is not news here.
            stderr=asyncio.subprocess.DEVNULL,
            env=environment,
            cwd=ROOT,
        )
        started = time.monotonic()
        every = max(1, args.requests // NUM_SAMPLES)
        next_at = 0

        def on_done(num_requests: int) -> None:
            nonlocal next_at
            while num_requests >= next_at:
                one = sample(control.pid, next_at, time.monotonic() - started)
                report.samples.append(one)
                print(
                    f"{one.num_requests:>9} requests {one.rss_kib / 1024:>8.1f} MiB "
                    f"{one.num_threads:>4} threads {one.num_files:>4} files "
                    f"{one.seconds:>7.0f} s",
                    flush=True,
                )
                next_at += every

        on_done(0)
        clients = Clients(
            public,
            vocab_size=config["vocab_size"],
            eos_token_id=EOS_TOKEN_ID,
            num_requests=args.requests,
            seed=args.seed,
            on_done=on_done,
        )
        await clients.run()
        print("kinds:", ", ".join(f"{k} {n}" for k, n in sorted(clients.kinds.items())))
        print("tokens compared:", clients.num_tokens, "requests given up:", clients.num_given_up)
        await stop(workers)
        assert workers.stdout is not None
        print("workers:", (await workers.stdout.read()).decode().strip())
        if control.returncode is not None:
            raise RuntimeError(f"the control plane ended with {control.returncode}")
    finally:
        if workers is not None:
            await stop(workers)
        await stop(control)
        if store is not None:
            await store.kill()
    report.judge()
    return report


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", choices=("redis", "memory"), default="redis")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        report = asyncio.run(soak(args, Path(directory)))
    if args.json:
        args.json.write_text(json.dumps(asdict(report), indent=1))
    print(
        f"after the warm-up: {report.bytes_per_request:+.0f} bytes per request, "
        f"{report.growth:+.2%} in all, limit {MAX_GROWTH:.0%}: "
        f"{'flat' if report.is_flat else 'NOT FLAT'} ({report.date}, {report.machine})"
    )
    return 0 if report.is_flat else 1


if __name__ == "__main__":
    sys.exit(main())
