"""Cost of validating and applying a plan on the host of a worker.

Steady decode: every row computes one token per plan, and gets a block every `block_size` plans, all
rows in the same plan (the worst case). The time includes parsing the message.
"""

from __future__ import annotations

import argparse
import json
import platform
import time

import numpy as np

from data_plane.row_table import RowTable
from protos.pagewire.v1 import worker_pb2

BLOCK_SIZE, PROMPT = 16, 20


def column(values: np.ndarray) -> bytes:
    return values.astype("<i4").tobytes()


def measure(num_rows: int, num_plans: int) -> dict[str, float]:
    """Times of one table's life, in us."""
    blocks_per_row = -(-(PROMPT + num_plans) // BLOCK_SIZE) + 1
    table = RowTable(
        max_num_seqs=num_rows,
        num_blocks=num_rows * blocks_per_row + 1,
        max_model_len=PROMPT + num_plans + 1,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=num_rows * PROMPT,
        vocab_size=1000,
    )
    rows = np.arange(num_rows)
    next_block = 1
    plan = worker_pb2.Plan(base_version=0, version=1, num_steps=1)
    for row in rows.tolist():
        plan.added_rows.add(
            row=row,
            token_ids=column(np.arange(PROMPT)),
            num_prompt_tokens=PROMPT,
            max_total_tokens=PROMPT + num_plans + 1,
            block_ids=column(np.array([next_block, next_block + 1])),
        )
        next_block += 2
    plan.chunk_rows, plan.chunk_num_tokens = column(rows), column(np.full(num_rows, PROMPT))
    started_s = time.perf_counter()
    table.apply(plan)
    admission_us = (time.perf_counter() - started_s) * 1e6
    steady, appending = [], []
    for version in range(2, num_plans):
        plan = worker_pb2.Plan(base_version=version - 1, version=version, num_steps=1)
        position = PROMPT + version - 2
        appends = position >= 2 * BLOCK_SIZE and position % BLOCK_SIZE == 0
        if appends:
            plan.appended_rows = column(rows)
            plan.appended_counts = column(np.ones(num_rows))
            plan.appended_block_ids = column(np.arange(next_block, next_block + num_rows))
            next_block += num_rows
        wire = plan.SerializeToString()
        started_s = time.perf_counter()
        table.apply(worker_pb2.Plan.FromString(wire))
        (appending if appends else steady).append((time.perf_counter() - started_s) * 1e6)
    return {
        "rows": num_rows,
        "steady_us": round(float(np.median(steady)), 1),
        "steady_p99_us": round(float(np.quantile(steady, 0.99)), 1),
        "all_rows_append_us": round(float(np.median(appending)), 1),
        "admission_us_per_row": round(admission_us / num_rows, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 256, 1024])
    parser.add_argument("--plans", type=int, default=600)
    args = parser.parse_args()
    print(f"# {platform.platform()}, python {platform.python_version()}, numpy {np.__version__}")
    for num_rows in args.rows:
        print(json.dumps(measure(num_rows, args.plans)))


if __name__ == "__main__":
    main()
