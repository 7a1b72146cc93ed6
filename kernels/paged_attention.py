"""Decode attention over the paged KV cache: one query per sequence, any mix of lengths.

A program that holds a whole (sequence, KV head) writes its output; what `kernels.attention_plan`
cut leaves at most two partial results per program, which a second kernel merges in key order, so
results do not depend on timing.
"""

# Triton turns plain ints into constexpr arguments and takes launch options as keywords; its
# annotations do not say so.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kernels.attention_tile import attend_tile
from kernels.launch import let_next_start, pdl_options, wait_for_previous

if TYPE_CHECKING:
    import torch

    from kernels.attention_plan import DecodePlan

_STAGES = 5  # of 64 keys: two tiles are under way while one is worked on
_MIN_HEADS = 16  # rows of a query tile: the smallest operand of a tensor core instruction
_ZERO_TILE = 1024  # elements of a zero output per store
_MERGE_PARTS = 16  # partial results per iteration of the merge


@triton.jit(do_not_specialize=["num_reqs", "num_tokens"])
def _paged_attention_kernel(
    query_ptr,  # [num_tokens, num_heads, head_size]
    query_start_loc_ptr,  # [num_reqs + 1] int32
    key_ptr,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_ptr,  # like key_ptr
    block_table_ptr,  # [num_rows, max_blocks] int32
    rows_ptr,  # [num_reqs] int32, each request's row of block_table; read only if HAS_ROWS
    seq_lens_ptr,  # [num_reqs] int32
    first_tile_ptr,  # [num_reqs + 1] int32, from the planner
    program_req_ptr,  # [num_programs] int32, from the planner
    tiles_per_program_ptr,  # [1] int32, from the planner
    out_ptr,  # [num_tokens, num_heads, head_size], output
    partial_ptr,  # [num_programs, 2, group_size, head_size] fp32, output
    partial_stat_ptr,  # [num_programs, 2, group_size, 2] fp32, output: maximum, sum
    scale_log2,  # scale * log2(e)
    soft_cap,
    num_reqs,
    num_tokens,
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
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    GROUP_PAD: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    STAGES: tl.constexpr,
    ZERO_TILE: tl.constexpr,
    SETTLED: tl.constexpr,  # whether the plan was there before the kernel ahead of this began
    PDL: tl.constexpr,
):
    if not SETTLED:
        wait_for_previous(PDL)
        let_next_start(PDL)
    program = tl.program_id(0)
    head_row = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, HEAD_PAD)
    tile_row = tl.arange(0, TILE)
    io_mask = (head_row < GROUP)[:, None] & (dim < HEAD_SIZE)[None, :]
    head_offset = head_row[:, None] * HEAD_SIZE + dim[None, :]
    # Past the caches of the multiprocessor, which may hold the step before.
    per_program = tl.load(tiles_per_program_ptr, cache_modifier=".cg")
    total = tl.load(first_tile_ptr + num_reqs, cache_modifier=".cg") * NUM_KV_HEADS
    req = tl.load(program_req_ptr + program, cache_modifier=".cg")
    start = program * per_program
    end = tl.minimum(start + per_program, total)
    position = start
    req_start = tl.load(first_tile_ptr + req, cache_modifier=".cg")
    num_tiles = tl.load(first_tile_ptr + req + 1, cache_modifier=".cg") - req_start
    seq_len = tl.load(seq_lens_ptr + req, cache_modifier=".cg")
    token = tl.load(query_start_loc_ptr + req, cache_modifier=".cg")
    row = req
    if HAS_ROWS:
        row = tl.load(rows_ptr + req, cache_modifier=".cg")
    if SETTLED:
        wait_for_previous(PDL)
        let_next_start(PDL)
    while position < end:
        # One loop over the tiles of all heads of a request: keys stay under way across heads.
        req_start *= NUM_KV_HEADS
        last = tl.minimum(end - req_start, num_tiles * NUM_KV_HEADS)
        token_index = token.to(tl.int64)
        table_ptr = block_table_ptr + row.to(tl.int64) * block_table_stride
        first_seen = 0
        if WINDOW > 0:
            first_seen = tl.maximum(seq_len - WINDOW, 0)
        acc = tl.zeros([GROUP_PAD, HEAD_PAD], tl.float32)
        row_sum = tl.zeros([GROUP_PAD], tl.float32)
        row_max = tl.full([GROUP_PAD], float("-inf"), tl.float32)
        for index in tl.range(position - req_start, last, num_stages=STAGES):
            kv_head = index // num_tiles
            tile = index - kv_head * num_tiles
            head = kv_head * GROUP * HEAD_SIZE
            query_offset = token_index * query_stride + head
            query = tl.load(query_ptr + query_offset + head_offset, mask=io_mask, other=0.0)
            key_index = (first_seen // TILE + tile) * TILE + tile_row
            is_key = key_index < seq_len
            if WINDOW > 0:
                is_key &= key_index >= first_seen
            acc, row_sum, row_max = attend_tile(
                acc, row_sum, row_max, query,
                key_ptr + kv_head.to(tl.int64) * key_head_stride,
                value_ptr + kv_head.to(tl.int64) * value_head_stride,
                table_ptr, key_index, is_key, is_key[None, :],
                key_block_stride, key_slot_stride, value_block_stride, value_slot_stride,
                scale_log2, soft_cap, dim,
                True, True, SAME_STRIDES, SOFT_CAP, HEAD_SIZE, HEAD_PAD, BLOCK_SIZE,
            )  # fmt: skip
            is_head_end = tile + 1 == num_tiles
            if is_head_end | (index + 1 == last):
                # Where the head begins, on the scale of `start`.
                head_start = req_start + index - tile
                if is_head_end & (head_start >= start):
                    result = (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty)
                    out_offset = token_index * out_stride + head
                    tl.store(out_ptr + out_offset + head_offset, result, io_mask)
                else:
                    # Whatever follows the first head of this program can only be cut at its end.
                    part = program * 2 + (head_start > start).to(tl.int32)
                    partial_offset = part.to(tl.int64) * (GROUP * HEAD_SIZE)
                    tl.store(partial_ptr + partial_offset + head_offset, acc, io_mask)
                    stat_ptr = partial_stat_ptr + (part * GROUP + head_row) * 2
                    tl.store(stat_ptr, row_max, head_row < GROUP)
                    tl.store(stat_ptr + 1, row_sum, head_row < GROUP)
            acc = tl.where(is_head_end, 0.0, acc)
            row_sum = tl.where(is_head_end, 0.0, row_sum)
            row_max = tl.where(is_head_end, float("-inf"), row_max)
        position = req_start + last
        if position < end:
            num_tiles = 0
            while num_tiles == 0:
                req += 1
                req_start = tl.load(first_tile_ptr + req)
                num_tiles = tl.load(first_tile_ptr + req + 1) - req_start
            seq_len = tl.load(seq_lens_ptr + req)
            token = tl.load(query_start_loc_ptr + req)
            row = req
            if HAS_ROWS:
                row = tl.load(rows_ptr + req)
    # Requests that stopped, and the padding behind the last request, get zeros.
    token_size: tl.constexpr = NUM_KV_HEADS * GROUP * HEAD_SIZE
    zero = tl.zeros([ZERO_TILE], out_ptr.dtype.element_ty)
    element = tl.arange(0, ZERO_TILE)
    for req in range(program, num_reqs, tl.num_programs(0)):
        num_tiles = tl.load(first_tile_ptr + req + 1) - tl.load(first_tile_ptr + req)
        first_token = tl.load(query_start_loc_ptr + req)
        num_queries = tl.load(query_start_loc_ptr + req + 1) - first_token
        if (num_tiles == 0) & (num_queries == 1):
            for first in range(0, token_size, ZERO_TILE):
                out_offset = first_token.to(tl.int64) * out_stride + first
                tl.store(out_ptr + out_offset + element, zero, first + element < token_size)
    num_real_tokens = tl.load(query_start_loc_ptr + num_reqs)
    for padding in range(program, num_tokens - num_real_tokens, tl.num_programs(0)):
        padded = num_real_tokens.to(tl.int64) + padding
        for first in range(0, token_size, ZERO_TILE):
            out_offset = padded * out_stride + first
            tl.store(out_ptr + out_offset + element, zero, first + element < token_size)


@triton.jit(do_not_specialize=["num_reqs"])
def _merge_partials_kernel(
    partial_ptr,  # [num_programs, 2, group_size, head_size] fp32
    partial_stat_ptr,  # [num_programs, 2, group_size, 2] fp32
    query_start_loc_ptr,  # [num_reqs + 1] int32
    first_tile_ptr,  # [num_reqs + 1] int32
    program_req_ptr,  # [num_programs] int32
    tiles_per_program_ptr,  # [1] int32
    out_ptr,  # [num_tokens, num_heads, head_size], output
    num_reqs,
    out_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PARTS: tl.constexpr,  # partial results per iteration; power of two
    PDL: tl.constexpr,
):
    # One program per cut between two programs of the attention kernel and query head of a group.
    # A head that was cut several times is merged by the program of its first cut.
    first = tl.program_id(0)
    in_group = tl.program_id(1)
    # The plan is older than the attention ahead of this, which has waited for it.
    per_program = tl.load(tiles_per_program_ptr, cache_modifier=".cg")
    total = tl.load(first_tile_ptr + num_reqs, cache_modifier=".cg") * NUM_KV_HEADS
    req = tl.load(program_req_ptr + first + 1, cache_modifier=".cg")
    req_start = tl.load(first_tile_ptr + req, cache_modifier=".cg")
    num_tiles = tl.load(first_tile_ptr + req + 1, cache_modifier=".cg") - req_start
    token = tl.load(query_start_loc_ptr + req, cache_modifier=".cg").to(tl.int64)
    wait_for_previous(PDL)
    let_next_start(PDL)
    cut = (first + 1) * per_program
    if cut < total:
        kv_head = (cut - req_start * NUM_KV_HEADS) // num_tiles
        start = req_start * NUM_KV_HEADS + kv_head * num_tiles
        if (start < cut) & (start // per_program == first):
            last = (start + num_tiles - 1) // per_program
            dim = tl.arange(0, HEAD_PAD)
            acc = tl.zeros([HEAD_PAD], tl.float32)
            row_sum = 0.0
            highest = float("-inf")
            for base in range(first, last + 1, PARTS):
                program = base + tl.arange(0, PARTS)
                is_part = program <= last
                # A program that began before this head holds it in its second slot.
                part = program * 2 + (program * per_program < start).to(tl.int32)
                stat_ptr = partial_stat_ptr + (part * GROUP + in_group) * 2
                part_max = tl.load(stat_ptr, is_part, other=float("-inf"))
                part_sum = tl.load(stat_ptr + 1, is_part, other=0.0)
                part_offset = (part.to(tl.int64) * GROUP + in_group) * HEAD_SIZE
                part_acc = tl.load(
                    partial_ptr + part_offset[:, None] + dim[None, :],
                    is_part[:, None] & (dim < HEAD_SIZE)[None, :],
                    other=0.0,
                )
                new_highest = tl.maximum(highest, tl.max(part_max, 0))
                weight = tl.math.exp2(part_max - new_highest)
                rescale = tl.math.exp2(highest - new_highest)
                acc = acc * rescale + tl.sum(part_acc * weight[:, None], 0)
                row_sum = row_sum * rescale + tl.sum(part_sum * weight, 0)
                highest = new_highest
            out_offset = token * out_stride + (kv_head * GROUP + in_group) * HEAD_SIZE
            result = (acc / row_sum).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + out_offset + dim, result, dim < HEAD_SIZE)


def paged_attention(
    query: torch.Tensor,
    query_start_loc: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    plan: DecodePlan,
    *,
    scale: float,
    rows: torch.Tensor | None = None,
    soft_cap: float | None = None,
    settled: bool = False,
    out: torch.Tensor,
    num_stages: int = _STAGES,
    num_warps: int = 4,
) -> torch.Tensor:
    """Attend from one query per request to its paged keys and values.

    Outputs of requests with several queries are left as they are; tokens behind the last request
    give zeros.

    Args:
        query: [num_tokens, num_heads, head_size], heads contiguous.
        query_start_loc: [num_reqs + 1] int32, as given to `plan_decode`.
        key_cache: [num_blocks, block_size, num_kv_heads, head_size], last dimension contiguous.
        value_cache: Like key_cache.
        block_table: [num_rows, max_blocks] int32. Block ids are not range-checked here.
        seq_lens: [num_reqs] int32, as given to `plan_decode`; a request of length 0 gives zeros.
        plan: What `plan_decode` made of seq_lens in this step.
        scale: Factor on the scores.
        rows: [num_reqs] int32, row of block_table of each request; None: request i has row i.
        soft_cap: Scores become soft_cap * tanh(score / soft_cap).
        settled: The plan was made before the kernel ahead of this one was launched, so it is read
            while that one still runs.
        out: [num_tokens, num_heads, head_size], heads contiguous.
        num_stages: Tiles on their way from memory.
        num_warps: Per program.

    Returns:
        `out`.

    Raises:
        ValueError: a shape does not match.

    Source: Flash-Decoding's split over keys, https://crfm.stanford.edu/2023/10/12/flashdecoding.html
    """
    num_tokens, num_heads, head_size = query.shape
    num_reqs = seq_lens.numel()
    _, block_size, num_kv_heads, key_head_size = key_cache.shape
    if key_head_size != head_size or num_heads % num_kv_heads or num_kv_heads != plan.num_kv_heads:
        raise ValueError(
            f"query {tuple(query.shape)} does not match key_cache {tuple(key_cache.shape)} and a "
            f"plan for {plan.num_kv_heads} KV heads"
        )
    check_requests(query_start_loc, block_table, seq_lens, rows)
    group = num_heads // num_kv_heads
    head_pad = triton.next_power_of_2(head_size)
    pdl = pdl_options(query.device)
    _paged_attention_kernel[(plan.num_programs,)](
        query,
        query_start_loc,
        key_cache,
        value_cache,
        block_table,
        seq_lens if rows is None else rows,
        seq_lens,
        plan.first_tile,
        plan.program_req,
        plan.tiles_per_program,
        out,
        plan.partial,
        plan.partial_stat,
        scale * math.log2(math.e),
        soft_cap or 0.0,
        num_reqs,
        num_tokens,
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
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_PAD=max(_MIN_HEADS, triton.next_power_of_2(group)),
        HEAD_SIZE=head_size,
        HEAD_PAD=head_pad,
        BLOCK_SIZE=block_size,
        TILE=plan.tile,
        WINDOW=plan.window,
        SAME_STRIDES=key_cache.stride() == value_cache.stride(),
        SOFT_CAP=soft_cap is not None,
        STAGES=num_stages,
        ZERO_TILE=_ZERO_TILE,
        SETTLED=settled,
        num_warps=num_warps,
        **pdl,
    )
    _merge_partials_kernel[(plan.num_programs - 1, group)](
        plan.partial,
        plan.partial_stat,
        query_start_loc,
        plan.first_tile,
        plan.program_req,
        plan.tiles_per_program,
        out,
        num_reqs,
        out.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_SIZE=head_size,
        HEAD_PAD=head_pad,
        PARTS=_MERGE_PARTS,
        num_warps=4,
        **pdl,
    )
    return out


def check_requests(
    query_start_loc: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor | None,
) -> None:
    """Refuse columns that do not describe the same requests."""
    num_reqs = seq_lens.numel()
    num_rows = block_table.shape[0] if rows is None else rows.numel()
    if query_start_loc.numel() != num_reqs + 1 or num_rows != num_reqs:
        raise ValueError(
            f"{num_reqs} lengths, {num_rows} tables and {query_start_loc.numel()} entries of "
            f"query_start_loc, expected {num_reqs + 1}"
        )
    if block_table.stride(1) != 1:
        raise ValueError(f"a row of block_table is not contiguous: strides {block_table.stride()}")
