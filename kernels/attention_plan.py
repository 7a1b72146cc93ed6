"""Cuts a step's attention into equal pieces of work, on the device, once for all layers.

The host cannot do it: lengths are known on the device alone when steps are ordered ahead of
results. Decodes: the flat list of (sequence, KV head, tile of keys) is cut into equal ranges over a
fixed grid of programs. Prefills: a list of (request, tile of queries), longest first within a
request.
"""

# Triton turns plain ints into constexpr arguments and takes launch options as keywords; its
# annotations do not say so.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.launch import coarse_power_of_2, let_next_start, pdl_options, wait_for_previous

# Measured on an H200, 32 query and 8 KV heads of 128, bf16, 1 to 256 sequences of 1k to 16k: larger
# least ranges leave short batches on few programs, more programs only add partial results.
_MIN_TILES = 1  # fewest tiles per program
_PROGRAMS_PER_SM = 2
_TILE_BYTES = 16 * 1024  # of keys; with as many values and five stages, two programs fit an SM
_MAX_TILE = 64


@triton.jit(do_not_specialize=["num_reqs"])
def _plan_decode_kernel(
    query_start_loc_ptr,  # [num_reqs + 1] int32
    seq_lens_ptr,  # [num_reqs] int32, 0: nothing to attend to
    first_tile_ptr,  # [num_reqs + 1] int32, output: exclusive prefix sum of tiles per KV head
    program_req_ptr,  # [num_programs] int32, output: request in which each program starts
    tiles_per_program_ptr,  # [1] int32, output
    num_reqs,
    num_programs,
    NUM_KV_HEADS: tl.constexpr,
    WINDOW: tl.constexpr,  # keys a query sees; 0: all
    TILE: tl.constexpr,  # keys per tile
    MIN_TILES: tl.constexpr,  # fewest tiles per program
    REQS: tl.constexpr,  # power of two >= num_reqs
    PROGRAMS: tl.constexpr,  # power of two >= num_programs
    SEARCH_STEPS: tl.constexpr,  # log2(REQS) + 1
    PDL: tl.constexpr,
):
    # One program: everything fits into registers.
    wait_for_previous(PDL)
    let_next_start(PDL)
    req = tl.arange(0, REQS)
    seq_len = tl.load(seq_lens_ptr + req, mask=req < num_reqs, other=0)
    # In a mixed batch, requests with several queries are another kernel's work.
    query_start = tl.load(query_start_loc_ptr + req, mask=req < num_reqs, other=0)
    query_end = tl.load(query_start_loc_ptr + req + 1, mask=req < num_reqs, other=0)
    seq_len = tl.where(query_end - query_start == 1, seq_len, 0)
    tiles = (seq_len + TILE - 1) // TILE
    if WINDOW > 0:
        tiles -= tl.maximum(seq_len - WINDOW, 0) // TILE
    ends = tl.cumsum(tiles, 0)
    tl.store(first_tile_ptr + req + 1, ends, mask=req < num_reqs)
    tl.store(first_tile_ptr, 0)
    total = tl.sum(tiles, 0) * NUM_KV_HEADS
    per_program = tl.maximum((total + num_programs - 1) // num_programs, MIN_TILES)
    tl.store(tiles_per_program_ptr, per_program)
    # The prefix sums are read back by other threads than those that wrote them.
    tl.debug_barrier()
    program = tl.arange(0, PROGRAMS)
    start = program * per_program
    # Last request whose first tile is not behind `start`: one with no tiles is never it, unless
    # nothing is left for the program.
    low = tl.zeros([PROGRAMS], tl.int32)
    high = tl.full([PROGRAMS], 0, tl.int32) + num_reqs
    for _ in tl.static_range(SEARCH_STEPS):
        middle = (low + high) // 2
        is_behind = tl.load(first_tile_ptr + middle) * NUM_KV_HEADS > start
        done = high - low <= 1
        high = tl.where(is_behind & ~done, middle, high)
        low = tl.where(~is_behind & ~done, middle, low)
    tl.store(program_req_ptr + program, low, mask=program < num_programs)


@triton.jit(do_not_specialize=["num_reqs"])
def _plan_prefill_kernel(
    query_start_loc_ptr,  # [num_reqs + 1] int32
    tiles_ptr,  # [num_programs, 2] int32, output: request or -1, tile of its queries
    num_reqs,
    QUERY_TILE: tl.constexpr,
    REQS: tl.constexpr,  # power of two >= num_reqs
    PDL: tl.constexpr,
):
    # One program per entry of the list.
    wait_for_previous(PDL)
    let_next_start(PDL)
    index = tl.program_id(0)
    all_reqs = tl.arange(0, REQS)
    starts = tl.load(query_start_loc_ptr + all_reqs, mask=all_reqs < num_reqs, other=0)
    ends = tl.load(query_start_loc_ptr + all_reqs + 1, mask=all_reqs < num_reqs, other=0)
    # Requests with one query are the decode kernel's work.
    tiles = tl.where(ends - starts > 1, (ends - starts + QUERY_TILE - 1) // QUERY_TILE, 0)
    tile_ends = tl.cumsum(tiles, 0)
    # Backwards: later tiles of a request see more keys, and what runs last should be short.
    place = tl.sum(tiles, 0) - 1 - index
    req = tl.sum((tile_ends <= place).to(tl.int32), 0)
    tile = place - tl.sum(tl.where(all_reqs < req, tiles, 0), 0)
    tl.store(tiles_ptr + index * 2, tl.where(place >= 0, req, -1))
    tl.store(tiles_ptr + index * 2 + 1, tile)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """Device buffers of one step's plan and its partial results; reused by every step.

    Attributes:
        first_tile: [max_num_reqs + 1] int32.
        program_req: [num_programs] int32.
        tiles_per_program: [1] int32.
        partial: [num_programs, 2, group_size, head_size] fp32.
        partial_stat: [num_programs, 2, group_size, 2] fp32: highest score, sum of weights.
        num_programs: Fixed grid.
        num_kv_heads: Of the cache.
        tile: Keys per tile.
        window: Keys a query sees; 0: all.
    """

    first_tile: torch.Tensor
    program_req: torch.Tensor
    tiles_per_program: torch.Tensor
    partial: torch.Tensor
    partial_stat: torch.Tensor
    num_programs: int
    num_kv_heads: int
    tile: int
    window: int


def new_decode_plan(
    *,
    max_num_reqs: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    device: torch.device,
    window: int = 0,
    num_programs: int | None = None,
    tile: int | None = None,
) -> DecodePlan:
    """Allocate the buffers of `plan_decode` and `paged_attention`.

    `num_programs` and `tile` (a power of two) follow from device, head size and dtype unless given.
    """
    if num_programs is None:
        num_programs = 8
        if device.type == "cuda":
            num_sms = torch.cuda.get_device_properties(device).multi_processor_count
            num_programs = _PROGRAMS_PER_SM * num_sms
    if tile is None:
        row_bytes = triton.next_power_of_2(head_size) * dtype.itemsize
        tile = min(_MAX_TILE, max(16, _TILE_BYTES // row_bytes))
    group = num_heads // num_kv_heads

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return DecodePlan(
        first_tile=empty(max_num_reqs + 1, dtype=torch.int32),
        program_req=empty(num_programs, dtype=torch.int32),
        tiles_per_program=empty(1, dtype=torch.int32),
        partial=empty(num_programs, 2, group, head_size, dtype=torch.float32),
        partial_stat=empty(num_programs, 2, group, 2, dtype=torch.float32),
        num_programs=num_programs,
        num_kv_heads=num_kv_heads,
        tile=tile,
        window=window,
    )


def plan_decode(
    plan: DecodePlan, query_start_loc: torch.Tensor, seq_lens: torch.Tensor
) -> DecodePlan:
    """Cut a step's decode work into equal ranges, on the device.

    Args:
        plan: Written in place.
        query_start_loc: [num_reqs + 1] int32; only requests with one query are planned.
        seq_lens: [num_reqs] int32 keys per request, the new token's included; 0: none.

    Returns:
        `plan`.

    Raises:
        ValueError: there are more requests than the plan has room for.
    """
    num_reqs = seq_lens.numel()
    if not 0 < num_reqs < plan.first_tile.numel():
        raise ValueError(
            f"{num_reqs} requests, but the plan is for 1 to {plan.first_tile.numel() - 1}"
        )
    padded = coarse_power_of_2(num_reqs)
    _plan_decode_kernel[(1,)](
        query_start_loc,
        seq_lens,
        plan.first_tile,
        plan.program_req,
        plan.tiles_per_program,
        num_reqs,
        plan.num_programs,
        NUM_KV_HEADS=plan.num_kv_heads,
        WINDOW=plan.window,
        TILE=plan.tile,
        MIN_TILES=_MIN_TILES,
        REQS=padded,
        PROGRAMS=triton.next_power_of_2(plan.num_programs),
        SEARCH_STEPS=padded.bit_length(),
        num_warps=4,
        **pdl_options(seq_lens.device),
    )
    return plan


def plan_prefill(
    query_start_loc: torch.Tensor, *, query_tile: int, out: torch.Tensor
) -> torch.Tensor:
    """List the tiles of queries of all requests with more than one query, on the device.

    Args:
        query_start_loc: [num_reqs + 1] int32.
        query_tile: Queries per tile.
        out: [n, 2] int32, contiguous: request (-1: none) and tile. `max_prefill_tiles` gives an n
            that is enough; tiles that do not fit are dropped.

    Returns:
        `out`.
    """
    num_reqs = query_start_loc.numel() - 1
    if out.shape[0] == 0:
        return out
    _plan_prefill_kernel[(out.shape[0],)](
        query_start_loc,
        out,
        num_reqs,
        QUERY_TILE=query_tile,
        REQS=coarse_power_of_2(num_reqs),
        num_warps=1,
        **pdl_options(out.device),
    )
    return out


def max_prefill_tiles(num_tokens: int, num_prefill_reqs: int, query_tile: int) -> int:
    """Most tiles that any split of the tokens over that many requests can need.

    Only requests with several queries have tiles.
    """
    return num_tokens // query_tile + min(num_prefill_reqs, num_tokens // 2)
