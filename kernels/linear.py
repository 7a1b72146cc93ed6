"""Matrix products of few rows with weights that stay the same: reading the weights is the cost.

For one row, and up to `MAX_GEMV_ROWS` of narrow products, a program owns some output columns and
keeps everything in registers; up to `MAX_OWN_ROWS` rows it multiplies on tensor cores with the
weights streaming by. What is larger, or what the library does as well, goes to the library. Neither
kernel splits K over programs, so results do not depend on timing.
"""

# Triton turns plain ints into constexpr arguments and takes launch options as keywords; its
# annotations do not say so.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.launch import let_next_start, pdl_options, wait_for_previous

MAX_GEMV_ROWS = 4
MAX_SKINNY_ROWS = 64
MAX_OWN_ROWS = 32  # above, the library is faster everywhere

_NARROW = 2048  # output columns: fewer leave too few programs for tall tiles
_WIDE = 16384  # output columns: from here on the library reads weights at full speed


@triton.jit(do_not_specialize=["num_rows"])
def _gemv_kernel(
    x_ptr,  # [num_rows, in_features]
    weight_ptr,  # [out_features, in_features], contiguous
    bias_ptr,  # [out_features]; read only if HAS_BIAS
    out_ptr,  # [num_rows, out_features], output
    num_rows,
    in_features,
    out_features,
    x_stride,  # elements between two rows
    out_stride,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,  # power of two >= num_rows
    OUT_TILE: tl.constexpr,  # output columns per program
    IN_TILE: tl.constexpr,  # input columns per iteration
    PDL: tl.constexpr,
):
    column = tl.program_id(0) * OUT_TILE + tl.arange(0, OUT_TILE)
    k = tl.arange(0, IN_TILE)
    row = tl.arange(0, ROWS)
    # int64: column * in_features passes 2**31 elements with a large vocabulary.
    weight_row_ptr = weight_ptr + column.to(tl.int64)[:, None] * in_features
    is_column = (column < out_features)[:, None]
    # Weights never change: they are on their way before the kernels ahead have ended.
    mask = is_column & (k < in_features)[None, :]
    weight = tl.load(weight_row_ptr + k[None, :], mask=mask, other=0.0)
    wait_for_previous(PDL)
    let_next_start(PDL)
    x_row_ptr = x_ptr + row[:, None] * x_stride
    x_mask = (row < num_rows)[:, None] & (k < in_features)[None, :]
    x = tl.load(x_row_ptr + k[None, :], mask=x_mask, other=0.0).to(tl.float32)
    acc = x[:, None, :] * weight.to(tl.float32)[None, :, :]
    for first in range(IN_TILE, in_features, IN_TILE):
        k = first + tl.arange(0, IN_TILE)
        mask = is_column & (k < in_features)[None, :]
        weight = tl.load(weight_row_ptr + k[None, :], mask=mask, other=0.0)
        x_mask = (row < num_rows)[:, None] & (k < in_features)[None, :]
        x = tl.load(x_row_ptr + k[None, :], mask=x_mask, other=0.0).to(tl.float32)
        acc += x[:, None, :] * weight.to(tl.float32)[None, :, :]
    result = tl.sum(acc, 2)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=column < out_features, other=0.0)
        result += bias.to(tl.float32)[None, :]
    out_mask = (row < num_rows)[:, None] & (column < out_features)[None, :]
    tl.store(
        out_ptr + row[:, None] * out_stride + column[None, :],
        result.to(out_ptr.dtype.element_ty),
        mask=out_mask,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _skinny_kernel(
    x_ptr,  # [num_rows, in_features]
    weight_ptr,  # [out_features, in_features], contiguous
    bias_ptr,  # [out_features]; read only if HAS_BIAS
    out_ptr,  # [num_rows, out_features], output
    num_rows,
    in_features,
    out_features,
    x_stride,  # elements between two rows
    out_stride,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,  # power of two >= num_rows, at least 16
    OUT_TILE: tl.constexpr,
    IN_TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    # The weights are the tall operand: a tile of them fills a tensor core where few rows would not.
    wait_for_previous(PDL)
    let_next_start(PDL)
    column = tl.program_id(0) * OUT_TILE + tl.arange(0, OUT_TILE)
    row = tl.arange(0, ROWS)
    # int64: column * in_features passes 2**31 elements with a large vocabulary.
    weight_row_ptr = weight_ptr + column.to(tl.int64)[:, None] * in_features
    x_row_ptr = x_ptr + row[:, None] * x_stride
    is_column = (column < out_features)[:, None]
    is_row = (row < num_rows)[:, None]
    acc = tl.zeros([OUT_TILE, ROWS], tl.float32)
    for first in tl.range(0, in_features, IN_TILE, num_stages=STAGES):
        k = first + tl.arange(0, IN_TILE)
        is_k = (k < in_features)[None, :]
        weight = tl.load(weight_row_ptr + k[None, :], mask=is_column & is_k, other=0.0)
        x = tl.load(x_row_ptr + k[None, :], mask=is_row & is_k, other=0.0)
        acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=column < out_features, other=0.0)
        acc += bias.to(tl.float32)[:, None]
    tl.store(
        out_ptr + row[None, :] * out_stride + column[:, None],
        acc.to(out_ptr.dtype.element_ty),
        mask=is_column & (row < num_rows)[None, :],
    )


class LinearCut(NamedTuple):
    """How a product is cut; `num_stages` is of the skinny kernel alone."""

    out_tile: int
    in_tile: int
    num_warps: int
    num_stages: int = 0


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    cut: LinearCut,
) -> None:
    """Launch the kernel for at most `MAX_GEMV_ROWS` rows; see `linear`."""
    num_rows, in_features = x.shape
    out_features = weight.shape[0]
    _gemv_kernel[(triton.cdiv(out_features, cut.out_tile),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        num_rows,
        in_features,
        out_features,
        x.stride(0),
        out.stride(0),
        HAS_BIAS=bias is not None,
        ROWS=triton.next_power_of_2(num_rows),
        OUT_TILE=cut.out_tile,
        IN_TILE=cut.in_tile,
        num_warps=cut.num_warps,
        **pdl_options(x.device),
    )


def skinny(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    cut: LinearCut,
) -> None:
    """Launch the kernel for at most `MAX_SKINNY_ROWS` rows; see `linear`."""
    num_rows, in_features = x.shape
    out_features = weight.shape[0]
    _skinny_kernel[(triton.cdiv(out_features, cut.out_tile),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        num_rows,
        in_features,
        out_features,
        x.stride(0),
        out.stride(0),
        HAS_BIAS=bias is not None,
        ROWS=max(16, triton.next_power_of_2(num_rows)),
        OUT_TILE=cut.out_tile,
        IN_TILE=cut.in_tile,
        STAGES=cut.num_stages,
        num_warps=cut.num_warps,
        **pdl_options(x.device),
    )


def linear_cut(num_rows: int, out_features: int, in_features: int) -> LinearCut | None:
    """How to cut a product; None: the library does it as well.

    Measured on an H200 in bf16 with the matrices of Qwen3-0.6B and Llama-3.1-8B, 1 to 64 rows.
    """
    if num_rows > MAX_OWN_ROWS or out_features > _WIDE:
        return None
    if num_rows <= MAX_GEMV_ROWS and out_features < _NARROW:
        if num_rows > 2:
            return LinearCut(4, 1024, 4)
        in_tile = min(4096 if num_rows == 1 else 2048, triton.next_power_of_2(in_features))
        return LinearCut(8 if in_tile <= 2048 and num_rows == 1 else 4, in_tile, 4)
    if num_rows == 1 and in_features < 4096:
        return LinearCut(8, 1024 if out_features <= 4096 else 512, 4)
    if out_features < _NARROW:
        return LinearCut(16, 512, 4, 3)
    if out_features <= 4096:
        return LinearCut(32, 256, 4, 4)
    return LinearCut(64, 128, 4, 5)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """Multiply: out = x weight^T + bias, summed in fp32.

    The result of a row does not depend on the other rows, but on how many there are: kernels for
    one, for few and for many rows sum in different orders.

    Args:
        x: [num_rows, in_features], last dimension contiguous.
        weight: [out_features, in_features], contiguous. Not written by anything queued on the
            device at this call.
        bias: [out_features] or None; likewise.
        out: [num_rows, out_features], last dimension contiguous, dtype of x; not x.

    Returns:
        `out`.

    Raises:
        ValueError: a shape does not match.
    """
    num_rows, in_features = x.shape
    out_features = weight.shape[0]
    if weight.shape[1] != in_features or out.shape != (num_rows, out_features):
        raise ValueError(
            f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and out {tuple(out.shape)} do not "
            f"fit each other"
        )
    if num_rows == 0:
        return out
    cut = linear_cut(num_rows, out_features, in_features) if x.dtype.itemsize == 2 else None
    if cut is not None:
        # Only the skinny kernel's cuts have stages.
        launch = skinny if cut.num_stages else gemv
        launch(x, weight, bias, out, cut)
        return out
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)
