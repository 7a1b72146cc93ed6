"""What workers say they are, checked, and what the ranks of one replica make together.

Owns the rules of Hello and the replica epoch. Does not know streams, time, or who is attached.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from control_plane.block_hash import BlockHasher
from control_plane.errors import Code, ProtocolError
from control_plane.kv_cache_manager import KVCacheConfig, KVCacheManager
from control_plane.scheduler import Scheduler
from control_plane.scheduler_config import SchedulerConfig
from protos.model_fingerprint import served_fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from control_plane.cluster_config import ClusterConfig
    from control_plane.served_model import ServedModel
    from protos.pagewire.v1 import worker_pb2

PROTOCOL_VERSION = 1

_ID = re.compile(r"[A-Za-z0-9._-]{1,128}\Z")
_KV_DTYPES = ("float32", "bfloat16", "float16", "fp8_e4m3")
# A Hello makes the control plane allocate bookkeeping of this size, so what it may ask for is
# bounded: at block size 16 this is a KV cache of 33 million tokens.
_MAX_NUM_BLOCKS = 1 << 21
_MAX_NUM_SEQS = 1 << 14
_MAX_MODEL_LEN = 1 << 24
# Rows times blocks of the longest sequence: a gigabyte of table on either side.
_MAX_TABLE_ENTRIES = 1 << 28
_MAX_TEXT_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class KvGeometry:
    """Shape of a KV cache without its layout; heads are per rank."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: str
    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """A Hello whose every field is within its limits."""

    worker_id: str
    replica_id: str
    rank: int
    tp_size: int
    epoch: bytes
    applied_version: int
    highest_term: int
    model_fingerprint: bytes
    geometry: KvGeometry
    num_blocks: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    backend: str
    device: str
    software_version: str
    peer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaShape:
    """What the ranks of one replica offer together: everything a scheduler is built from.

    Two streams with equal shapes reach the same KV memory, so pool and index outlive a stream.
    """

    replica_epoch: bytes
    model_fingerprint: bytes
    geometry: KvGeometry
    num_blocks: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int

    @classmethod
    def of_ranks(cls, ranks: Sequence[WorkerFacts]) -> ReplicaShape:
        """The smallest of what each rank can do; ranks in order."""
        first = ranks[0]
        return cls(
            replica_epoch=replica_epoch(ranks),
            model_fingerprint=first.model_fingerprint,
            geometry=first.geometry,
            num_blocks=min(facts.num_blocks for facts in ranks),
            max_num_seqs=min(facts.max_num_seqs for facts in ranks),
            max_model_len=min(facts.max_model_len for facts in ranks),
            max_num_batched_tokens=min(facts.max_num_batched_tokens for facts in ranks),
        )


def replica_epoch(ranks: Iterable[WorkerFacts]) -> bytes:
    """SHA-256 over the ranks' (worker_id, epoch) in rank order, length-prefixed."""
    digest = hashlib.sha256()
    for facts in ranks:
        for part in (facts.worker_id.encode(), facts.epoch):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.digest()


def read_hello(hello: worker_pb2.Hello, *, peer: str) -> WorkerFacts:
    """Check every field that can be judged without knowing anybody else.

    Raises:
        ProtocolError: UNSUPPORTED_PROTOCOL_VERSION, INVALID_HELLO, or TENSOR_PARALLEL_NOT_BUILT.
    """
    if hello.protocol_version != PROTOCOL_VERSION:
        raise ProtocolError(
            "UNSUPPORTED_PROTOCOL_VERSION",
            f"The worker speaks protocol version {hello.protocol_version}, this control plane "
            f"speaks {PROTOCOL_VERSION}. Run the same release on both sides.",
            protocol_version=hello.protocol_version,
            supported=PROTOCOL_VERSION,
        )
    for field in ("worker_id", "replica_id"):
        value: str = getattr(hello, field)
        if not _ID.match(value):
            raise _invalid(field, repr(value[:200]), "1 to 128 characters of [A-Za-z0-9._-]")
    _in_range("tp_size", hello.tp_size, 1, 1024)
    _in_range("rank", hello.rank, 0, hello.tp_size - 1)
    if len(hello.epoch) != 16:
        raise _invalid("epoch", f"{len(hello.epoch)} bytes", "16 bytes")
    if len(hello.model_fingerprint) != 32:
        raise _invalid("model_fingerprint", f"{len(hello.model_fingerprint)} bytes", "32 bytes")
    _in_range("applied_version", hello.applied_version, 0, 1 << 62)
    _in_range("highest_term", hello.highest_term, 0, 1 << 62)
    _in_range("num_blocks", hello.num_blocks, 2, _MAX_NUM_BLOCKS)
    _in_range("max_num_seqs", hello.max_num_seqs, 1, _MAX_NUM_SEQS)
    _in_range("max_model_len", hello.max_model_len, 2, _MAX_MODEL_LEN)
    _in_range(
        "max_num_batched_tokens", hello.max_num_batched_tokens, hello.max_num_seqs, (1 << 31) - 1
    )
    for field in ("backend", "device", "software_version", "rendezvous_address"):
        if len(getattr(hello, field).encode()) > _MAX_TEXT_BYTES:
            raise _invalid(field, "a longer text", f"at most {_MAX_TEXT_BYTES} bytes")
    geometry = _read_geometry(hello.kv_geometry)
    longest = _MAX_TABLE_ENTRIES // hello.max_num_seqs * geometry.block_size
    if hello.max_model_len > longest:
        raise _invalid(
            "max_model_len",
            hello.max_model_len,
            f"at most {longest} with {hello.max_num_seqs} sequences and blocks of "
            f"{geometry.block_size} tokens",
        )
    if hello.tp_size > 1:
        raise ProtocolError(
            "TENSOR_PARALLEL_NOT_BUILT",
            f"tp_size is {hello.tp_size}; this control plane serves replicas of one worker only. "
            f"Start the worker with a tensor parallel size of 1.",
            code=Code.UNIMPLEMENTED,
            tp_size=hello.tp_size,
            limit=1,
        )
    return WorkerFacts(
        worker_id=hello.worker_id,
        replica_id=hello.replica_id,
        rank=hello.rank,
        tp_size=hello.tp_size,
        epoch=hello.epoch,
        applied_version=hello.applied_version,
        highest_term=hello.highest_term,
        model_fingerprint=hello.model_fingerprint,
        geometry=geometry,
        num_blocks=hello.num_blocks,
        max_num_seqs=hello.max_num_seqs,
        max_model_len=hello.max_model_len,
        max_num_batched_tokens=hello.max_num_batched_tokens,
        backend=hello.backend,
        device=hello.device,
        software_version=hello.software_version,
        peer=peer,
    )


def possible_fingerprints(model: ServedModel) -> list[bytes]:
    """What workers that hold the model can say, by their KV dtype."""
    return [served_fingerprint(model.base_fingerprint, kv_dtype=dtype) for dtype in _KV_DTYPES]


def match_model(facts: WorkerFacts, models: Iterable[ServedModel]) -> ServedModel:
    """The served model that the worker holds.

    Raises:
        ProtocolError: MODEL_MISMATCH; the worker runs another model, or other files of it.
    """
    expected: list[str] = []
    for model in models:
        fingerprint = served_fingerprint(model.base_fingerprint, kv_dtype=facts.geometry.dtype)
        if fingerprint == facts.model_fingerprint:
            return model
        expected.append(f"{model.name}={fingerprint.hex()}")
    raise ProtocolError(
        "MODEL_MISMATCH",
        f"The worker's model fingerprint {facts.model_fingerprint.hex()} is none of those served "
        f"with KV dtype {facts.geometry.dtype}: {', '.join(expected)}. Point both sides at the "
        f"same model directory; configuration, tokenizer and weights all count.",
        model_fingerprint=facts.model_fingerprint.hex(),
        expected=",".join(expected),
    )


def check_geometry(geometry: KvGeometry, pinned: KvGeometry, *, model: str) -> None:
    """Refuse a KV cache of another shape than the model's other replicas have.

    Raises:
        ProtocolError: GEOMETRY_MISMATCH, naming the first field that differs.
    """
    for field in ("block_size", "dtype", "num_layers", "num_kv_heads", "head_size"):
        actual, expected = getattr(geometry, field), getattr(pinned, field)
        if actual != expected:
            raise geometry_mismatch(field, actual, expected, model=model)


def geometry_mismatch(field: str, actual: object, expected: object, *, model: str) -> ProtocolError:
    """The refusal of a worker whose KV cache differs in `field`."""
    return ProtocolError(
        "GEOMETRY_MISMATCH",
        f"The worker's KV cache has {field} {actual}, but model {model} is served with "
        f"{field} {expected}. Start every worker of a model with the same KV settings.",
        field=f"hello.kv_geometry.{field}",
        value=actual,
        expected=expected,
        model=model,
    )


def build_scheduler(shape: ReplicaShape, model: ServedModel, config: ClusterConfig) -> Scheduler:
    """An empty scheduler and pool for a replica, within the limits of both sides."""
    max_num_seqs = min(shape.max_num_seqs, config.max_num_seqs or shape.max_num_seqs)
    # Every decoding row has to fit into a step.
    max_num_batched_tokens = max(
        max_num_seqs,
        min(
            shape.max_num_batched_tokens,
            config.max_num_batched_tokens or shape.max_num_batched_tokens,
        ),
    )
    max_model_len = min(shape.max_model_len, model.max_model_len)
    block_size = shape.geometry.block_size
    manager = KVCacheManager(
        KVCacheConfig(
            block_size=block_size,
            num_blocks=shape.num_blocks,
            enable_prefix_caching=config.prefix_caching,
        ),
        BlockHasher(
            deployment_seed=config.deployment.encode(),
            model_fingerprint=shape.model_fingerprint,
            block_size=block_size,
        ),
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
    )
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            max_bypass=config.max_bypass,
            probation_tokens=config.longest_lookahead + 2,
            vocab_size=model.vocab_size,
        ),
        manager,
    )


def _read_geometry(geometry: worker_pb2.KvGeometry) -> KvGeometry:
    for field in ("num_layers", "num_kv_heads", "head_size"):
        _in_range(f"kv_geometry.{field}", getattr(geometry, field), 1, 1 << 20)
    block_size = geometry.block_size
    if not 1 <= block_size <= 1 << 16 or block_size & (block_size - 1):
        raise _invalid("kv_geometry.block_size", block_size, "a power of two up to 65536")
    if geometry.dtype not in _KV_DTYPES:
        raise _invalid(
            "kv_geometry.dtype", repr(geometry.dtype[:200]), f"one of {', '.join(_KV_DTYPES)}"
        )
    return KvGeometry(
        num_layers=geometry.num_layers,
        num_kv_heads=geometry.num_kv_heads,
        head_size=geometry.head_size,
        dtype=geometry.dtype,
        block_size=block_size,
    )


def _in_range(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise _invalid(field, value, f"in [{low}, {high}]")


def _invalid(field: str, value: object, limit: str) -> ProtocolError:
    return ProtocolError(
        "INVALID_HELLO",
        f"hello.{field} is {value}; it must be {limit}.",
        code=Code.INVALID_ARGUMENT,
        field=f"hello.{field}",
        value=value,
        limit=limit,
    )
