"""A control plane that records, real workers with a tiny random model, and replays in process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import TYPE_CHECKING

import torch
from api_harness import Api, load_catalog_model, running_api, until
from pagewire_client.replay.player import Player, Summary
from pagewire_client.replay.recording import open_recording
from pagewire_client.replay.worker_port import WorkerPort
from tiny_model_dir import write_tiny_model
from tiny_models import make_model
from tiny_tokenizers import ALL

from control_plane.cluster_config import ClusterConfig
from control_plane.recording_config import RecordingConfig
from data_plane.config import WorkerConfig
from data_plane.control_stream import ControlStream, StreamOptions
from data_plane.models.loader import LoadedModel, load_model
from data_plane.worker import Worker, assemble_worker
from protos.recording_file import frame, list_segments, open_segment, preamble

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from pathlib import Path

    from control_plane.model_catalog import CatalogModel
    from protos.pagewire.v1 import recording_pb2

LIMITS = {
    "block_size": 4,
    "num_blocks": 26,
    "max_num_seqs": 4,
    "max_model_len": 96,
    "max_num_batched_tokens": 32,
}


@dataclasses.dataclass(slots=True)
class TinyModel:
    """On disk for the control plane, loaded once for all workers."""

    path: Path
    catalog: CatalogModel
    weights: LoadedModel


def write_model(path: Path) -> None:
    """Tokenizer and random weights."""
    write_tiny_model(path)
    make_model("llama", path, vocab_size=ALL["byte_level"].vocab_size)


def tiny_model(path: Path) -> TinyModel:
    write_model(path)
    weights = load_model(path, dtype="float32", device=torch.device("cpu"))
    return TinyModel(path, load_catalog_model(path), weights)


@contextlib.asynccontextmanager
async def attached_worker(
    model: TinyModel, address: str, *, worker: Worker | None = None, **changes: int
) -> AsyncGenerator[Worker]:
    """A worker that dials until it is left; one of before keeps its KV memory."""
    worker = worker or assemble_worker(
        WorkerConfig(
            model=model.path, worker_id="w0", replica_id="r0", device="cpu", **{**LIMITS, **changes}
        ),
        model.weights,
        model.catalog.served.base_fingerprint,
    )
    options = StreamOptions(address=address, backoff_min_s=0.01, backoff_max_s=0.05)
    stream = ControlStream(options, protocol=worker.protocol, runner=worker.runner)
    task = asyncio.create_task(stream.run())
    try:
        yield worker
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def recording_api(
    model: TinyModel,
    directory: Path,
    *,
    max_bytes: int = 64 << 20,
    redis_url: str = "memory://",
    **cluster: object,
) -> AsyncGenerator[Api]:
    """A control plane that records into a directory."""
    config = ClusterConfig(
        term_gather_s=0.01, replica_wait_s=60.0, audit_interval_s=0.05, **cluster
    )
    recording = RecordingConfig(directory=directory, max_bytes=max_bytes)
    async with running_api(
        model.catalog, model.path, cluster=config, recording=recording, redis_url=redis_url
    ) as api:
        yield api


async def ready(api: Api) -> None:
    name = api.model.served.name
    await until(lambda: api.control_plane.cluster.num_ready(name) == 1, what="a worker is ready")


async def gone(api: Api) -> None:
    name = api.model.served.name
    await until(lambda: api.control_plane.cluster.num_ready(name) == 0, what="the worker is gone")


async def replay(model: TinyModel, path: Path, **changes: int) -> Summary:
    """Replay on a worker in this process."""
    async with WorkerPort() as port, attached_worker(model, port.address, **changes):
        return await play(path, port)


async def play(path: Path, port: WorkerPort) -> Summary:
    """Replay on whatever attaches."""
    player = Player(
        open_recording(path), port, step_timeout_s=60, progress=lambda summary, total: None
    )
    async with asyncio.timeout(120):
        return await player.play()


def segments(directory: Path) -> list[Path]:
    """Of the only replica."""
    return list_segments(directory / "replica-r0")


def records(path: Path) -> list[recording_pb2.Record]:
    return list(open_segment(path).records())


def rewrite(path: Path, change: Callable[[recording_pb2.Record], bool]) -> None:
    """Change the first record that `change` says it has changed, with checksums that are right."""
    segment = open_segment(path)
    frames = [frame(segment.header.SerializeToString())]
    is_done = False
    for record in segment.records():
        is_done = is_done or change(record)
        frames.append(frame(record.SerializeToString()))
    assert is_done, "there was nothing to change"
    path.write_bytes(preamble() + b"".join(frames))
