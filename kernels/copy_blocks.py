"""Copies whole KV blocks in every layer at once."""

# Triton turns plain ints into constexpr arguments and takes launch options as keywords; its
# annotations do not say so.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kernels.launch import let_next_start, pdl_options, wait_for_previous

if TYPE_CHECKING:
    from collections.abc import Sequence

_TILE = 1024  # words per program and iteration
_MAX_PIECES = 8  # programs per block and layer


@triton.jit
def _copy_blocks_kernel(
    cache_ptrs_ptr,  # [num_layers] int64, addresses of [num_planes, num_blocks, block_words] int32
    src_ptr,  # [n] int64
    dst_ptr,  # [n] int64
    plane_words,  # words of a plane: all blocks of keys, or of values
    BLOCK_WORDS: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program per copy, layer and piece of the block.
    wait_for_previous(PDL)
    let_next_start(PDL)
    src = tl.load(src_ptr + tl.program_id(0))
    dst = tl.load(dst_ptr + tl.program_id(0))
    cache_ptr = tl.load(cache_ptrs_ptr + tl.program_id(1)).to(tl.pointer_type(tl.int32))
    for plane in tl.static_range(NUM_PLANES):
        plane_ptr = cache_ptr + plane * plane_words.to(tl.int64)
        for first in range(tl.program_id(2) * TILE, BLOCK_WORDS, tl.num_programs(2) * TILE):
            word = first + tl.arange(0, TILE)
            mask = word < BLOCK_WORDS
            value = tl.load(plane_ptr + src * BLOCK_WORDS + word, mask=mask)
            tl.store(plane_ptr + dst * BLOCK_WORDS + word, value, mask=mask)


def cache_addresses(kv_caches: Sequence[torch.Tensor]) -> torch.Tensor:
    """[num_layers] int64 on the caches' device: where each layer's cache lies.

    Raises:
        ValueError: the caches differ in shape or dtype, or are not contiguous.
    """
    first = kv_caches[0]
    for cache in kv_caches:
        if cache.shape != first.shape or cache.dtype != first.dtype or not cache.is_contiguous():
            raise ValueError("caches of all layers must have one shape and dtype and be contiguous")
    addresses = [cache.data_ptr() for cache in kv_caches]
    return torch.tensor(addresses, dtype=torch.int64, device=first.device)


def copy_blocks(
    kv_caches: Sequence[torch.Tensor],
    src: torch.Tensor,
    dst: torch.Tensor,
    *,
    addresses: torch.Tensor | None = None,
) -> None:
    """Copy blocks in all layers with one launch; every other block keeps its bytes.

    Args:
        kv_caches: Per layer [2, num_blocks, ...], contiguous, one shape and dtype; in place.
        src: [n] int64 block ids.
        dst: [n] int64 block ids; none is in src and none is there twice. Not range-checked here.
        addresses: What `cache_addresses` gave for these caches; None: asked here, which waits for
            the device.

    Raises:
        ValueError: the columns differ in length, or a block is not a whole number of words.
    """
    if src.numel() != dst.numel():
        raise ValueError(f"{src.numel()} blocks cannot be copied to {dst.numel()}")
    cache = kv_caches[0]
    num_planes, num_blocks = cache.shape[:2]
    block_bytes = cache[0, 0].numel() * cache.dtype.itemsize
    if block_bytes % 4:
        raise ValueError(f"a block has {block_bytes} bytes, not a multiple of 4")
    if src.numel() == 0:
        return
    if addresses is None:
        addresses = cache_addresses(kv_caches)
    words = block_bytes // 4
    pieces = min(_MAX_PIECES, triton.cdiv(words, _TILE))
    _copy_blocks_kernel[(src.numel(), len(kv_caches), pieces)](
        addresses,
        src,
        dst,
        num_blocks * words,
        BLOCK_WORDS=words,
        NUM_PLANES=num_planes,
        TILE=_TILE,
        num_warps=4,
        **pdl_options(src.device),
    )
