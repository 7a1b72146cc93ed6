"""One tile of keys and values folded into the running softmax of some queries."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend_tile(
    acc,  # [queries, HEAD_PAD] fp32, weighted values so far
    row_sum,  # [queries] fp32, sum of weights so far
    row_max,  # [queries] fp32, highest score so far, in units of log2
    query,  # [queries, HEAD_PAD]
    key_ptr,  # of this KV head
    value_ptr,
    table_ptr,  # [max_blocks] int32, blocks of this request
    key_index,  # [TILE] int32, keys to read
    is_key,  # [TILE] bool, those that exist; read only if PARTIAL, otherwise all do
    is_seen,  # [queries or 1, TILE] bool, keys that count; read only if MASKED
    key_block_stride,
    key_slot_stride,
    value_block_stride,
    value_slot_stride,
    scale_log2,  # scale * log2(e)
    soft_cap,
    dim,  # [HEAD_PAD] int32
    PARTIAL: tl.constexpr,
    MASKED: tl.constexpr,
    SAME_STRIDES: tl.constexpr,  # of keys and values: one calculation less
    SOFT_CAP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    # Nothing is read that might be NaN: keys that do not count exist, or their loads are masked.
    # int64: block_id * stride passes 2**31 on large caches.
    if PARTIAL:
        block_id = tl.load(table_ptr + key_index // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
    else:
        block_id = tl.load(table_ptr + key_index // BLOCK_SIZE).to(tl.int64)
    slot = key_index % BLOCK_SIZE
    key_offset = block_id * key_block_stride + slot * key_slot_stride
    if SAME_STRIDES:
        value_offset = key_offset
    else:
        value_offset = block_id * value_block_stride + slot * value_slot_stride
    if PARTIAL:
        is_read = is_key[:, None] & (dim < HEAD_SIZE)[None, :]
        key = tl.load(key_ptr + key_offset[:, None] + dim[None, :], mask=is_read, other=0.0)
        value = tl.load(value_ptr + value_offset[:, None] + dim[None, :], mask=is_read, other=0.0)
    elif HEAD_PAD != HEAD_SIZE:
        is_dim = (dim < HEAD_SIZE)[None, :]
        key = tl.load(key_ptr + key_offset[:, None] + dim[None, :], mask=is_dim, other=0.0)
        value = tl.load(value_ptr + value_offset[:, None] + dim[None, :], mask=is_dim, other=0.0)
    else:
        key = tl.load(key_ptr + key_offset[:, None] + dim[None, :])
        value = tl.load(value_ptr + value_offset[:, None] + dim[None, :])
    score = tl.dot(query, tl.trans(key), input_precision="ieee")
    if SOFT_CAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1); scale_log2 is undone to work on the plain score.
        plain = score * (scale_log2 * 0.6931471805599453) / soft_cap
        score = (soft_cap * 1.4426950408889634) * (1 - 2 / (tl.exp(2 * plain) + 1))
    else:
        score *= scale_log2
    if MASKED:
        score = tl.where(is_seen, score, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(score, 1))
    # A row that has seen nothing yet keeps -inf as its maximum: subtracting it would give NaN.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weight = tl.math.exp2(score - shift[:, None])
    rescale = tl.math.exp2(row_max - shift)
    row_sum = row_sum * rescale + tl.sum(weight, 1)
    acc = acc * rescale[:, None]
    acc = tl.dot(weight.to(value.dtype), value, acc, input_precision="ieee")
    return acc, row_sum, new_max
