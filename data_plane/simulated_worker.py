"""Puts simulated workers together: the real protocol over devices that are not there.

Owns: what is read of a model directory (its fingerprint, shape and which ids are words) and the
names of several workers in one process. Does not know: flags, signals, the stream. No torch.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from data_plane.simulated_runner import SimulatedRunner
from data_plane.stream_protocol import StreamProtocol, WorkerIdentity
from protos.model_fingerprint import base_fingerprint, read_json_object, served_fingerprint
from protos.model_location import fetch_model
from protos.software_version import software_version

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from data_plane.config import WorkerConfig
    from data_plane.simulated_profile import SimulationProfile
    from data_plane.step_work import Int32Array

logger = logging.getLogger(__name__)

_KV_DTYPES = ("float32", "bfloat16", "float16")
# A word or a part of one, as byte-level and sentencepiece vocabularies spell it.
_WORD = re.compile("[\u0120\u2581]?[A-Za-z]+")
# Fewer words than this are no vocabulary to talk in.
_MIN_WORDS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedWorker:
    """A simulated device and what the stream says about it."""

    runner: SimulatedRunner
    protocol: StreamProtocol


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """What Hello says about a model."""

    vocab_size: int
    max_model_len: int
    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: str


def build_simulated_workers(config: WorkerConfig) -> list[SimulatedWorker]:
    """Make `config.simulate_workers` workers, each a replica of its own.

    Raises:
        ValueError: model and limits do not fit together; the message says how.
        OSError: the model cannot be read.
    """
    profile = config.simulate
    if profile is None:
        raise ValueError("there is no profile to simulate")
    model_dir = fetch_model(config.model)
    fingerprint = base_fingerprint(model_dir)
    shape = _read_shape(model_dir, config.dtype)
    pool = read_token_pool(model_dir, shape.vocab_size)
    count = config.simulate_workers
    workers = [
        _build(config, profile, shape, pool, fingerprint, f"-{i}" if count > 1 else "")
        for i in range(count)
    ]
    identity = workers[0].protocol.identity
    logger.warning(
        "simulating, tokens are made up: workers=%d profile=%s step_us=%g max_num_seqs=%d "
        "num_blocks=%d max_model_len=%d ids=%d",
        count,
        profile.name,
        profile.step_us,
        identity.max_num_seqs,
        identity.num_blocks,
        identity.max_model_len,
        pool.size,
    )
    return workers


def log_counters(workers: Sequence[object]) -> None:
    """One line per simulated worker: what its device did."""
    for worker in workers:
        if not isinstance(worker, SimulatedWorker):
            continue
        counters = worker.runner.counters
        logger.info(
            "simulated: worker=%s steps=%d tokens=%d busy_s=%.3f waited_s=%.6f waits=%d "
            "longest_wait_ms=%.3f",
            worker.protocol.identity.worker_id,
            counters.num_steps,
            counters.num_tokens,
            counters.busy_us / 1e6,
            counters.waited_us / 1e6,
            counters.num_waits,
            counters.longest_wait_us / 1e3,
        )


def _build(
    config: WorkerConfig,
    profile: SimulationProfile,
    shape: _Shape,
    pool: Int32Array,
    fingerprint: bytes,
    suffix: str,
) -> SimulatedWorker:
    max_num_seqs = config.max_num_seqs or profile.max_num_seqs
    max_num_batched_tokens = config.max_num_batched_tokens or max(
        max_num_seqs, profile.max_num_batched_tokens
    )
    max_model_len = config.max_model_len or shape.max_model_len
    if max_model_len > shape.max_model_len:
        raise ValueError(
            f"max_model_len is {max_model_len}, but the model was trained for "
            f"{shape.max_model_len} positions"
        )
    num_blocks = config.num_blocks or max(2, profile.num_blocks * 16 // config.block_size)
    num_tokens = (num_blocks - 1) * config.block_size
    if num_tokens < max_model_len:
        raise ValueError(
            f"{num_blocks} blocks of {config.block_size} tokens hold {num_tokens} tokens, one "
            f"sequence may have {max_model_len}. Give more --num-blocks or a --max-model-len of at "
            f"most {num_tokens}"
        )
    runner = SimulatedRunner(
        profile, max_num_seqs=max_num_seqs, num_blocks=num_blocks, token_pool=pool
    )
    identity = WorkerIdentity(
        worker_id=config.worker_id + suffix,
        replica_id=config.replica_id + suffix,
        epoch=os.urandom(16),
        model_fingerprint=served_fingerprint(fingerprint, kv_dtype=shape.dtype),
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        kv_dtype=shape.dtype,
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        vocab_size=shape.vocab_size,
        backend="simulated",
        device=f"simulated {profile.name}",
        software_version=software_version(),
    )
    return SimulatedWorker(runner=runner, protocol=StreamProtocol(identity))


def _read_shape(model_dir: Path, dtype: str) -> _Shape:
    config = read_json_object(model_dir / "config.json")
    # Multimodal configurations keep the language model's part apart.
    text: Any = config.get("text_config")
    if not isinstance(text, dict):
        text = config
    num_heads = _positive(model_dir, text, "num_attention_heads", 1)
    hidden_size = _positive(model_dir, text, "hidden_size", num_heads)
    if dtype == "auto":
        dtype = str(text.get("dtype") or text.get("torch_dtype") or "float32")
    if dtype not in _KV_DTYPES:
        raise ValueError(f"unsupported dtype {dtype!r}; supported: auto, {', '.join(_KV_DTYPES)}")
    return _Shape(
        vocab_size=_positive(model_dir, text, "vocab_size", None),
        max_model_len=_positive(model_dir, text, "max_position_embeddings", None),
        num_layers=_positive(model_dir, text, "num_hidden_layers", 1),
        num_kv_heads=_positive(model_dir, text, "num_key_value_heads", num_heads),
        head_size=_positive(model_dir, text, "head_dim", max(1, hidden_size // num_heads)),
        dtype=dtype,
    )


def _positive(model_dir: Path, config: dict[str, Any], key: str, default: int | None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{model_dir}/config.json has no usable {key}: got {value!r}")
    return value


def read_token_pool(model_dir: Path, vocab_size: int) -> Int32Array:
    """The ids that a simulated model says: plain words, so that its text costs what text costs.

    Without enough words in tokenizer.json, every id but the added (special) ones. Never an
    end-of-sequence id: those come by their own rule.

    Returns:
        [n] int32, ascending, n >= 1.
    """
    tokenizer = read_json_object(model_dir / "tokenizer.json")
    added: Any = tokenizer.get("added_tokens") or []
    special = {entry["id"] for entry in added if isinstance(entry, dict) and "id" in entry}
    special |= _eos_token_ids(model_dir)
    model: Any = tokenizer.get("model")
    vocab: Any = model.get("vocab") if isinstance(model, dict) else None
    words: list[int] = []
    if isinstance(vocab, dict):
        words = [i for piece, i in vocab.items() if isinstance(i, int) and _WORD.fullmatch(piece)]
    elif isinstance(vocab, list):
        # Unigram: [piece, score] in the order of ids.
        words = [i for i, entry in enumerate(vocab) if entry and _WORD.fullmatch(str(entry[0]))]
    words = sorted(i for i in words if 0 <= i < vocab_size and i not in special)
    if len(words) < min(_MIN_WORDS, vocab_size):
        words = [i for i in range(vocab_size) if i not in special] or list(range(vocab_size))
    return np.array(words, np.int32)


def _eos_token_ids(model_dir: Path) -> set[int]:
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        if (model_dir / name).is_file():
            value: Any = read_json_object(model_dir / name).get("eos_token_id")
            values: list[Any] = value if isinstance(value, list) else [value]
            ids |= {i for i in values if isinstance(i, int)}
    return ids
