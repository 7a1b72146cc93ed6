"""Draws one token per row under min_p, top_k and top_p, without sorting and without waiting.

Tokens are ranked by logit, ties by id; top_k and top_p keep a prefix of that order. The cut of
top_k is found by bisecting the bits of logits. top_p needs no cut: the best noisy token of those
before a candidate is drawn until one lies in the kept prefix, which one look at the mass before it
tells. So what comes out is the best noisy token of the kept prefix, as if it had been sorted.
"""

# Triton turns plain ints into constexpr arguments and takes launch options as keywords; its
# annotations do not say so.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from kernels.draw import NO_ID, exponential_tile, without_stop_ids
from kernels.launch import let_next_start, wait_for_previous

# Noise lies in (-2.82, 22.9): what is further below the best score than this cannot win.
_REACH = tl.constexpr(-25.8)


@triton.jit
def _key(logit, SHIFT: tl.constexpr):
    """Integers in the order of the logits, without the bits that a narrow dtype leaves empty."""
    # -0 and +0 are equal logits.
    bits = tl.where(logit == 0, 0.0, logit).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _load(row_logits_ptr, token, VOCAB: tl.constexpr):
    mask = token < VOCAB
    return tl.load(row_logits_ptr + token, mask=mask, other=float("-inf")).to(tl.float32)


@triton.jit
def _count_from(row_logits_ptr, key, VOCAB: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """How many logits have at least this key."""
    count = tl.zeros([TILE], tl.int32)
    for first in range(0, VOCAB, TILE):
        logit = _load(row_logits_ptr, first + tl.arange(0, TILE), VOCAB)
        # -inf marks tokens that may not come; they have no rank.
        counts = (logit > float("-inf")) & (_key(logit, SHIFT) >= key)
        count += counts.to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def _top_k_cut(
    row_logits_ptr,
    lane_max,  # [TILE] fp32, highest logit of each lane
    top_k,
    VOCAB: tl.constexpr,
    SHIFT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Key and id of the last token of the top_k; a smaller key than any if there are fewer."""
    lane_key = _key(lane_max, SHIFT)
    # The top_k-th of the lanes' maxima bounds the cut from below: each lane has a token there.
    low = tl.full([], -(2**31), tl.int32) >> SHIFT
    high = tl.max(lane_key, 0) + 1
    lane_low = low
    lane_high = high
    while lane_high.to(tl.int64) - lane_low > 1:
        middle = ((lane_low.to(tl.int64) + lane_high) >> 1).to(tl.int32)
        enough = tl.sum((lane_key >= middle).to(tl.int32), 0) >= top_k
        lane_low = tl.where(enough, middle, lane_low)
        lane_high = tl.where(enough, lane_high, middle)
    low = lane_low
    while high.to(tl.int64) - low > 1:
        middle = ((low.to(tl.int64) + high) >> 1).to(tl.int32)
        enough = _count_from(row_logits_ptr, middle, VOCAB, SHIFT, TILE) >= top_k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    # `low` is the key of the top_k-th token. Of its ties the lowest ids stay.
    wanted = top_k - _count_from(row_logits_ptr, high, VOCAB, SHIFT, TILE)
    cut_token = tl.full([], NO_ID, tl.int32)
    for first in range(0, VOCAB, TILE):
        token = first + tl.arange(0, TILE)
        logit = _load(row_logits_ptr, token, VOCAB)
        tie = ((_key(logit, SHIFT) == low) & (logit > float("-inf"))).to(tl.int32)
        num_ties = tl.sum(tie, 0)
        if (wanted > 0) & (num_ties > 0):
            rank = tl.cumsum(tie, 0)
            found = tl.min(tl.where((tie > 0) & (rank == wanted), token, NO_ID), 0)
            cut_token = tl.minimum(cut_token, found)
        wanted -= num_ties
    return low, cut_token


@triton.jit
def draw_filtered_kernel(
    logits_ptr,  # [num_samples, vocab_size]; masked in place below min_tokens
    rows_ptr,  # [num_samples] int32
    state_ptr,  # [num_rows, num_words] int32
    stop_ids_ptr,  # [num_rows, WIDTH] int32
    part_max_ptr,  # [num_samples, 1] fp32, output: highest logit; +inf: one is NaN or +inf
    part_score_ptr,  # [num_samples, 1] fp32, output: 0
    part_token_ptr,  # [num_samples, 1] int32, output: the token
    logits_stride,
    state_stride,
    stop_ids_stride,
    VOCAB: tl.constexpr,
    WIDTH: tl.constexpr,
    PURPOSE: tl.constexpr,
    LENGTH: tl.constexpr,
    MIN_TOTAL: tl.constexpr,
    SEQUENCE_INDEX: tl.constexpr,
    TOP_K: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    SEED: tl.constexpr,
    SHIFT: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program per sample: it reads the row several times, from L2.
    wait_for_previous(PDL)
    let_next_start(PDL)
    sample = tl.program_id(0)
    row = tl.load(rows_ptr + sample).to(tl.int64)
    row_ptr = state_ptr + row * state_stride
    temperature = tl.load(row_ptr + TEMPERATURE).to(tl.float32, bitcast=True)
    # int64: sample * stride passes 2**31 with many rows of a large vocabulary.
    row_logits_ptr = logits_ptr + sample.to(tl.int64) * logits_stride
    is_masked = tl.load(row_ptr + LENGTH) < tl.load(row_ptr + MIN_TOTAL)
    lane_max = tl.full([TILE], float("-inf"), tl.float32)
    lane_token = tl.full([TILE], NO_ID, tl.int32)
    for first in range(0, VOCAB, TILE):
        token = first + tl.arange(0, TILE)
        logit = _load(row_logits_ptr, token, VOCAB)
        if is_masked:
            logit = without_stop_ids(logit, token, stop_ids_ptr + row * stop_ids_stride, WIDTH)
            tl.store(
                row_logits_ptr + token, logit.to(logits_ptr.dtype.element_ty), mask=token < VOCAB
            )
        # A NaN makes the row as unusable as +inf does.
        logit = tl.where(logit != logit, float("inf"), logit)
        lane_token = tl.where(logit > lane_max, token, lane_token)
        lane_max = tl.maximum(lane_max, logit)
    # Masked logits are read again by other threads than those that wrote them.
    tl.debug_barrier()
    highest = tl.max(lane_max, 0)
    drawn = tl.min(tl.where(lane_max == highest, lane_token, NO_ID), 0)
    is_usable = (highest > float("-inf")) & (highest < float("inf"))
    if is_usable & (temperature > 0):
        top_k = tl.load(row_ptr + TOP_K)
        top_p = tl.load(row_ptr + TOP_P).to(tl.float32, bitcast=True)
        min_p = tl.load(row_ptr + MIN_P).to(tl.float32, bitcast=True)
        # p >= min_p * p_max, in logarithms.
        floor = tl.where(min_p > 0, tl.log(tl.maximum(min_p, 1e-38)), float("-inf"))
        cut_key = tl.full([], -(2**31), tl.int32) >> SHIFT
        cut_token = tl.full([], NO_ID, tl.int32)
        if (top_k > 0) & (top_k < VOCAB):
            cut_key, cut_token = _top_k_cut(row_logits_ptr, lane_max, top_k, VOCAB, SHIFT, TILE)
        # The first pass is over all kept tokens: nothing lies behind this end.
        end_logit = tl.full([], float("-inf"), tl.float32)
        end_token = tl.full([], NO_ID, tl.int32)
        limit = tl.full([], -1.0, tl.float32)
        is_drawn = tl.full([], 0, tl.int32)
        while is_drawn == 0:
            mass = tl.zeros([TILE], tl.float32)
            lane_score = tl.full([TILE], float("-inf"), tl.float32)
            lane_token = tl.full([TILE], NO_ID, tl.int32)
            for first in range(0, VOCAB, TILE):
                token = first + tl.arange(0, TILE)
                logit = _load(row_logits_ptr, token, VOCAB)
                score = tl.div_rn(logit - highest, temperature)
                key = _key(logit, SHIFT)
                is_before = (logit > end_logit) | ((logit == end_logit) & (token < end_token))
                is_before &= (key > cut_key) | ((key == cut_key) & (token <= cut_token))
                is_before &= (logit > float("-inf")) & (score >= floor)
                mass += tl.where(is_before, tl.exp(score), 0.0)
                can_win = is_before & (score >= _REACH)
                if tl.max(can_win.to(tl.int32), 0) > 0:
                    variate = exponential_tile(
                        row_ptr, first // 4, PURPOSE, LENGTH, SEQUENCE_INDEX, SEED, TILE
                    )
                    noisy = tl.where(can_win, score - tl.log(variate), float("-inf"))
                    lane_token = tl.where(noisy > lane_score, token, lane_token)
                    lane_score = tl.maximum(lane_score, noisy)
            total = tl.sum(mass, 0)
            if limit < 0:
                limit = tl.where(top_p < 1, top_p * total, float("inf"))
                is_drawn = tl.where(top_p < 1, 0, 1)
            else:
                # The likeliest token always stays.
                is_drawn = tl.where((total < limit) | (total == 0), 1, 0)
                drawn = tl.where(is_drawn == 1, end_token, drawn)
            best = tl.max(lane_score, 0)
            candidate = tl.min(tl.where(lane_score == best, lane_token, NO_ID), 0)
            if top_p >= 1:
                drawn = candidate
            if is_drawn == 0:
                end_token = candidate
                end_logit = tl.load(row_logits_ptr + candidate).to(tl.float32)
    tl.store(part_max_ptr + sample, highest)
    tl.store(part_score_ptr + sample, 0.0)
    tl.store(part_token_ptr + sample, drawn)
