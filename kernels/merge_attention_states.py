"""Joins two attention results over different keys of the same queries."""

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


@triton.jit
def _merge_attention_states_kernel(
    out_a_ptr,  # [num_tokens, num_heads, head_size]
    lse_a_ptr,  # [num_tokens, num_heads] fp32
    out_b_ptr,
    lse_b_ptr,
    out_ptr,  # [num_tokens, num_heads, head_size], output
    lse_ptr,  # [num_tokens, num_heads] fp32, output
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program per token and head.
    wait_for_previous(PDL)
    let_next_start(PDL)
    # int64: index * head_size passes 2**31 elements.
    index = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, HEAD_PAD)
    mask = dim < HEAD_SIZE
    lse_a = tl.load(lse_a_ptr + index)
    lse_b = tl.load(lse_b_ptr + index)
    highest = tl.maximum(lse_a, lse_b)
    # Two empty sides stay empty: subtracting -inf would give NaN.
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    weight_a = tl.exp(lse_a - shift)
    weight_b = tl.exp(lse_b - shift)
    total = weight_a + weight_b
    divisor = tl.where(total == 0, 1.0, total)
    out_a = tl.load(out_a_ptr + index * HEAD_SIZE + dim, mask=mask, other=0.0).to(tl.float32)
    out_b = tl.load(out_b_ptr + index * HEAD_SIZE + dim, mask=mask, other=0.0).to(tl.float32)
    # An empty side counts for nothing, whatever its output holds.
    out_a = tl.where(weight_a == 0, 0.0, out_a * (weight_a / divisor))
    out_b = tl.where(weight_b == 0, 0.0, out_b * (weight_b / divisor))
    merged = (out_a + out_b).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + index * HEAD_SIZE + dim, merged, mask=mask)
    tl.store(lse_ptr + index, tl.where(total == 0, float("-inf"), shift + tl.log(divisor)))


def merge_attention_states(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> torch.Tensor:
    """Give the attention over the keys of a and b together.

    Args:
        out_a: [num_tokens, num_heads, head_size], contiguous: attention over the keys of a.
        lse_a: [num_tokens, num_heads] fp32: log of the sum of exp(score); -inf: a has no keys.
        out_b: Like out_a, over other keys.
        lse_b: Like lse_a.
        out: Like out_a; zeros where neither side has keys.
        lse: Like lse_a.

    Returns:
        `out`.

    Raises:
        ValueError: a shape does not match, or a tensor is not contiguous.

    Source: Flash-Decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html
    """
    if not (out_a.shape == out_b.shape == out.shape and lse_a.shape == lse_b.shape == lse.shape):
        raise ValueError(f"{tuple(out_a.shape)}, {tuple(out_b.shape)}, {tuple(out.shape)} differ")
    if not all(x.is_contiguous() for x in (out_a, out_b, out, lse_a, lse_b, lse)):
        raise ValueError("attention states must be contiguous")
    if lse.shape != out.shape[:2]:
        raise ValueError(f"lse {tuple(lse.shape)} does not match out {tuple(out.shape)}")
    if lse.numel() == 0:
        return out
    head_size = out.shape[2]
    _merge_attention_states_kernel[(lse.numel(),)](
        out_a,
        lse_a,
        out_b,
        lse_b,
        out,
        lse,
        HEAD_SIZE=head_size,
        HEAD_PAD=triton.next_power_of_2(head_size),
        num_warps=1,
        **pdl_options(out.device),
    )
    return out
