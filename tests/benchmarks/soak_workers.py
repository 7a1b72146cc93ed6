"""Fake workers in a process of their own that come, go, break and come back, seeded.

    python tests/benchmarks/soak_workers.py ADDRESS MODEL_DIR --workers 3 --seed 0 --pause-s 0.5

Ends with SIGTERM. The first worker never goes, so that every request has somewhere to be.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from fake_model import FakeModelRunner  # noqa: E402 - this and the following need the path
from fake_worker import FakeWorker  # noqa: E402

from protos.model_fingerprint import base_fingerprint, served_fingerprint  # noqa: E402

NUM_BLOCKS = 512
BLOCK_SIZE = 16


class Fleet:
    """Workers and what befalls them."""

    def __init__(self, address: str, model_dir: Path, *, num_workers: int, seed: int) -> None:
        config = json.loads((model_dir / "config.json").read_text())
        self._address = address
        self._vocab_size = int(config["vocab_size"])
        self._max_model_len = int(config["max_position_embeddings"])
        self._fingerprint = served_fingerprint(base_fingerprint(model_dir), kv_dtype="float32")
        self._rng = random.Random(seed)
        self._workers = [self._start(index) for index in range(num_workers)]
        self.events: Counter[str] = Counter()

    def _start(self, index: int) -> FakeWorker:
        worker = FakeWorker(
            self._address,
            runner=FakeModelRunner(
                num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, vocab_size=self._vocab_size
            ),
            grace_s=2.0,
            worker_id=f"w{index}",
            replica_id=f"r{index}",
            model_fingerprint=self._fingerprint,
            max_num_seqs=32,
            max_model_len=self._max_model_len,
            max_num_batched_tokens=1024,
        )
        worker.start()
        return worker

    async def disturb(self) -> None:
        """Something happens to one of the workers, most often a small thing."""
        rng = self._rng
        kind = rng.choices(["cut", "failed step", "killed", "drained"], [6, 6, 1, 1])[0]
        if kind in ("killed", "drained") and len(self._workers) == 1:
            return
        index = rng.randrange(kind in ("killed", "drained"), len(self._workers))
        worker = self._workers[index]
        self.events[kind] += 1
        if kind == "cut":
            worker.break_stream()
        elif kind == "failed step":
            worker.runner.fail_launch.add(worker.protocol.row_table.applied_version + 2)
        else:
            if kind == "drained":
                worker.drain()
                await worker.exited()
            await worker.kill()
            self._workers[index] = self._start(index)

    async def close(self) -> None:
        for worker in self._workers:
            await worker.kill()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("address")
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause-s", type=float, default=0.5)
    args = parser.parse_args()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    fleet = Fleet(args.address, args.model_dir, num_workers=args.workers, seed=args.seed)
    while not stop.is_set():
        try:
            async with asyncio.timeout(args.pause_s):
                await stop.wait()
        except TimeoutError:
            await fleet.disturb()
    print(json.dumps(fleet.events), flush=True)
    await fleet.close()


if __name__ == "__main__":
    asyncio.run(main())
