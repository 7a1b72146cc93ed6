"""Puts a worker together: device, model, KV cache, runner, identity.

Owns: defaults that depend on the device, and the order of start-up: nothing is dialled before a
warm-up step has run. Does not know: flags, signals, the stream.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from data_plane.device import resolve_device
from data_plane.model_runner import ModelRunner, RunnerConfig
from data_plane.models.loader import load_model
from data_plane.stream_protocol import StreamProtocol, WorkerIdentity
from protos.model_fingerprint import base_fingerprint, served_fingerprint
from protos.model_location import HubModel, fetch_model
from protos.software_version import software_version

if TYPE_CHECKING:
    import torch

    from data_plane.config import WorkerConfig
    from data_plane.models.loader import LoadedModel

logger = logging.getLogger(__name__)

_PROGRESS_INTERVAL_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A warmed-up runner and what the stream says about it."""

    runner: ModelRunner
    protocol: StreamProtocol


def build_worker(config: WorkerConfig) -> Worker:
    """Load the model, allocate the KV cache and run a step.

    Raises:
        ValueError: model, device, memory or limits do not fit together; the message says how.
        OSError: the model cannot be read.
        StepError: the device cannot run a step.
    """
    device = resolve_device(config.device)
    if isinstance(config.model, HubModel):
        logger.info("asking the hub: worker=%s model=%s", config.worker_id, config.model.repo_id)
    model_dir = fetch_model(config.model)
    # Before the weights, because it tells in milliseconds whether the directory is complete.
    fingerprint = base_fingerprint(model_dir)
    started_s = time.monotonic()
    logger.info(
        "loading model: worker=%s path=%s device=%s dtype=%s threads=%d",
        config.worker_id,
        model_dir,
        device,
        config.dtype,
        config.threads,
    )
    model = load_model(
        model_dir,
        dtype=config.dtype,
        device=device,
        load_format=config.load_format,
        progress=_Progress(config.worker_id),
    )
    logger.info(
        "model loaded: worker=%s seconds=%.1f", config.worker_id, time.monotonic() - started_s
    )
    return assemble_worker(config, model, fingerprint)


def assemble_worker(config: WorkerConfig, model: LoadedModel, fingerprint: bytes) -> Worker:
    """Allocate the KV cache of a loaded model and run a step; several workers may share a model.

    Args:
        config: Of the worker; path, device and dtype of the model are those of `model`.
        model: Read only.
        fingerprint: What `base_fingerprint` says of its directory.

    Raises:
        ValueError: model, memory or limits do not fit together; the message says how.
        StepError: the device cannot run a step.
    """
    device = model.model.device
    is_cuda = device.type == "cuda"
    max_num_seqs = config.max_num_seqs or (256 if is_cuda else 32)
    max_num_batched_tokens = config.max_num_batched_tokens or max(
        max_num_seqs, 8192 if is_cuda else 512
    )
    runner = ModelRunner(
        model,
        RunnerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=config.max_model_len,
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            kv_cache_memory=config.kv_cache_memory,
            gpu_memory_utilization=config.gpu_memory_utilization,
            attention_backend=config.attention_backend,
            enforce_eager=config.enforce_eager,
        ),
    )
    started_s = time.monotonic()
    runner.warm_up()
    logger.info("warmed up: worker=%s seconds=%.1f", config.worker_id, time.monotonic() - started_s)
    kv_cache = runner.kv_cache
    kv_dtype = str(kv_cache.dtype).removeprefix("torch.")
    identity = WorkerIdentity(
        worker_id=config.worker_id,
        replica_id=config.replica_id,
        # Blocks of another allocation are garbage: the epoch is as new as the memory.
        epoch=os.urandom(16),
        model_fingerprint=served_fingerprint(fingerprint, kv_dtype=kv_dtype),
        num_layers=kv_cache.num_layers,
        num_kv_heads=kv_cache.num_kv_heads,
        head_size=kv_cache.head_size,
        kv_dtype=kv_dtype,
        block_size=kv_cache.block_size,
        num_blocks=kv_cache.num_blocks,
        max_num_seqs=max_num_seqs,
        max_model_len=runner.max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        vocab_size=model.config.vocab_size,
        backend=runner.backend.name,
        device=_describe(device),
        software_version=software_version(),
    )
    return Worker(runner=runner, protocol=StreamProtocol(identity))


class _Progress:
    """Logs how far the weights are, every few seconds."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._last_s = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s >= _PROGRESS_INTERVAL_S and done < total:
            self._last_s = now_s
            logger.info("loading weights: worker=%s tensors=%d of=%d", self._worker_id, done, total)


def _describe(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    import torch

    return f"{device} {torch.cuda.get_device_name(device)}"
