"""Root mean square normalisation of rows, with the residual addition that comes before it."""

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
def _rms_norm_kernel(
    x_ptr,  # [num_tokens, hidden]
    residual_ptr,  # [num_tokens, hidden], in place; read only if HAS_RESIDUAL
    weight_ptr,  # [hidden]
    out_ptr,  # [num_tokens, hidden], output
    x_stride,  # elements between two tokens
    residual_stride,
    out_stride,
    eps,
    HIDDEN: tl.constexpr,
    HIDDEN_PAD: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program per token. int64: token * stride passes 2**31 elements.
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, HIDDEN_PAD)
    mask = column < HIDDEN
    # Weights never change: they may be on their way before the kernels ahead have ended.
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    let_next_start(PDL)
    x = tl.load(x_ptr + token * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual_at = residual_ptr + token * residual_stride + column
        x += tl.load(residual_at, mask=mask, other=0.0).to(tl.float32)
        # Rounded as it is stored, so that the sum and its norm agree.
        x = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_at, x, mask=mask)
        x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / HIDDEN + eps)
    normed = (x * scale * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * out_stride + column, normed, mask=mask)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    residual: torch.Tensor | None = None,
    out: torch.Tensor,
) -> torch.Tensor:
    """Normalise rows: out = x / sqrt(mean(x ** 2) + eps) * weight, in fp32 inside.

    With `residual`: residual += x first, in place and rounded to its dtype, and that sum is what is
    normalised.

    Args:
        x: [num_tokens, hidden], last dimension contiguous.
        weight: [hidden]. Not written by anything queued on the device at this call.
        eps: Added under the root.
        residual: [num_tokens, hidden], last dimension contiguous, or None.
        out: [num_tokens, hidden], last dimension contiguous; may be x.

    Returns:
        `out`.

    Raises:
        ValueError: a shape does not match.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, equation 4.
    """
    num_tokens, hidden = x.shape
    if out.shape != x.shape or weight.shape != (hidden,):
        raise ValueError(
            f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and out {tuple(out.shape)} do not "
            f"fit each other"
        )
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual {tuple(residual.shape)} does not match x {tuple(x.shape)}")
    if num_tokens == 0:
        return out
    summand = x if residual is None else residual
    hidden_pad = triton.next_power_of_2(hidden)
    _rms_norm_kernel[(num_tokens,)](
        x,
        summand,
        weight,
        out,
        x.stride(0),
        summand.stride(0),
        out.stride(0),
        eps,
        HIDDEN=hidden,
        HIDDEN_PAD=hidden_pad,
        HAS_RESIDUAL=residual is not None,
        num_warps=4 if hidden_pad <= 2048 else 8,
        **pdl_options(x.device),
    )
    return out
