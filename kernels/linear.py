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

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.launch import let_next_start, pdl_options, shared_memory, wait_for_previous
from kernels.silu_mul import silu_mul, silu_times

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_GEMV_ROWS = 4
MAX_SKINNY_ROWS = 128
MAX_OWN_ROWS = 32  # above, the library is faster but for some gated products

_NARROW = 2048  # output columns: fewer leave too few programs for tall tiles
# Output columns from which on the library reads weights at full speed: with few rows in a
# vocabulary only, with more of them, which every program reads, in a wide layer already.
_WIDE = 65536
_WIDE_WITH_ROWS = 16384
_FEW_ROWS = 16
_LARGE = 1 << 24  # weights


@triton.jit
def _columns(out_features, OUT_TILE: tl.constexpr, GATED: tl.constexpr):
    """This program's output column and row of the weight for each row of its tile."""
    index = tl.arange(0, OUT_TILE)
    if GATED:
        # Half of the tile are gates, the other half what they are multiplied with.
        half: tl.constexpr = OUT_TILE // 2
        column = tl.program_id(0) * half + index % half
        return column, column + (index // half) * out_features
    column = tl.program_id(0) * OUT_TILE + index
    return column, column


@triton.jit(do_not_specialize=["num_rows"])
def _gemv_kernel(
    x_ptr,  # [num_rows, in_features]
    weight_ptr,  # [out_features, in_features], contiguous; twice as many rows if GATED
    bias_ptr,  # one for each row of the weight; read only if HAS_BIAS
    out_ptr,  # [num_rows, out_features], output
    num_rows,
    in_features,
    out_features,
    x_stride,  # elements between two rows
    out_stride,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,  # power of two >= num_rows
    OUT_TILE: tl.constexpr,  # rows of the weight per program
    IN_TILE: tl.constexpr,  # input columns per iteration
    PDL: tl.constexpr,
):
    column, weight_row = _columns(out_features, OUT_TILE, GATED)
    k = tl.arange(0, IN_TILE)
    row = tl.arange(0, ROWS)
    # int64: weight_row * in_features passes 2**31 elements with a large vocabulary.
    weight_row_ptr = weight_ptr + weight_row.to(tl.int64)[:, None] * in_features
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
        bias = tl.load(bias_ptr + weight_row, mask=column < out_features, other=0.0)
        result += bias.to(tl.float32)[None, :]
    result = result.to(out_ptr.dtype.element_ty)
    if GATED:
        half: tl.constexpr = OUT_TILE // 2
        gate, up = tl.split(tl.permute(tl.reshape(result, (ROWS, 2, half)), (0, 2, 1)))
        result = silu_times(gate, up)
        column = tl.program_id(0) * half + tl.arange(0, half)
    out_mask = (row < num_rows)[:, None] & (column < out_features)[None, :]
    tl.store(out_ptr + row[:, None] * out_stride + column[None, :], result, mask=out_mask)


@triton.jit(do_not_specialize=["num_rows"])
def _skinny_kernel(
    x_ptr,  # [num_rows, in_features]
    weight_ptr,  # [out_features, in_features], contiguous; twice as many rows if GATED
    bias_ptr,  # one for each row of the weight; read only if HAS_BIAS
    out_ptr,  # [num_rows, out_features], output
    num_rows,
    in_features,
    out_features,
    x_stride,  # elements between two rows
    out_stride,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,  # power of two >= num_rows, at least 16
    OUT_TILE: tl.constexpr,
    IN_TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    # The weights are the tall operand: a tile of them fills a tensor core where few rows would not.
    column, weight_row = _columns(out_features, OUT_TILE, GATED)
    row = tl.arange(0, ROWS)
    # int64: weight_row * in_features passes 2**31 elements with a large vocabulary.
    weight_row_ptr = weight_ptr + weight_row.to(tl.int64)[:, None] * in_features
    wait_for_previous(PDL)
    let_next_start(PDL)
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
        bias = tl.load(bias_ptr + weight_row, mask=column < out_features, other=0.0)
        acc += bias.to(tl.float32)[:, None]
    result = acc.to(out_ptr.dtype.element_ty)
    if GATED:
        half: tl.constexpr = OUT_TILE // 2
        gate, up = tl.split(tl.permute(tl.reshape(result, (2, half, ROWS)), (1, 2, 0)))
        result = silu_times(gate, up)
        column = tl.program_id(0) * half + tl.arange(0, half)
    out_mask = (column < out_features)[:, None] & (row < num_rows)[None, :]
    tl.store(out_ptr + row[None, :] * out_stride + column[:, None], result, mask=out_mask)


class LinearCut(NamedTuple):
    """How a product is cut; `num_stages` is of the skinny kernel alone."""

    out_tile: int
    in_tile: int
    num_warps: int
    num_stages: int = 0

    def stage_bytes(self, num_rows: int) -> int:
        """Shared memory that all stages of the skinny kernel take, elements having two bytes."""
        rows = max(16, triton.next_power_of_2(num_rows))
        return self.num_stages * 2 * (self.out_tile + rows) * self.in_tile


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    cut: LinearCut,
    *,
    gated: bool = False,
) -> None:
    """Launch the kernel for at most `MAX_GEMV_ROWS` rows; see `linear` and `gated_linear`."""
    num_rows, in_features = x.shape
    out_features = out.shape[1]
    _gemv_kernel[(triton.cdiv(weight.shape[0], cut.out_tile),)](
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
        GATED=gated,
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
    *,
    gated: bool = False,
) -> None:
    """Launch the kernel for at most `MAX_SKINNY_ROWS` rows; see `linear` and `gated_linear`."""
    num_rows, in_features = x.shape
    out_features = out.shape[1]
    _skinny_kernel[(triton.cdiv(weight.shape[0], cut.out_tile),)](
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
        GATED=gated,
        ROWS=max(16, triton.next_power_of_2(num_rows)),
        OUT_TILE=cut.out_tile,
        IN_TILE=cut.in_tile,
        STAGES=cut.num_stages,
        num_warps=cut.num_warps,
        **pdl_options(x.device),
    )


def linear_cut(
    num_rows: int, out_features: int, in_features: int, *, gated: bool = False
) -> LinearCut | None:
    """How to cut a product; None: the library does it as well.

    Measured on an H200 in bf16 within decode steps of Qwen3-0.6B and Llama-3.1-8B: alone, products
    look different. A kernel starts while the one ahead of it ends, on the multiprocessors that are
    free by then. Small programs would pile up on those; programs whose stages take more than half
    of the shared memory lie one on each, which is worth a tenth of a step of few rows.
    """
    if gated and MAX_OWN_ROWS < num_rows <= MAX_SKINNY_ROWS:
        # One launch less makes up for rows read again and again, while the matrix is small.
        if 4096 < out_features <= _WIDE_WITH_ROWS and out_features * in_features < _LARGE:
            return LinearCut(64, 128, 4, 5 if num_rows <= 64 else 4)
        return None
    if gated and 1 < num_rows <= MAX_GEMV_ROWS and in_features < _NARROW:
        # The narrow product behind it has small programs: they need a kernel in between.
        return None
    is_few = num_rows <= _FEW_ROWS
    if num_rows > MAX_OWN_ROWS or out_features > (_WIDE if is_few else _WIDE_WITH_ROWS):
        return None
    if num_rows <= MAX_GEMV_ROWS and out_features < _NARROW:
        if num_rows > 2:
            return LinearCut(4, 1024, 4)
        in_tile = min(4096 if num_rows == 1 else 2048, triton.next_power_of_2(in_features))
        return LinearCut(8 if in_tile <= 2048 and num_rows == 1 else 4, in_tile, 4)
    if num_rows == 1 and in_features < 4096:
        return LinearCut(8, 1024 if out_features <= 4096 else 512, 4)
    if out_features < _NARROW:
        return LinearCut(16, 512, 4, 6 if is_few else 4)
    if out_features <= 4096:
        return LinearCut(32, 256, 4, 7 if is_few else 6)
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
    cut = _cut_for(x, weight, gated=False)
    if cut is not None:
        _launcher(cut)(x, weight, bias, out, cut)
        return out
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def gated_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """What `silu_mul` gives of `linear`'s result, with few rows in one launch.

    Args:
        x: As of `linear`.
        weight: [2 * size, in_features]: the gates, then what they are multiplied with.
        bias: [2 * size] or None.
        out: [num_rows, size], last dimension contiguous, dtype of x; not x.

    Returns:
        `out`.

    Raises:
        ValueError: a shape does not match.
    """
    num_rows, in_features = x.shape
    if weight.shape != (2 * out.shape[1], in_features) or out.shape[0] != num_rows:
        raise ValueError(
            f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and out {tuple(out.shape)} do not "
            f"fit each other"
        )
    cut = _cut_for(x, weight, gated=True)
    if cut is None or num_rows == 0:
        product = linear(x, weight, bias, out=x.new_empty(num_rows, weight.shape[0]))
        return silu_mul(product, out=out)
    _launcher(cut)(x, weight, bias, out, cut, gated=True)
    return out


def _cut_for(x: torch.Tensor, weight: torch.Tensor, *, gated: bool) -> LinearCut | None:
    if x.dtype.itemsize != 2:
        return None
    num_rows, in_features = x.shape
    cut = linear_cut(num_rows, weight.shape[0], in_features, gated=gated)
    # Cuts are made for GPUs with as much shared memory as an H200; others use the library.
    if cut is not None and cut.stage_bytes(num_rows) > shared_memory(x.device):
        return None
    return cut


def _launcher(cut: LinearCut) -> Callable[..., None]:
    # Only the skinny kernel's cuts have stages.
    return skinny if cut.num_stages else gemv
