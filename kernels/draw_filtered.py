"""Draws one token per row under min_p, top_k and top_p, without sorting and without waiting.

Tokens are ranked by logit, ties by id; top_k and top_p keep a prefix of that order. The cut of
top_k is found by bisecting the bits of logits. top_p needs no cut: the best noisy token of those
before a candidate is drawn until one lies in the kept prefix, which one look at the mass before it
tells. So what comes out is the best noisy token of the kept prefix, as if it had been sorted. After
two looks at the whole row only a short list of its likeliest tokens is read, where that is enough.
"""

# Triton turns plain ints into constexpr arguments and takes launch options as keywords; its
# annotations do not say so.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from kernels.draw import NO_ID, exponential_of, exponential_tile, without_stop_ids
from kernels.launch import let_next_start, wait_for_previous

# Noise lies in (-2.82, 22.9): what is further below the best score than this cannot win.
_REACH = tl.constexpr(-25.8)
# Without top_k the highest of this many lanes bound the tokens that are looked at first.
_LIKELY = tl.constexpr(1024)


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
def _tokens(candidates_ptr, first, count, is_listed, TILE: tl.constexpr):
    """[TILE] int32 tokens at some places of the list, or the places themselves; NO_ID behind it."""
    place = first + tl.arange(0, TILE)
    token = tl.where(place < count, place, NO_ID)
    if is_listed:
        token = tl.load(candidates_ptr + place, mask=place < count, other=NO_ID)
    return token


@triton.jit
def _count_from(
    row_logits_ptr, candidates_ptr, count, is_listed, key, last_token,
    VOCAB: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """How many logits have a higher key, or this one and a token up to `last_token`."""
    found = tl.zeros([TILE], tl.int32)
    for first in range(0, count, TILE):
        token = _tokens(candidates_ptr, first, count, is_listed, TILE)
        logit = _load(row_logits_ptr, token, VOCAB)
        logit_key = _key(logit, SHIFT)
        counts = (logit_key > key) | ((logit_key == key) & (token <= last_token))
        # -inf marks tokens that may not come; they have no rank.
        found += (counts & (logit > float("-inf"))).to(tl.int32)
    return tl.sum(found, 0)


@triton.jit
def _bound(lane_max, rank, SHIFT: tl.constexpr):
    """The key of the rank-th highest lane; the lowest key if there are fewer lanes."""
    lane_key = _key(lane_max, SHIFT)
    low = tl.full([], -(2**31), tl.int32) >> SHIFT
    high = tl.max(lane_key, 0) + 1
    while high.to(tl.int64) - low > 1:
        middle = ((low.to(tl.int64) + high) >> 1).to(tl.int32)
        is_enough = tl.sum((lane_key >= middle).to(tl.int32), 0) >= rank
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
    return low


@triton.jit
def _top_k_cut(
    row_logits_ptr, candidates_ptr, count, is_listed, top_k, low, high,
    VOCAB: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Key and id of the last token of the top_k: at least `low` holds them, `high` holds none."""
    while high.to(tl.int64) - low > 1:
        middle = ((low.to(tl.int64) + high) >> 1).to(tl.int32)
        num = _count_from(
            row_logits_ptr, candidates_ptr, count, is_listed, middle, NO_ID, VOCAB, SHIFT, TILE
        )
        low = tl.where(num >= top_k, middle, low)
        high = tl.where(num >= top_k, high, middle)
    # `low` is the key of the top_k-th token. Of its ties the lowest ids stay.
    below = tl.full([], -1, tl.int32)
    cut_token = tl.full([], VOCAB - 1, tl.int32)
    while cut_token - below > 1:
        middle = (below + cut_token) >> 1
        num = _count_from(
            row_logits_ptr, candidates_ptr, count, is_listed, low, middle, VOCAB, SHIFT, TILE
        )
        below = tl.where(num >= top_k, below, middle)
        cut_token = tl.where(num >= top_k, middle, cut_token)
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
    candidates_ptr,  # [num_samples, TILE] int32, scratch
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
        is_top_k = (top_k > 0) & (top_k < VOCAB)
        # A prefix of the order that holds what can be kept: each of the highest lanes has a token
        # at or above the bound. Listed, if it is short, so that it alone is read from here on.
        bound = _bound(lane_max, tl.where(is_top_k, top_k, _LIKELY), SHIFT)
        lane_count = tl.zeros([TILE], tl.int32)
        lane_mass = tl.zeros([TILE], tl.float32)
        listed_mass = tl.zeros([TILE], tl.float32)
        floor_key = tl.full([TILE], NO_ID, tl.int32)
        for first in range(0, VOCAB, TILE):
            token = first + tl.arange(0, TILE)
            logit = _load(row_logits_ptr, token, VOCAB)
            score = tl.div_rn(logit - highest, temperature)
            key = _key(logit, SHIFT)
            is_candidate = (key >= bound) & (logit > float("-inf"))
            is_over = (score >= floor) & (logit > float("-inf"))
            floor_key = tl.where(is_over, tl.minimum(floor_key, key), floor_key)
            mass = tl.where(is_over, tl.exp(score), 0.0)
            lane_count += is_candidate.to(tl.int32)
            lane_mass += mass
            listed_mass += tl.where(is_candidate, mass, 0.0)
        num_candidates = tl.sum(lane_count, 0)
        # With top_k the mass is that of the kept tokens, which the first pass over them sums.
        limit = tl.where(is_top_k, -1.0, top_p * tl.sum(lane_mass, 0))
        limit = tl.where(top_p < 1, limit, float("inf"))
        holds_all = is_top_k | (tl.min(floor_key, 0) >= bound)
        holds_all |= (top_p < 1) & (tl.sum(listed_mass, 0) >= limit)
        is_listed = holds_all & (num_candidates <= TILE)
        count = tl.where(is_listed, num_candidates, VOCAB)
        row_candidates_ptr = candidates_ptr + sample.to(tl.int64) * TILE
        if is_listed:
            place = tl.cumsum(lane_count, 0) - lane_count
            for first in range(0, VOCAB, TILE):
                token = first + tl.arange(0, TILE)
                logit = _load(row_logits_ptr, token, VOCAB)
                is_candidate = (_key(logit, SHIFT) >= bound) & (logit > float("-inf"))
                tl.store(row_candidates_ptr + place, token, mask=is_candidate)
                place += is_candidate.to(tl.int32)
            # The list is read by other threads than those that wrote it.
            tl.debug_barrier()
        cut_key = tl.full([], -(2**31), tl.int32) >> SHIFT
        cut_token = tl.full([], NO_ID, tl.int32)
        if is_top_k:
            high = tl.max(_key(lane_max, SHIFT), 0) + 1
            cut_key, cut_token = _top_k_cut(
                row_logits_ptr, row_candidates_ptr, count, is_listed, top_k, bound, high,
                VOCAB, SHIFT, TILE,
            )  # fmt: skip
        # The first pass is over all kept tokens: nothing lies behind this end.
        end_logit = tl.full([], float("-inf"), tl.float32)
        end_token = tl.full([], NO_ID, tl.int32)
        is_first = tl.full([], 1, tl.int32)
        is_drawn = tl.full([], 0, tl.int32)
        while is_drawn == 0:
            mass = tl.zeros([TILE], tl.float32)
            lane_score = tl.full([TILE], float("-inf"), tl.float32)
            lane_token = tl.full([TILE], NO_ID, tl.int32)
            for first in range(0, count, TILE):
                token = _tokens(row_candidates_ptr, first, count, is_listed, TILE)
                logit = _load(row_logits_ptr, token, VOCAB)
                score = tl.div_rn(logit - highest, temperature)
                key = _key(logit, SHIFT)
                is_before = (logit > end_logit) | ((logit == end_logit) & (token < end_token))
                is_before &= (key > cut_key) | ((key == cut_key) & (token <= cut_token))
                is_before &= (logit > float("-inf")) & (score >= floor)
                mass += tl.where(is_before, tl.exp(score), 0.0)
                can_win = is_before & (score >= _REACH)
                if tl.max(can_win.to(tl.int32), 0) > 0:
                    if is_listed:
                        variate = exponential_of(
                            row_ptr, token, PURPOSE, LENGTH, SEQUENCE_INDEX, SEED
                        )
                    else:
                        variate = exponential_tile(
                            row_ptr, first // 4, PURPOSE, LENGTH, SEQUENCE_INDEX, SEED, TILE
                        )
                    noisy = tl.where(can_win, score - tl.log(variate), float("-inf"))
                    is_better = (noisy > lane_score) | (
                        (noisy == lane_score) & (token < lane_token)
                    )
                    lane_token = tl.where(is_better, token, lane_token)
                    lane_score = tl.maximum(lane_score, noisy)
            total = tl.sum(mass, 0)
            best = tl.max(lane_score, 0)
            candidate = tl.min(tl.where(lane_score == best, lane_token, NO_ID), 0)
            if is_first == 1:
                is_first = tl.full([], 0, tl.int32)
                limit = tl.where(limit < 0, top_p * total, limit)
                is_drawn = (top_p >= 1).to(tl.int32)
                drawn = tl.where(top_p >= 1, candidate, drawn)
            else:
                # The likeliest token always stays.
                is_drawn = ((total < limit) | (total == 0)).to(tl.int32)
                drawn = tl.where(is_drawn == 1, end_token, drawn)
            if is_drawn == 0:
                end_token = candidate
                end_logit = tl.load(row_logits_ptr + candidate).to(tl.float32)
    tl.store(part_max_ptr + sample, highest)
    tl.store(part_score_ptr + sample, 0.0)
    tl.store(part_token_ptr + sample, drawn)
