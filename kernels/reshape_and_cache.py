"""Writes the keys and values of a step into their slots of one layer's paged KV cache."""

# Triton turns plain ints into constexpr arguments; its annotations do not say so.
# pyright: reportArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

_MAX_TILE = 1024  # elements of a token per program


@triton.jit
def _reshape_and_cache_kernel(
    key_ptr,  # [num_tokens, num_kv_heads, head_size]
    value_ptr,  # [num_tokens, num_kv_heads, head_size]
    key_cache_ptr,  # [num_blocks, block_size, num_kv_heads, head_size], written in place
    value_cache_ptr,  # [num_blocks, block_size, num_kv_heads, head_size], written in place
    slot_mapping_ptr,  # [num_tokens] int64, -1: written nowhere
    key_token_stride,  # elements between two tokens of key
    key_head_stride,
    value_token_stride,
    value_head_stride,
    key_block_stride,  # elements between two blocks of key_cache
    key_slot_stride,  # elements between two tokens of a block
    key_cache_head_stride,
    value_block_stride,
    value_slot_stride,
    value_cache_head_stride,
    BLOCK_SIZE: tl.constexpr,  # tokens per KV block
    HEAD_SIZE: tl.constexpr,
    TOKEN_SIZE: tl.constexpr,  # num_kv_heads * head_size
    TILE: tl.constexpr,  # elements per program; power of two
):
    # One program per token and tile of its elements; strides, because the cache's layout is the
    # attention backend's and the new keys are a slice of the QKV product.
    # int64: token * stride and block * stride pass 2**31 elements.
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot >= 0:
        element = tl.program_id(1) * TILE + tl.arange(0, TILE)
        mask = element < TOKEN_SIZE
        head = element // HEAD_SIZE
        dim = element % HEAD_SIZE
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE

        key_in = token * key_token_stride + head * key_head_stride + dim
        key_out = (
            block * key_block_stride + offset * key_slot_stride + head * key_cache_head_stride + dim
        )
        key = tl.load(key_ptr + key_in, mask=mask, other=0)
        tl.store(key_cache_ptr + key_out, key, mask=mask)

        value_in = token * value_token_stride + head * value_head_stride + dim
        value_out = (
            block * value_block_stride
            + offset * value_slot_stride
            + head * value_cache_head_stride
            + dim
        )
        value = tl.load(value_ptr + value_in, mask=mask, other=0)
        tl.store(value_cache_ptr + value_out, value, mask=mask)


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write each token's key and value into its slot; every other slot keeps its bytes.

    key_cache[slot // block_size, slot % block_size] = key[token], likewise for value

    Args:
        key: [num_tokens, num_kv_heads, head_size], any strides but a contiguous last dimension.
        value: Same shape and dtype as `key`.
        key_cache: [num_blocks, block_size, num_kv_heads, head_size], same dtype, any strides but a
            contiguous last dimension; written in place.
        value_cache: Same shape as `key_cache`; may be interleaved with it in memory.
        slot_mapping: [num_tokens] int64, -1 for tokens that are written nowhere. No slot twice.

    Raises:
        ValueError: a shape, dtype or stride does not match. Slots are not range-checked here.
    """
    num_tokens, num_kv_heads, head_size = key.shape
    if value.shape != key.shape or slot_mapping.numel() != num_tokens:
        raise ValueError(
            f"key {tuple(key.shape)}, value {tuple(value.shape)} and slot_mapping "
            f"{tuple(slot_mapping.shape)} do not describe the same tokens"
        )
    if key_cache.shape != value_cache.shape or key_cache.shape[2:] != key.shape[1:]:
        raise ValueError(
            f"caches {tuple(key_cache.shape)} and {tuple(value_cache.shape)} do not hold tokens of "
            f"{tuple(key.shape[1:])}"
        )
    if not key.dtype == value.dtype == key_cache.dtype == value_cache.dtype:
        raise ValueError(f"cannot write {key.dtype} into a cache of {key_cache.dtype}")
    if any(tensor.stride(-1) != 1 for tensor in (key, value, key_cache, value_cache)):
        raise ValueError("the last dimension of keys, values and caches must be contiguous")
    if num_tokens == 0:
        return
    token_size = num_kv_heads * head_size
    tile = min(_MAX_TILE, triton.next_power_of_2(token_size))
    _reshape_and_cache_kernel[(num_tokens, triton.cdiv(token_size, tile))](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        value_cache.stride(0),
        value_cache.stride(1),
        value_cache.stride(2),
        BLOCK_SIZE=key_cache.shape[1],
        HEAD_SIZE=head_size,
        TOKEN_SIZE=token_size,
        TILE=tile,
    )
