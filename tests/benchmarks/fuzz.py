"""`make fuzz`: damaged messages into everything that reads messages of others.

    python tests/benchmarks/fuzz.py [--count 100000] [--seed 0] [--only workers]

- `workers`: WorkerMessages into the control plane's engine,
- `plans`: ControlMessages into the worker's stream and row table,
- `requests`: GenerateRequests into decoder and admission of the public API,
- `grpc`: a thirtieth as many of those over real calls.

Whatever is refused must have changed nothing; what is accepted must have been possible; nothing may
crash. The first message that breaks a rule ends the run with its seed and bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "clients" / "python")]

from api_harness import load_catalog_model, running_api  # noqa: E402 - these need the path
from fuzz_requests import fuzz_generate_requests, fuzz_over_grpc  # noqa: E402
from fuzz_streams import fuzz_control_messages, fuzz_worker_messages  # noqa: E402
from tiny_model_dir import MAX_MODEL_LEN, write_tiny_model  # noqa: E402

SHARE_OVER_GRPC = 30


async def fuzz_api(kind: str, count: int, seed: int, directory: Path) -> object:
    model_dir = write_tiny_model(directory)
    async with (
        running_api(load_catalog_model(model_dir), model_dir) as api,
        api.ready_worker(max_model_len=MAX_MODEL_LEN),
    ):
        if kind == "requests":
            outcomes = await fuzz_generate_requests(api, count, seed)
        else:
            outcomes = await fuzz_over_grpc(api, max(1, count // SHARE_OVER_GRPC), seed)
        # And a request of good faith is answered right.
        completion = await api.client.complete([5, 6, 7], max_tokens=8, temperature=0)
        if completion.token_ids != api.expected([5, 6, 7], max_tokens=8):
            raise AssertionError(f"a wrong answer afterwards: {completion.token_ids}")
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = ("workers", "plans", "requests", "grpc")
    parser.add_argument("--count", type=int, default=100_000, help="messages of each kind")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same damage")
    parser.add_argument("--only", choices=kinds, action="append", help="repeatable")
    args = parser.parse_args()
    # Refusals by the ten thousand are what is asked for here.
    logging.disable(logging.CRITICAL)
    for kind in args.only or kinds:
        started = time.monotonic()
        if kind == "workers":
            outcomes: object = fuzz_worker_messages(args.count, args.seed)
        elif kind == "plans":
            outcomes = fuzz_control_messages(args.count, args.seed)
        else:
            with tempfile.TemporaryDirectory() as directory:
                outcomes = asyncio.run(fuzz_api(kind, args.count, args.seed, Path(directory)))
        print(f"{kind}: {outcomes}, {time.monotonic() - started:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
