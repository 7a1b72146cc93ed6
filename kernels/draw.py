"""Draws one token per row by temperature alone: the highest of score plus Gumbel noise.

Noise depends on seed, sequence index, position, purpose and token id, never on how the vocabulary
is cut, so that a draw is the same in any batch and on any device.
"""

# Triton turns plain ints into constexpr arguments and takes launch options as keywords; its
# annotations do not say so.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from kernels.launch import let_next_start, wait_for_previous

# What a token id is compared with while none was found.
NO_ID = tl.constexpr(2**31 - 1)


@triton.jit
def exponential(words):
    """Exponential variates of random 32-bit words; -log of them is the CPU's Gumbel noise."""
    u = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    u = tl.minimum(u, 0.99999994)
    # -log1p(-u), whose small values are the large noise: a series where 1 - u would round it away.
    series = 1.0 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6)))))
    return tl.where(u < 0.0625, u * series, -tl.log(1.0 - u))


@triton.jit
def exponential_tile(
    state_ptr,  # words of the row
    first_quad,  # first token of the tile / 4
    PURPOSE: tl.constexpr,
    LENGTH: tl.constexpr,
    SEQUENCE_INDEX: tl.constexpr,
    SEED: tl.constexpr,
    TILE: tl.constexpr,  # tokens; a power of two, at least 4
):
    """[TILE] fp32 variates of consecutive tokens: one counter serves four of them."""
    low = tl.load(state_ptr + SEED).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(state_ptr + SEED + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    quad = first_quad + tl.arange(0, TILE // 4)
    position = quad * 0 + tl.load(state_ptr + LENGTH)
    sequence = quad * 0 + tl.load(state_ptr + SEQUENCE_INDEX)
    w0, w1, w2, w3 = tl.philox((high << 32) | low, quad, position, sequence, quad * 0 + PURPOSE)
    return exponential(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))


@triton.jit
def exponential_of(
    state_ptr,  # words of the row
    token,  # [TILE] int32
    PURPOSE: tl.constexpr,
    LENGTH: tl.constexpr,
    SEQUENCE_INDEX: tl.constexpr,
    SEED: tl.constexpr,
):
    """[TILE] fp32 variates of any tokens."""
    low = tl.load(state_ptr + SEED).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(state_ptr + SEED + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    quad = token >> 2
    position = quad * 0 + tl.load(state_ptr + LENGTH)
    sequence = quad * 0 + tl.load(state_ptr + SEQUENCE_INDEX)
    w0, w1, w2, w3 = tl.philox((high << 32) | low, quad, position, sequence, quad * 0 + PURPOSE)
    even = tl.where((token & 2) == 0, w0, w2)
    odd = tl.where((token & 2) == 0, w1, w3)
    return exponential(tl.where((token & 1) == 0, even, odd))


@triton.jit
def without_stop_ids(
    logit,  # [TILE] fp32
    token,  # [TILE] int32
    stop_ids_ptr,  # [WIDTH] int32 of this row: used entries first, then -1; -2 - id: disarmed
    WIDTH: tl.constexpr,
):
    """The logits with -inf where a token would stop the row, disarmed ones included."""
    i = 0
    stop_id = tl.load(stop_ids_ptr)
    while stop_id != -1:
        masked = tl.where(stop_id < -1, -2 - stop_id, stop_id)
        logit = tl.where(token == masked, float("-inf"), logit)
        i += 1
        stop_id = tl.load(stop_ids_ptr + i, mask=i < WIDTH, other=-1)
    return logit


@triton.jit
def draw_kernel(
    logits_ptr,  # [num_samples, vocab_size]
    rows_ptr,  # [num_samples] int32
    state_ptr,  # [num_rows, num_words] int32
    stop_ids_ptr,  # [num_rows, WIDTH] int32
    part_max_ptr,  # [num_samples, num_parts] fp32, output: highest logit; +inf: one is NaN or +inf
    part_score_ptr,  # [num_samples, num_parts] fp32, output: best score, relative to part_max
    part_token_ptr,  # [num_samples, num_parts] int32, output: whose it is
    logits_stride,
    state_stride,
    stop_ids_stride,
    VOCAB: tl.constexpr,
    WIDTH: tl.constexpr,
    PURPOSE: tl.constexpr,
    LENGTH: tl.constexpr,
    MIN_TOTAL: tl.constexpr,
    SEQUENCE_INDEX: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    SEED: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program per sample and part of the vocabulary.
    wait_for_previous(PDL)
    let_next_start(PDL)
    sample = tl.program_id(0)
    part = tl.program_id(1)
    row = tl.load(rows_ptr + sample).to(tl.int64)
    row_ptr = state_ptr + row * state_stride
    temperature = tl.load(row_ptr + TEMPERATURE).to(tl.float32, bitcast=True)
    token = part * TILE + tl.arange(0, TILE)
    # int64: sample * stride passes 2**31 with many rows of a large vocabulary.
    logit_ptr = logits_ptr + sample.to(tl.int64) * logits_stride + token
    logit = tl.load(logit_ptr, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    if tl.load(row_ptr + LENGTH) < tl.load(row_ptr + MIN_TOTAL):
        logit = without_stop_ids(logit, token, stop_ids_ptr + row * stop_ids_stride, WIDTH)
    # A NaN makes the row as unusable as +inf does.
    logit = tl.where(logit != logit, float("inf"), logit)
    highest = tl.max(logit, 0)
    # Relative to the highest, where fp32 is finest; infinity has nothing to subtract.
    is_finite = (highest > float("-inf")) & (highest < float("inf"))
    cost = tl.where(is_finite, highest, 0.0) - logit
    if temperature > 0:
        variate = exponential_tile(
            row_ptr, part * (TILE // 4), PURPOSE, LENGTH, SEQUENCE_INDEX, SEED, TILE
        )
        # The highest score - log(variate) is the lowest variate * exp(-score): one logarithm less.
        scale = tl.div_rn(1.4426950408889634, tl.maximum(temperature, 1e-37))
        # What would overflow cannot win.
        cost = variate * tl.math.exp2(tl.minimum(cost * scale, 120.0))
    best = tl.min(cost, 0)
    best_score = -best
    if temperature > 0:
        best_score = -tl.log(best)
    out = sample * tl.num_programs(1) + part
    tl.store(part_max_ptr + out, highest)
    tl.store(part_score_ptr + out, best_score)
    tl.store(part_token_ptr + out, tl.min(tl.where(cost == best, token, NO_ID), 0))
