"""The gated activation of the MLP."""

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

_TILE = 1024  # elements per program


@triton.jit
def silu_times(gate, up):
    """SiLU of `gate` times `up`, each step rounded to their dtype as it is without fusion."""
    plain = gate.to(tl.float32)
    active = (plain / (1 + tl.exp(-plain))).to(gate.dtype)
    return (active.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr,  # [num_tokens, 2 * size]
    out_ptr,  # [num_tokens, size], output
    gate_up_stride,  # elements between two tokens
    out_stride,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    let_next_start(PDL)
    # int64: token * stride passes 2**31 elements.
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < SIZE
    gate = tl.load(gate_up_ptr + token * gate_up_stride + column, mask=mask, other=0.0)
    up = tl.load(gate_up_ptr + token * gate_up_stride + SIZE + column, mask=mask, other=0.0)
    tl.store(out_ptr + token * out_stride + column, silu_times(gate, up), mask=mask)


def silu_mul(gate_up: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """Multiply the second half of each row by SiLU of its first half.

    Args:
        gate_up: [num_tokens, 2 * size], last dimension contiguous.
        out: [num_tokens, size], last dimension contiguous.

    Returns:
        `out`.

    Raises:
        ValueError: a shape does not match.
    """
    num_tokens, size = out.shape
    if gate_up.shape != (num_tokens, 2 * size):
        raise ValueError(f"gate_up {tuple(gate_up.shape)} does not match out {tuple(out.shape)}")
    if num_tokens == 0:
        return out
    tile = min(_TILE, triton.next_power_of_2(size))
    _silu_mul_kernel[(num_tokens, triton.cdiv(size, tile))](
        gate_up,
        out,
        gate_up.stride(0),
        out.stride(0),
        SIZE=size,
        TILE=tile,
        num_warps=4,
        **pdl_options(out.device),
    )
    return out
