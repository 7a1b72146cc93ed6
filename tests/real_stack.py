"""A whole control plane and real CPU workers in one process, joined by real gRPC streams.

The model is loaded once and shared, so that a test can afford a stack of its own for every
combination of settings.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from api_harness import Api, load_catalog_model, running_api, until

from control_plane.cluster_config import ClusterConfig
from data_plane.config import WorkerConfig
from data_plane.control_stream import ControlStream, StreamOptions
from data_plane.models.loader import LoadedModel, load_model
from data_plane.worker import assemble_worker

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from control_plane.model_catalog import CatalogModel
    from data_plane.worker import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One way to run the system. Every one must give the same tokens."""

    num_workers: int = 1
    block_size: int = 16
    num_blocks: int = 400
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 2048
    max_model_len: int = 1024
    lookahead: int = 2
    prefix_caching: bool = True


@dataclass(slots=True)
class SharedModel:
    """What all stacks of a test session have in common."""

    path: Path
    catalog: CatalogModel
    weights: LoadedModel


def load_shared_model(path: Path) -> SharedModel:
    return SharedModel(
        path=path,
        catalog=load_catalog_model(path),
        weights=load_model(path, dtype="float32", device=torch.device("cpu")),
    )


@dataclass(slots=True)
class RealStack:
    """A running stack; `kill` ends a worker as a crash would."""

    api: Api
    workers: list[Worker]
    tasks: list[asyncio.Task[int]] = field(default_factory=list)

    async def kill(self, index: int) -> None:
        self.tasks[index].cancel()
        await asyncio.gather(self.tasks[index], return_exceptions=True)

    def num_preemptions(self) -> int:
        return sum(r.num_preemptions for r in self.api.control_plane.cluster.stats().replicas)

    def prefix_hits(self) -> int:
        return sum(r.prefix_hits for r in self.api.control_plane.cluster.stats().replicas)

    async def settle(self) -> None:
        """Wait until nothing runs, then check every pool: all blocks free, none lost."""
        await until(self.api.is_idle, what="every block is free")
        self.api.control_plane.cluster.audit()


@contextlib.asynccontextmanager
async def running_stack(model: SharedModel, setting: Setting) -> AsyncGenerator[RealStack]:
    """Start it, wait until every worker takes work, and check the pools at the end."""
    cluster = ClusterConfig(
        lookahead=setting.lookahead,
        max_lookahead=setting.lookahead,
        max_num_batched_tokens=setting.max_num_batched_tokens,
        max_num_seqs=setting.max_num_seqs,
        prefix_caching=setting.prefix_caching,
        term_gather_s=0.01,
        replica_wait_s=60.0,
        # Steps of several workers in one process wait for each other.
        step_timeout_s=120.0,
        lease_s=60.0,
        audit_interval_s=0.05,
    )
    async with running_api(model.catalog, model.path, cluster=cluster) as api:
        stack = RealStack(dataclasses.replace(api), [])
        for index in range(setting.num_workers):
            worker = assemble_worker(
                WorkerConfig(
                    model=model.path,
                    worker_id=f"w{index}",
                    replica_id=f"r{index}",
                    device="cpu",
                    block_size=setting.block_size,
                    num_blocks=setting.num_blocks,
                    max_num_seqs=setting.max_num_seqs,
                    max_model_len=setting.max_model_len,
                    max_num_batched_tokens=setting.max_num_batched_tokens,
                ),
                model.weights,
                model.catalog.served.base_fingerprint,
            )
            stream = ControlStream(
                StreamOptions(address=api.worker_address),
                protocol=worker.protocol,
                runner=worker.runner,
            )
            stack.workers.append(worker)
            stack.tasks.append(asyncio.create_task(stream.run(), name=f"worker {index}"))
        try:
            await until(
                lambda: (
                    api.control_plane.cluster.num_ready(model.catalog.served.name)
                    == setting.num_workers
                ),
                what="every worker is ready",
            )
            yield stack
            await stack.settle()
        finally:
            for index in range(setting.num_workers):
                await stack.kill(index)
