"""From one token's QKV product to its rotated query and its slot in the paged KV cache."""

# Triton turns plain ints into constexpr arguments and takes launch options as keywords; its
# annotations do not say so.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kernels.launch import let_next_start, pdl_options, wait_for_previous

if TYPE_CHECKING:
    import torch

_MAX_HEADS = 4  # per program: few enough that a single token still uses many programs


@triton.jit
def _rotated(
    heads_ptr,  # [HEADS] pointers to heads of one token
    norm_ptr,  # [head_size]; read only if HAS_NORM
    cos,  # [HALF_PAD] fp32
    sin,
    half,  # [HALF_PAD] int32
    is_head,  # [HEADS] bool
    eps,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    mask = is_head[:, None] & (half < HALF)[None, :]
    first = tl.load(heads_ptr[:, None] + half[None, :], mask=mask, other=0.0)
    second = tl.load(heads_ptr[:, None] + (half + HALF)[None, :], mask=mask, other=0.0)
    dtype: tl.constexpr = first.dtype
    first = first.to(tl.float32)
    second = second.to(tl.float32)
    if HAS_NORM:
        weight1 = tl.load(norm_ptr + half, mask=half < HALF, other=0.0).to(tl.float32)
        weight2 = tl.load(norm_ptr + half + HALF, mask=half < HALF, other=0.0).to(tl.float32)
        mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF)
        scale = tl.rsqrt(mean + eps)[:, None]
        # Rounded where the norm, taken alone, rounds its result.
        first = (first * scale * weight1[None, :]).to(dtype).to(tl.float32)
        second = (second * scale * weight2[None, :]).to(dtype).to(tl.float32)
    turned1 = first * cos[None, :] - second * sin[None, :]
    turned2 = second * cos[None, :] + first * sin[None, :]
    return turned1.to(dtype), turned2.to(dtype), mask


@triton.jit
def _rotary_and_cache_kernel(
    qkv_ptr,  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_size]
    positions_ptr,  # [num_tokens] int64
    inv_freq_ptr,  # [head_size // 2] fp32
    q_norm_ptr,  # [head_size]; read only if HAS_NORM
    k_norm_ptr,  # [head_size]; read only if HAS_NORM
    slot_mapping_ptr,  # [num_tokens] int64, -1: written nowhere
    query_ptr,  # [num_tokens, num_heads, head_size], output
    key_cache_ptr,  # [num_blocks, block_size, num_kv_heads, head_size], written in place
    value_cache_ptr,  # like key_cache_ptr
    qkv_stride,  # elements between two tokens
    query_stride,
    key_block_stride,
    key_slot_stride,
    key_head_stride,
    value_block_stride,
    value_slot_stride,
    value_head_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,  # head_size // 2
    HALF_PAD: tl.constexpr,
    HEADS: tl.constexpr,  # per program
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program per token and a few heads: those of queries first, then keys, then values.
    wait_for_previous(PDL)
    let_next_start(PDL)
    head_size: tl.constexpr = 2 * HALF
    query_programs: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    key_programs: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    # int64: token * stride passes 2**31 elements.
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    half = tl.arange(0, HALF_PAD)
    token_ptr = qkv_ptr + token * qkv_stride
    position = tl.load(positions_ptr + token).to(tl.float32)
    angle = position * tl.load(inv_freq_ptr + half, mask=half < HALF, other=0.0)
    cos = tl.cos(angle)
    sin = tl.sin(angle)
    if part < query_programs:
        head = part * HEADS + tl.arange(0, HEADS)
        first, second, mask = _rotated(
            token_ptr + head * head_size, q_norm_ptr, cos, sin, half, head < NUM_HEADS, eps,
            HALF, HAS_NORM,
        )  # fmt: skip
        out_ptr = query_ptr + token * query_stride + head[:, None] * head_size + half[None, :]
        tl.store(out_ptr, first, mask=mask)
        tl.store(out_ptr + HALF, second, mask=mask)
    else:
        slot = tl.load(slot_mapping_ptr + token)
        if slot >= 0:
            block = slot // BLOCK_SIZE
            offset = slot % BLOCK_SIZE
            if part < query_programs + key_programs:
                head = (part - query_programs) * HEADS + tl.arange(0, HEADS)
                heads_ptr = token_ptr + (NUM_HEADS + head) * head_size
                first, second, mask = _rotated(
                    heads_ptr, k_norm_ptr, cos, sin, half, head < NUM_KV_HEADS, eps,
                    HALF, HAS_NORM,
                )  # fmt: skip
                out_ptr = key_cache_ptr + block * key_block_stride + offset * key_slot_stride
                out_ptr += head[:, None] * key_head_stride + half[None, :]
                tl.store(out_ptr, first, mask=mask)
                tl.store(out_ptr + HALF, second, mask=mask)
            else:
                head = (part - query_programs - key_programs) * HEADS + tl.arange(0, HEADS)
                heads_ptr = token_ptr + (NUM_HEADS + NUM_KV_HEADS + head) * head_size
                mask = (head < NUM_KV_HEADS)[:, None] & (half < HALF)[None, :]
                in_ptr = heads_ptr[:, None] + half[None, :]
                out_ptr = value_cache_ptr + block * value_block_stride + offset * value_slot_stride
                out_ptr += head[:, None] * value_head_stride + half[None, :]
                tl.store(out_ptr, tl.load(in_ptr, mask=mask), mask=mask)
                tl.store(out_ptr + HALF, tl.load(in_ptr + HALF, mask=mask), mask=mask)


def rotary_and_cache(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    query: torch.Tensor,
) -> torch.Tensor:
    """Normalise and rotate queries and keys of a step; put keys and values into the cache.

    What `rms_norm` per head (where the model has it), the rotary embedding in the halves
    convention and `reshape_and_cache` do, in one pass. Slots that no token names keep their bytes.

    Args:
        qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_size], last dimension contiguous.
        positions: [num_tokens] int64, of each token within its sequence.
        inv_freq: [head_size // 2] fp32 angular frequencies.
        slot_mapping: [num_tokens] int64, -1 for tokens that are written nowhere. No slot twice.
        key_cache: [num_blocks, block_size, num_kv_heads, head_size], dtype of qkv, last dimension
            contiguous; in place.
        value_cache: Like key_cache.
        q_norm: [head_size] weights, given together with k_norm, or None.
        k_norm: [head_size] weights.
        eps: Of the norms.
        query: [num_tokens, num_heads, head_size], heads contiguous; output.

    Returns:
        `query`.

    Raises:
        ValueError: a shape or dtype does not match.

    Source: Su et al., RoFormer, section 3.2.
    """
    num_tokens, num_heads, head_size = query.shape
    _, block_size, num_kv_heads, cache_head_size = key_cache.shape
    if (
        qkv.shape != (num_tokens, (num_heads + 2 * num_kv_heads) * head_size)
        or cache_head_size != head_size
        or key_cache.shape != value_cache.shape
        or inv_freq.numel() * 2 != head_size
        or positions.numel() != num_tokens
        or slot_mapping.numel() != num_tokens
    ):
        raise ValueError(
            f"qkv {tuple(qkv.shape)}, query {tuple(query.shape)}, key_cache "
            f"{tuple(key_cache.shape)}, inv_freq {tuple(inv_freq.shape)}, {positions.numel()} "
            f"positions and {slot_mapping.numel()} slots do not describe the same tokens"
        )
    if not qkv.dtype == query.dtype == key_cache.dtype == value_cache.dtype:
        raise ValueError(f"cannot write {qkv.dtype} into a cache of {key_cache.dtype}")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm are given together or not at all")
    if num_tokens == 0:
        return query
    heads = min(_MAX_HEADS, triton.next_power_of_2(num_kv_heads))
    parts = triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads)
    _rotary_and_cache_kernel[(num_tokens, parts)](
        qkv,
        positions,
        inv_freq,
        inv_freq if q_norm is None else q_norm,
        inv_freq if k_norm is None else k_norm,
        slot_mapping,
        query,
        key_cache,
        value_cache,
        qkv.stride(0),
        query.stride(0),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        value_cache.stride(0),
        value_cache.stride(1),
        value_cache.stride(2),
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_size // 2,
        HALF_PAD=triton.next_power_of_2(head_size // 2),
        HEADS=heads,
        BLOCK_SIZE=block_size,
        HAS_NORM=q_norm is not None,
        num_warps=1 if heads < 4 else 2,
        **pdl_options(qkv.device),
    )
    return query
