"""The end of a step: draw a token per row, see whether the row stops, advance its state.

Two kernels: one draws (`kernels.draw`, or `kernels.draw_filtered` for rows with min_p, top_k or
top_p), one joins the parts of a draw and does the rest.
"""

# Triton turns plain ints into constexpr arguments and takes launch options as keywords; its
# annotations do not say so.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kernels.draw import NO_ID, draw_kernel
from kernels.draw_filtered import draw_filtered_kernel
from kernels.launch import let_next_start, pdl_options, wait_for_previous

if TYPE_CHECKING:
    from kernels.row_layout import RowLayout

_TILE = 4096  # tokens per part
# Mantissa and exponent bits that a logit of this dtype leaves empty in fp32.
_EMPTY_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}

# Values of the wire's FinishReason; 0: goes on.
_STOP = tl.constexpr(1)
_LENGTH = tl.constexpr(2)
_ERROR = tl.constexpr(4)
_REASON_SHIFT = tl.constexpr(8)


@triton.jit
def _finish_kernel(
    part_max_ptr,  # [num_samples, num_parts] fp32
    part_score_ptr,  # [num_samples, num_parts] fp32
    part_token_ptr,  # [num_samples, num_parts] int32
    rows_ptr,  # [num_samples] int32
    state_ptr,  # [num_rows, num_words] int32, in place
    stop_ids_ptr,  # [num_rows, WIDTH] int32
    results_ptr,  # [num_samples, 2] int32, output
    state_stride,
    stop_ids_stride,
    NUM_PARTS: tl.constexpr,
    PARTS_PAD: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    LAST_TOKEN: tl.constexpr,
    LENGTH: tl.constexpr,
    ACTIVE: tl.constexpr,
    MAX_TOTAL: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program per sample.
    wait_for_previous(PDL)
    let_next_start(PDL)
    sample = tl.program_id(0)
    row = tl.load(rows_ptr + sample).to(tl.int64)
    row_ptr = state_ptr + row * state_stride
    index = tl.load(row_ptr + LENGTH)
    is_live = tl.load(row_ptr + ACTIVE) > 0
    temperature = tl.load(row_ptr + TEMPERATURE).to(tl.float32, bitcast=True)
    part = tl.arange(0, PARTS_PAD)
    mask = part < NUM_PARTS
    out = sample * NUM_PARTS + part
    part_max = tl.load(part_max_ptr + out, mask=mask, other=float("-inf"))
    part_score = tl.load(part_score_ptr + out, mask=mask, other=float("-inf"))
    part_token = tl.load(part_token_ptr + out, mask=mask, other=NO_ID)
    highest = tl.max(part_max, 0)
    is_usable = (highest > float("-inf")) & (highest < float("inf"))
    # Where it is not, any number does: nothing is taken from it.
    shift = tl.where(is_usable, highest, 0.0)
    usual = (part_max > float("-inf")) & (part_max < float("inf"))
    below = tl.where(usual, part_max - shift, 0.0)
    score = tl.div_rn(below, tl.where(temperature > 0, temperature, 1.0)) + part_score
    score = tl.where(usual, score, float("-inf"))
    best = tl.max(score, 0)
    token = tl.min(tl.where(score == best, part_token, NO_ID), 0)
    token = tl.where(is_usable, token, -1)
    i = tl.arange(0, WIDTH_PAD)
    stop_id = tl.load(stop_ids_ptr + row * stop_ids_stride + i, mask=i < WIDTH, other=-1)
    is_stop = tl.max(((stop_id == token) & (stop_id >= 0)).to(tl.int32), 0) > 0
    reason = tl.where(index + 1 >= tl.load(row_ptr + MAX_TOTAL), _LENGTH, 0)
    reason = tl.where(is_stop, _STOP, reason)
    reason = tl.where(is_usable, reason, _ERROR)
    reason = tl.where(is_live, reason, 0)
    produced = (is_live & is_usable).to(tl.int32)
    tl.store(results_ptr + sample * 2, token)
    tl.store(results_ptr + sample * 2 + 1, (reason << _REASON_SHIFT) + produced)
    if is_live:
        tl.store(row_ptr + LAST_TOKEN, token)
        tl.store(row_ptr + ACTIVE, (reason == 0).to(tl.int32))


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleScratch:
    """What the two kernels of a draw hand over; reused by every step of one stream.

    Attributes:
        part_max: [max_num_samples * num_parts] fp32.
        part_score: Likewise.
        part_token: [max_num_samples * num_parts] int32.
        candidates: [max_num_samples * tile] int32: the likeliest tokens of a filtered draw.
        vocab_size: Tokens.
        tile: Tokens per part.
    """

    part_max: torch.Tensor
    part_score: torch.Tensor
    part_token: torch.Tensor
    candidates: torch.Tensor
    vocab_size: int
    tile: int


def new_sample_scratch(
    *, max_num_samples: int, vocab_size: int, device: torch.device, tile: int = _TILE
) -> SampleScratch:
    """Allocate what `sample_rows` needs for up to that many samples."""
    num_parts = triton.cdiv(vocab_size, tile)

    def empty(dtype: torch.dtype, size: int = num_parts) -> torch.Tensor:
        return torch.empty(max_num_samples * size, dtype=dtype, device=device)

    return SampleScratch(
        part_max=empty(torch.float32),
        part_score=empty(torch.float32),
        part_token=empty(torch.int32),
        candidates=empty(torch.int32, tile),
        vocab_size=vocab_size,
        tile=tile,
    )


def sample_rows(
    logits: torch.Tensor,
    rows: torch.Tensor,
    state: torch.Tensor,
    stop_ids: torch.Tensor,
    *,
    layout: RowLayout,
    purpose: int,
    is_filtered: bool,
    scratch: SampleScratch,
    results: torch.Tensor,
) -> torch.Tensor:
    """Draw a token per sample, check stops, and write tokens and active flags of live rows back.

    Temperature, then min_p, top_k and top_p, as `data_plane.sampler.sample` draws on the CPU, and
    stops as `data_plane.stop_check` finds them: the same tokens, up to the rounding of a logarithm.
    Below a row's min_total its stop ids are masked. Waits for nothing, allocates nothing.

    Args:
        logits: [n, vocab_size] fp32, bf16 or fp16, last dimension contiguous. With `is_filtered`,
            stop ids are masked in place.
        rows: [n] int32; of the padding row, which is not active, as often as needed.
        state: [num_rows, num_words] int32. Read through `layout`; last token and active flag of
            live rows are written. The length is that after the step.
        stop_ids: [num_rows, width] int32: used entries first, -1 where unused, -2 - id where an id
            ends nothing.
        layout: Columns of state.
        purpose: Last word of the counter of the draws.
        is_filtered: Whether min_p, top_k and top_p of the rows are looked at. Rows without any of
            them draw the same either way.
        scratch: For this vocabulary; handed from kernel to kernel.
        results: [n, 2] int32, contiguous, written: the token, -1 for none; tokens produced (0 or 1)
            and, above 8 bits, the finish reason.

    Returns:
        `results`.

    Raises:
        ValueError: a shape does not match.
    """
    num_samples, vocab_size = logits.shape
    num_parts = 1 if is_filtered else triton.cdiv(vocab_size, scratch.tile)
    if vocab_size != scratch.vocab_size or num_samples * num_parts > scratch.part_max.numel():
        raise ValueError(
            f"logits {tuple(logits.shape)} do not fit scratch of {scratch.part_max.numel()} parts "
            f"for a vocabulary of {scratch.vocab_size}"
        )
    if rows.numel() != num_samples or results.shape != (num_samples, 2):
        raise ValueError(
            f"{num_samples} samples, {rows.numel()} rows and results {tuple(results.shape)}"
        )
    if num_samples == 0:
        return results
    pdl = pdl_options(logits.device)
    parts = (scratch.part_max, scratch.part_score, scratch.part_token)
    strides = (logits.stride(0), state.stride(0), stop_ids.stride(0))
    width = stop_ids.shape[1]
    if is_filtered:
        draw_filtered_kernel[(num_samples,)](
            logits,
            rows,
            state,
            stop_ids,
            *parts,
            scratch.candidates,
            *strides,
            VOCAB=vocab_size,
            WIDTH=width,
            PURPOSE=purpose,
            LENGTH=layout.length,
            MIN_TOTAL=layout.min_total,
            SEQUENCE_INDEX=layout.sequence_index,
            TOP_K=layout.top_k,
            TEMPERATURE=layout.temperature,
            TOP_P=layout.top_p,
            MIN_P=layout.min_p,
            SEED=layout.seed,
            SHIFT=_EMPTY_BITS[logits.dtype],
            TILE=scratch.tile,
            num_warps=32,
            **pdl,
        )
    else:
        draw_kernel[(num_samples, num_parts)](
            logits,
            rows,
            state,
            stop_ids,
            *parts,
            *strides,
            VOCAB=vocab_size,
            WIDTH=width,
            PURPOSE=purpose,
            LENGTH=layout.length,
            MIN_TOTAL=layout.min_total,
            SEQUENCE_INDEX=layout.sequence_index,
            TEMPERATURE=layout.temperature,
            SEED=layout.seed,
            TILE=scratch.tile,
            num_warps=8,
            **pdl,
        )
    _finish_kernel[(num_samples,)](
        *parts,
        rows,
        state,
        stop_ids,
        results,
        state.stride(0),
        stop_ids.stride(0),
        NUM_PARTS=num_parts,
        PARTS_PAD=triton.next_power_of_2(num_parts),
        WIDTH=width,
        WIDTH_PAD=triton.next_power_of_2(width),
        LAST_TOKEN=layout.last_token,
        LENGTH=layout.length,
        ACTIVE=layout.active,
        MAX_TOTAL=layout.max_total,
        TEMPERATURE=layout.temperature,
        num_warps=4,
        **pdl,
    )
    return results
