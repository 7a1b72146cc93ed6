"""Causal attention of several new queries per sequence over the paged KV cache.

The step's own keys lie in the cache already. One program computes a tile of queries of one head, in
the order of the list that `kernels.attention_plan` made.
"""

# Triton turns plain ints into constexpr arguments and takes launch options as keywords; its
# annotations do not say so.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

from kernels.attention_tile import attend_tile
from kernels.launch import let_next_start, pdl_options, wait_for_previous
from kernels.paged_attention import check_requests

if TYPE_CHECKING:
    import torch


@triton.jit
def _paged_prefill_kernel(
    query_ptr,  # [num_tokens, num_heads, head_size]
    query_start_loc_ptr,  # [num_reqs + 1] int32
    tiles_ptr,  # [num_tiles, 2] int32, from the planner
    key_ptr,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_ptr,  # like key_ptr
    block_table_ptr,  # [num_rows, max_blocks] int32
    rows_ptr,  # [num_reqs] int32, each request's row of block_table; read only if HAS_ROWS
    seq_lens_ptr,  # [num_reqs] int32
    out_ptr,  # [num_tokens, num_heads, head_size], output
    scale_log2,  # scale * log2(e)
    soft_cap,
    query_stride,  # elements between two tokens; heads are contiguous
    out_stride,
    block_table_stride,
    key_block_stride,
    key_slot_stride,
    key_head_stride,
    value_block_stride,
    value_slot_stride,
    value_head_stride,
    HAS_ROWS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    WINDOW: tl.constexpr,  # keys a query sees; 0: all
    SAME_STRIDES: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    let_next_start(PDL)
    head = tl.program_id(0)
    req = tl.load(tiles_ptr + tl.program_id(1) * 2)
    if req >= 0:
        tile = tl.load(tiles_ptr + tl.program_id(1) * 2 + 1)
        query_start = tl.load(query_start_loc_ptr + req)
        num_queries = tl.load(query_start_loc_ptr + req + 1) - query_start
        seq_len = tl.load(seq_lens_ptr + req)
        row = tile * QUERY_TILE + tl.arange(0, QUERY_TILE)
        dim = tl.arange(0, HEAD_PAD)
        io_mask = (row < num_queries)[:, None] & (dim < HEAD_SIZE)[None, :]
        token = (query_start + row).to(tl.int64)
        query = tl.load(
            query_ptr + token[:, None] * query_stride + head * HEAD_SIZE + dim[None, :],
            mask=io_mask,
            other=0.0,
        )
        # Index in the sequence of each query, and of the first one of this tile.
        query_position = seq_len - num_queries + row
        first_position = seq_len - num_queries + tile * QUERY_TILE
        # Not below 0 for a request that stopped: its length is 0, its queries are not.
        num_keys = tl.maximum(tl.minimum(first_position + QUERY_TILE, seq_len), 0)
        kv_head = (head // GROUP).to(tl.int64)
        head_key_ptr = key_ptr + kv_head * key_head_stride
        head_value_ptr = value_ptr + kv_head * value_head_stride
        table_row = req
        if HAS_ROWS:
            table_row = tl.load(rows_ptr + req)
        table_ptr = block_table_ptr + table_row.to(tl.int64) * block_table_stride
        acc = tl.zeros([QUERY_TILE, HEAD_PAD], tl.float32)
        row_sum = tl.zeros([QUERY_TILE], tl.float32)
        row_max = tl.full([QUERY_TILE], float("-inf"), tl.float32)
        tile_key = tl.arange(0, KEY_TILE)
        first_seen = 0
        # Tiles that every query of this program sees in full need no mask.
        first_key_tile = 0
        full_last = tl.maximum(first_position + 1, 0) // KEY_TILE
        if WINDOW > 0:
            first_seen = tl.maximum(first_position + 1 - WINDOW, 0)
            first_key_tile = first_seen // KEY_TILE
            full_last = first_key_tile
        for key_tile in tl.range(first_key_tile, full_last, num_stages=STAGES):
            key_index = key_tile * KEY_TILE + tile_key
            acc, row_sum, row_max = attend_tile(
                acc, row_sum, row_max, query, head_key_ptr, head_value_ptr, table_ptr,
                key_index, key_index >= 0, key_index[None, :] >= 0,
                key_block_stride, key_slot_stride, value_block_stride, value_slot_stride,
                scale_log2, soft_cap, dim,
                False, False, SAME_STRIDES, SOFT_CAP, HEAD_SIZE, HEAD_PAD, BLOCK_SIZE,
            )  # fmt: skip
        for key_tile in tl.range(full_last, tl.cdiv(num_keys, KEY_TILE), num_stages=1):
            key_index = key_tile * KEY_TILE + tile_key
            is_seen = key_index[None, :] <= query_position[:, None]
            read_index = tl.minimum(key_index, num_keys - 1)
            if WINDOW > 0:
                is_seen &= key_index[None, :] > query_position[:, None] - WINDOW
                read_index = tl.maximum(read_index, first_seen)
            acc, row_sum, row_max = attend_tile(
                acc, row_sum, row_max, query, head_key_ptr, head_value_ptr, table_ptr,
                read_index, key_index >= 0, is_seen,
                key_block_stride, key_slot_stride, value_block_stride, value_slot_stride,
                scale_log2, soft_cap, dim,
                False, True, SAME_STRIDES, SOFT_CAP, HEAD_SIZE, HEAD_PAD, BLOCK_SIZE,
            )  # fmt: skip
        # A request that stopped has no keys and gets zeros.
        result = acc / tl.where(row_sum == 0, 1.0, row_sum)[:, None]
        tl.store(
            out_ptr + token[:, None] * out_stride + head * HEAD_SIZE + dim[None, :],
            result.to(out_ptr.dtype.element_ty),
            mask=io_mask,
        )


class PrefillTiles(NamedTuple):
    """How a program is cut; what fits registers and shared memory without spilling."""

    query_tile: int
    key_tile: int
    num_stages: int
    num_warps: int


def prefill_tiles(head_size: int, dtype: torch.dtype) -> PrefillTiles:
    """The cut for a head size and dtype."""
    head_pad = triton.next_power_of_2(head_size)
    if dtype.itemsize > 2:
        return PrefillTiles(32 if head_pad <= 64 else 16, 32 if head_pad <= 128 else 16, 2, 8)
    if head_pad > 128:
        return PrefillTiles(64, 64, 2, 8)
    # 128 queries, because wgmma takes 64 rows per warp group. Measured for 128 on an H200: 3 stages
    # of 128 keys beat 2 of 128 and 2 to 4 of 64.
    return PrefillTiles(128, 128, 3, 8)


def paged_prefill(
    query: torch.Tensor,
    query_start_loc: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    tiles: torch.Tensor,
    *,
    scale: float,
    rows: torch.Tensor | None = None,
    soft_cap: float | None = None,
    window: int = 0,
    out: torch.Tensor,
    cut: PrefillTiles | None = None,
) -> torch.Tensor:
    """Attend causally from the last tokens of each sequence to all of it.

    Requests with a single query are left to `paged_attention`: their outputs stay as they are.

    Args:
        query: [num_tokens, num_heads, head_size], heads contiguous.
        query_start_loc: [num_reqs + 1] int32, exclusive prefix sum of queries per request.
        key_cache: [num_blocks, block_size, num_kv_heads, head_size], last dimension contiguous;
            the queries' own keys included.
        value_cache: Like key_cache.
        block_table: [num_rows, max_blocks] int32. Block ids are not range-checked here.
        seq_lens: [num_reqs] int32, keys per request; a request of length 0 gives zeros.
        tiles: [n, 2] int32, what `plan_prefill` made of query_start_loc for this cut.
        scale: Factor on the scores.
        rows: [num_reqs] int32, row of block_table of each request; None: request i has row i.
        soft_cap: Scores become soft_cap * tanh(score / soft_cap).
        window: Keys a query sees, itself included; 0: all before it.
        out: [num_tokens, num_heads, head_size], heads contiguous.
        cut: None: `prefill_tiles` of the head size and dtype.

    Returns:
        `out`.

    Raises:
        ValueError: a shape does not match.

    Source: FlashAttention-2, https://arxiv.org/abs/2307.08691
    """
    _, num_heads, head_size = query.shape
    _, block_size, num_kv_heads, key_head_size = key_cache.shape
    if key_head_size != head_size or num_heads % num_kv_heads:
        raise ValueError(
            f"query {tuple(query.shape)} does not match key_cache {tuple(key_cache.shape)}"
        )
    check_requests(query_start_loc, block_table, seq_lens, rows)
    if tiles.shape[0] == 0:
        return out
    if cut is None:
        cut = prefill_tiles(head_size, query.dtype)
    _paged_prefill_kernel[(num_heads, tiles.shape[0])](
        query,
        query_start_loc,
        tiles,
        key_cache,
        value_cache,
        block_table,
        seq_lens if rows is None else rows,
        seq_lens,
        out,
        scale * math.log2(math.e),
        soft_cap or 0.0,
        query.stride(0),
        out.stride(0),
        block_table.stride(0),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        value_cache.stride(0),
        value_cache.stride(1),
        value_cache.stride(2),
        HAS_ROWS=rows is not None,
        GROUP=num_heads // num_kv_heads,
        HEAD_SIZE=head_size,
        HEAD_PAD=triton.next_power_of_2(head_size),
        BLOCK_SIZE=block_size,
        QUERY_TILE=cut.query_tile,
        KEY_TILE=cut.key_tile,
        WINDOW=window,
        SAME_STRIDES=key_cache.stride() == value_cache.stride(),
        SOFT_CAP=soft_cap is not None,
        STAGES=cut.num_stages,
        num_warps=cut.num_warps,
        **pdl_options(query.device),
    )
    return out
