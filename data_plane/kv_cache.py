"""The KV cache: how many blocks fit the memory, and the tensors that hold them.

Owns: the memory budget, and one tensor per layer in the attention backend's shape. Does not know
which block holds what.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from data_plane.attention.base import AttentionBackend

logger = logging.getLogger(__name__)

_GIB = 1 << 30
# What a CPU worker takes unless it is told otherwise.
_CPU_DEFAULT_BYTES = _GIB
_CPU_MAX_FRACTION = 0.25  # of the memory that is available


class KVCacheError(ValueError):
    """The memory does not hold what the flags ask for; the message says what would fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheConfig:
    """Shape of the KV cache, per rank. Immutable.

    Attributes:
        num_blocks: Blocks, the null block 0 included.
        block_size: Tokens per block.
        num_layers: Layers that cache keys and values.
        num_kv_heads: Heads per rank.
        head_size: Elements per head.
        dtype: Of keys and values.
        max_model_len: Longest sequence that a row can hold.
    """

    num_blocks: int
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    max_model_len: int

    @property
    def num_tokens(self) -> int:
        """Tokens that fit at once; the null block holds none."""
        return (self.num_blocks - 1) * self.block_size

    def describe(self) -> str:
        """For people: tokens, memory, and how many longest sequences fit at once."""
        num_bytes = (
            self.num_blocks
            * self.block_size
            * bytes_per_token(
                num_layers=self.num_layers,
                num_kv_heads=self.num_kv_heads,
                head_size=self.head_size,
                dtype=self.dtype,
            )
        )
        return (
            f"{self.num_tokens} tokens in {self.num_blocks - 1} blocks of {self.block_size} "
            f"({num_bytes / _GIB:.2f} GiB), {self.num_tokens / self.max_model_len:.1f} sequences "
            f"of max_model_len={self.max_model_len} at once"
        )


def bytes_per_token(
    *, num_layers: int, num_kv_heads: int, head_size: int, dtype: torch.dtype
) -> int:
    """Bytes of keys and values of one token in all layers of this rank."""
    return 2 * num_layers * num_kv_heads * head_size * dtype.itemsize


def plan_kv_cache(
    *,
    block_size: int,
    num_layers: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    max_model_len: int,
    device: torch.device,
    num_blocks: int | None = None,
    kv_cache_memory: int | None = None,
    gpu_memory_utilization: float = 0.9,
    activation_bytes: int = 0,
) -> KVCacheConfig:
    """Decide how many blocks to allocate.

    `num_blocks` decides if given, else `kv_cache_memory` bytes, else what the device has: on a GPU
    its memory times `gpu_memory_utilization` less what is in use and less `activation_bytes`, the
    measured peak of a step; on the CPU 1 GiB, at most a quarter of the available memory.

    Raises:
        KVCacheError: a sequence of `max_model_len` tokens does not fit.
    """
    per_token = bytes_per_token(
        num_layers=num_layers, num_kv_heads=num_kv_heads, head_size=head_size, dtype=dtype
    )
    if num_blocks is None:
        budget = kv_cache_memory
        if budget is None:
            budget = _measured_budget(device, gpu_memory_utilization, activation_bytes)
        num_blocks = max(0, budget) // (per_token * block_size)
    config = KVCacheConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        dtype=dtype,
        max_model_len=max_model_len,
    )
    if config.num_tokens < max_model_len:
        needed = (-(-max_model_len // block_size) + 1) * block_size * per_token
        longest = max(0, config.num_tokens)
        remedy = f"Lower --max-model-len to {longest}, or give" if longest else "Give"
        raise KVCacheError(
            f"The KV cache has room for {max(0, num_blocks)} blocks of {block_size} tokens, one of "
            f"them the null block: the longest sequence that fits has {longest} tokens, "
            f"max_model_len is {max_model_len}. {remedy} the cache at least "
            f"{needed / _GIB:.2f} GiB (--kv-cache-memory {needed})."
        )
    return config


def allocate_kv_caches(
    config: KVCacheConfig, backend: AttentionBackend, device: torch.device
) -> list[torch.Tensor]:
    """One tensor per layer, of the backend's shape.

    All zeros: padding reads the null block, and a masked NaN in it would still be a NaN.
    """
    shape = backend.get_kv_cache_shape(
        config.num_blocks, config.block_size, config.num_kv_heads, config.head_size
    )
    caches = [
        torch.zeros(shape, dtype=config.dtype, device=device) for _ in range(config.num_layers)
    ]
    logger.info("kv cache allocated: %s", config.describe())
    return caches


def _measured_budget(
    device: torch.device, gpu_memory_utilization: float, activation_bytes: int
) -> int:
    if device.type == "cuda":
        # What other processes hold counts as used: the GPU may be shared.
        free, total = torch.cuda.mem_get_info(device)
        in_use = total - free
        return int(total * gpu_memory_utilization) - in_use - activation_bytes
    available = _available_cpu_memory()
    return min(_CPU_DEFAULT_BYTES, int(available * _CPU_MAX_FRACTION))


def _available_cpu_memory() -> int:
    """Bytes that this process can take without swapping, its container's limit included."""
    available = _GIB
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    limit, current = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and current.is_file():
        text = limit.read_text().strip()
        if text != "max":
            available = min(available, max(0, int(text) - int(current.read_text())))
    return available
