"""Simulated workers on the running event loop, and models that need no tensor."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from api_harness import MODEL, Api, until

from data_plane.config import parse_args
from data_plane.control_stream import ControlStream, StreamOptions
from data_plane.simulated_worker import SimulatedWorker, build_simulated_workers

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path


@contextlib.asynccontextmanager
async def simulated_workers(
    api: Api, model_dir: Path, profile: str, *, count: int = 1, num_blocks: int = 2048
) -> AsyncGenerator[list[SimulatedWorker]]:
    """Workers that take work; they are killed at the end."""
    config = parse_args(
        [
            *("--model", str(model_dir), "--control-plane", api.worker_address),
            *("--simulate", profile, "--simulate-workers", str(count)),
            *("--num-blocks", str(num_blocks), "--worker-id", "sim"),
        ]
    )
    workers = build_simulated_workers(config)
    options = StreamOptions(address=api.worker_address, backoff_min_s=0.01, backoff_max_s=0.1)
    streams = [
        ControlStream(options, protocol=worker.protocol, runner=worker.runner) for worker in workers
    ]
    tasks = [asyncio.create_task(stream.run()) for stream in streams]
    try:
        await until(
            lambda: api.control_plane.cluster.num_ready(MODEL) == count,
            what=f"{count} simulated workers are ready",
        )
        yield workers
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
