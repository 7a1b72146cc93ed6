"""The interface of attention backends, and the choice between them.

A backend is made once per worker for one `AttentionSpec`; the model calls it once per layer. To add
one, write its module and add a `BackendInfo` to `_BACKENDS`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np


class BackendError(ValueError):
    """No attention backend can do what the model and the flags ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """What the attention of one model needs, per rank.

    Attributes:
        num_heads: Query heads; a multiple of num_kv_heads.
        num_kv_heads: Key and value heads.
        head_size: Elements per head.
        scale: Factor on the scores, usually head_size ** -0.5.
        sliding_window: Keys a query sees, itself included; None: all before it.
        dtype: Of queries, keys, values and the cache.
        block_size: Tokens per KV block.
        device: Where the cache lives.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int | None = None
    dtype: torch.dtype
    block_size: int
    device: torch.device

    def __post_init__(self) -> None:
        if self.num_kv_heads <= 0 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and "
                f"{self.num_kv_heads}"
            )
        if self.block_size <= 0 or self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size must be a power of two, got {self.block_size}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionInputs:
    """One step's batch, described for attention. Borrowed until the step has run.

    Requests lie one after the other in the token dimension. A request with an empty range of
    tokens is allowed; tokens past the last request are padding (slot -1) and give zeros.

    Attributes:
        query_start_loc: [num_reqs + 1] int32, exclusive prefix sum of tokens per request.
        seq_lens: [num_reqs] int32, tokens in the sequence after this step; 0: nothing is read and
            the request's outputs are zeros. The request's queries are its last tokens.
        block_tables: [num_reqs, max_blocks] int32; entries past a sequence are valid block ids.
            With `rows`: [num_rows, max_blocks], the tables of all rows.
        slot_mapping: [num_tokens] int64; -1 writes nothing.
        positions: [num_tokens] int64, of each token within its sequence.
        max_query_len: Largest number of tokens of one request.
        max_seq_len: Largest entry of seq_lens.
        num_tokens: Length of the token dimension, padding included.
        query_start_loc_host: The same numbers as query_start_loc in host memory.
        seq_lens_host: The same numbers as seq_lens in host memory. A backend for the CPU may plan
            with both; one that runs inside CUDA graphs must not.
        rows: [num_reqs] int32, the row of block_tables of each request; None: request i has row i.
        max_prefill_reqs: Most requests that have several queries; None: any number. It bounds the
            work that a captured step makes room for, so a smaller one is faster.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    max_query_len: int
    max_seq_len: int
    num_tokens: int
    query_start_loc_host: np.ndarray
    seq_lens_host: np.ndarray
    rows: torch.Tensor | None = None
    max_prefill_reqs: int | None = None

    def gathered_tables(self) -> torch.Tensor:
        """[num_reqs, max_blocks] int32: the table of each request."""
        if self.rows is None:
            return self.block_tables
        return self.block_tables.index_select(0, self.rows)


class AttentionMetadata(Protocol):
    """What a backend prepares once per step and every layer reads."""

    @property
    def slot_mapping(self) -> torch.Tensor:
        """[num_tokens] int64, as in the step's inputs."""
        ...


class AttentionBackend(Protocol):
    """Reads and writes the paged KV cache of one model on one device.

    Backends are free of per-request state: everything a call needs is in its arguments.
    """

    name: str
    spec: AttentionSpec

    def get_kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """Gives the shape of one layer's cache; the control plane never learns it."""
        ...

    def build_metadata(self, batch: AttentionInputs) -> AttentionMetadata:
        """Prepares a step; the result is shared by all layers and lives as long as `batch`."""
        ...

    def write_kv(
        self,
        kv_cache: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Writes keys and values, both [num_tokens, num_kv_heads, head_size], to their slots."""
        ...

    def copy_blocks(
        self, kv_caches: Sequence[torch.Tensor], src: torch.Tensor, dst: torch.Tensor
    ) -> None:
        """Copies whole blocks in every layer; src and dst are [n] int64 and share no id."""
        ...

    def forward(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        """Attends to the cache, the step's own keys included, which `write_kv` has put there.

        Args:
            query: [num_tokens, num_heads, head_size].
            kv_cache: One layer's cache.
            metadata: What `build_metadata` returned for this step.
            out: [num_tokens, num_heads, head_size], written in full.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendInfo:
    """What a backend can do, known without importing it.

    Attributes:
        name: As given to --attention-backend.
        module: Imported when chosen; its `create(spec)` makes the backend.
        device_types: Of torch devices.
        dtypes: Of the cache.
        head_sizes: None: any.
        block_sizes: None: any power of two.
        sliding_window: Whether a sliding window is supported.
        min_capability: Least compute capability of a CUDA device; None: any.
    """

    name: str
    module: str
    device_types: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    head_sizes: tuple[int, ...] | None = None
    block_sizes: tuple[int, ...] | None = None
    sliding_window: bool = False
    min_capability: tuple[int, int] | None = None

    def refusal(self, spec: AttentionSpec) -> str | None:
        """Says why this backend cannot serve `spec`; None when it can."""
        device = spec.device.type
        if device not in self.device_types:
            return f"device {device!r} is not one of {', '.join(self.device_types)}"
        if spec.dtype not in self.dtypes:
            return f"dtype {spec.dtype} is not one of {', '.join(map(str, self.dtypes))}"
        if self.head_sizes is not None and spec.head_size not in self.head_sizes:
            return f"head_size {spec.head_size} is not one of {_listed(self.head_sizes)}"
        if self.block_sizes is not None and spec.block_size not in self.block_sizes:
            return f"block_size {spec.block_size} is not one of {_listed(self.block_sizes)}"
        if device == "cuda" and self.min_capability is not None:
            capability = torch.cuda.get_device_capability(spec.device)
            if capability < self.min_capability:
                return (
                    f"the GPU has compute capability {capability[0]}.{capability[1]}, at least "
                    f"{self.min_capability[0]}.{self.min_capability[1]} is needed"
                )
        if spec.sliding_window is not None and not self.sliding_window:
            return f"no sliding window (the model has one of {spec.sliding_window} tokens)"
        return None


# In order of preference: the first that can serve a spec is the default.
_BACKENDS = (
    BackendInfo(
        name="triton",
        module="data_plane.attention.triton_backend",
        device_types=("cuda",),
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        head_sizes=(64, 80, 96, 128, 256),
        block_sizes=(16, 32, 64, 128, 256),
        sliding_window=True,
        min_capability=(8, 0),
    ),
    BackendInfo(
        name="torch",
        module="data_plane.attention.torch_backend",
        device_types=("cpu", "cuda"),
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        sliding_window=True,
    ),
)


def backend_names() -> tuple[str, ...]:
    """Gives the names that --attention-backend takes, besides "auto"."""
    return tuple(info.name for info in _BACKENDS)


def backend_infos() -> tuple[BackendInfo, ...]:
    """Gives what every known backend can do, in order of preference."""
    return _BACKENDS


def select_backend(spec: AttentionSpec, name: str = "auto") -> AttentionBackend:
    """Makes the backend `name`, or the preferred one that can serve `spec`.

    Raises:
        BackendError: the name is unknown, or the backend (with "auto": every one) cannot serve
            the spec; the message gives the reason of each.
    """
    if name != "auto" and name not in backend_names():
        raise BackendError(
            f"unknown attention backend {name!r}; known: auto, {', '.join(backend_names())}"
        )
    candidates = [info for info in _BACKENDS if name in ("auto", info.name)]
    refusals: list[str] = []
    for info in candidates:
        reason = info.refusal(spec)
        if reason is None:
            backend: AttentionBackend = importlib.import_module(info.module).create(spec)
            return backend
        refusals.append(f"{info.name}: {reason}")
    raise BackendError(f"no attention backend can serve this model: {'; '.join(refusals)}")


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))
