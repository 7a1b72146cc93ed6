"""Turns the rows of a step into what its forward pass reads, from state that the device has."""

# Triton turns plain ints into constexpr arguments; its annotations do not say so.
# pyright: reportArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

    from kernels.row_layout import RowLayout

_TILE = 256  # tokens per loop iteration
_TOKENS_PER_PROGRAM = 1024


# One binary for any size: a step must not be the first of its size to compile.
@triton.jit(do_not_specialize=["num_reqs", "num_padded_tokens"])
def _prepare_step_kernel(
    state_ptr,  # [max_num_seqs + 1, state_stride] int32, LENGTH is written
    block_table_ptr,  # [max_num_seqs + 1, max_blocks] int32
    rows_ptr,  # [num_reqs] int32
    starts_ptr,  # [num_reqs] int32, -1: where the device says
    query_start_loc_ptr,  # [num_reqs + 1] int32
    known_tokens_ptr,  # [num_padded_tokens] int32, -1: the row's last token
    token_ids_ptr,  # [num_padded_tokens] int64, output
    positions_ptr,  # [num_padded_tokens] int64, output
    slot_mapping_ptr,  # [num_padded_tokens] int64, output
    seq_lens_ptr,  # [num_reqs] int32, output
    num_reqs,
    num_padded_tokens,
    state_stride,  # elements between two rows, likewise below
    block_table_stride,
    LAST_TOKEN: tl.constexpr,  # columns of the state
    LENGTH: tl.constexpr,
    ACTIVE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # tokens per KV block
    TOKENS_PER_PROGRAM: tl.constexpr,
    TILE: tl.constexpr,
):
    # One program per request and part of its tokens; those behind the last request mask the
    # padding behind the last token.
    req = tl.program_id(0)
    part = tl.program_id(1)
    start = tl.load(query_start_loc_ptr + req)
    if req == num_reqs:
        first_padding = start + part * TOKENS_PER_PROGRAM
        last = tl.minimum(first_padding + TOKENS_PER_PROGRAM, num_padded_tokens)
        for first in range(first_padding, last, TILE):
            token = first + tl.arange(0, TILE)
            mask = token < last
            zero = tl.zeros([TILE], tl.int64)
            tl.store(token_ids_ptr + token, zero, mask=mask)
            tl.store(positions_ptr + token, zero, mask=mask)
            tl.store(slot_mapping_ptr + token, zero - 1, mask=mask)
    else:
        num_tokens = tl.load(query_start_loc_ptr + req + 1) - start
        # int64: row * stride passes 2**31 with many rows of long sequences.
        row = tl.load(rows_ptr + req).to(tl.int64)
        row_state_ptr = state_ptr + row * state_stride
        row_table_ptr = block_table_ptr + row * block_table_stride
        is_live = tl.load(row_state_ptr + ACTIVE) > 0
        # A row that failed has none to feed.
        last_token = tl.maximum(tl.load(row_state_ptr + LAST_TOKEN), 0)
        first_position = tl.load(starts_ptr + req)
        if first_position < 0:
            # Such a request has one token, so no other program reads what this one writes.
            first_position = tl.load(row_state_ptr + LENGTH)
        if part == 0:
            length = first_position + num_tokens
            if is_live:
                tl.store(row_state_ptr + LENGTH, length)
            tl.store(seq_lens_ptr + req, tl.where(is_live, length, 0))
        last = tl.minimum((part + 1) * TOKENS_PER_PROGRAM, num_tokens)
        for first in range(part * TOKENS_PER_PROGRAM, last, TILE):
            offset = first + tl.arange(0, TILE)
            mask = offset < last
            token = start + offset
            position = first_position + offset
            known = tl.load(known_tokens_ptr + token, mask=mask, other=0)
            block_id = tl.load(row_table_ptr + position // BLOCK_SIZE, mask=mask, other=0)
            # int64: block_id * BLOCK_SIZE passes 2**31 on large caches.
            slot = block_id.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
            token_id = tl.where(known < 0, last_token, known)
            tl.store(token_ids_ptr + token, token_id.to(tl.int64), mask=mask)
            tl.store(positions_ptr + token, position.to(tl.int64), mask=mask)
            tl.store(slot_mapping_ptr + token, tl.where(is_live, slot, -1), mask=mask)


def prepare_step(
    state: torch.Tensor,
    block_table: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    query_start_loc: torch.Tensor,
    known_tokens: torch.Tensor,
    *,
    layout: RowLayout,
    block_size: int,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    """Give a step's tokens, positions, slots and lengths, and advance its rows' lengths.

    A request whose row is not active writes nowhere, has length 0, and leaves its row as it is.

    Args:
        state: [max_num_seqs + 1, n] int32, one line per row; the last is padding and not active.
            The length column of active rows becomes their length after this step.
        block_table: [max_num_seqs + 1, max_blocks] int32.
        rows: [num_reqs] int32; a row occurs once, but for padding.
        starts: [num_reqs] int32, position of each request's first token; -1: the row's length, for
            a request of one token.
        query_start_loc: [num_reqs + 1] int32, exclusive prefix sum of tokens per request.
        known_tokens: [num_tokens] int32; -1: the row's last token.
        layout: Columns of `state`; the length counts tokens with KV in the cache.
        block_size: Tokens per block; a power of two.
        token_ids: [num_tokens] int64, written; 0 behind the last request, as positions.
        positions: [num_tokens] int64, written.
        slot_mapping: [num_tokens] int64, written; -1: the token is written nowhere.
        seq_lens: [num_reqs] int32, written.

    Raises:
        ValueError: a shape does not match. Rows and block ids are not range-checked here.
    """
    num_reqs, num_tokens = rows.numel(), token_ids.numel()
    if starts.numel() != num_reqs or query_start_loc.numel() != num_reqs + 1:
        raise ValueError(
            f"{num_reqs} rows need as many starts and one offset more, got {starts.numel()} and "
            f"{query_start_loc.numel()}"
        )
    if not known_tokens.numel() == positions.numel() == slot_mapping.numel() == num_tokens:
        raise ValueError(
            f"known_tokens, token_ids, positions and slot_mapping differ in length: "
            f"{known_tokens.numel()}, {num_tokens}, {positions.numel()}, {slot_mapping.numel()}"
        )
    if seq_lens.numel() != num_reqs:
        raise ValueError(f"seq_lens is for {seq_lens.numel()} requests, not {num_reqs}")
    _prepare_step_kernel[(num_reqs + 1, triton.cdiv(num_tokens, _TOKENS_PER_PROGRAM))](
        state,
        block_table,
        rows,
        starts,
        query_start_loc,
        known_tokens,
        token_ids,
        positions,
        slot_mapping,
        seq_lens,
        num_reqs,
        num_tokens,
        state.stride(0),
        block_table.stride(0),
        LAST_TOKEN=layout.last_token,
        LENGTH=layout.length,
        ACTIVE=layout.active,
        BLOCK_SIZE=block_size,
        TOKENS_PER_PROGRAM=_TOKENS_PER_PROGRAM,
        TILE=_TILE,
    )
