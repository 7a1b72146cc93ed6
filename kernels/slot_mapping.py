"""Where each scheduled token's key and value go in the flattened KV cache."""

# Triton turns plain ints into constexpr arguments; its annotations do not say so.
# pyright: reportArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

_TILE = 128  # tokens per loop iteration


@triton.jit(do_not_specialize=["num_padded_tokens"])  # one binary for 1 token and for 16
def _slot_mapping_kernel(
    block_table_ptr,  # [max_num_seqs, max_blocks_per_seq] int32
    block_table_stride,  # elements between two rows
    rows_ptr,  # [num_reqs] int32, -1: no row, its tokens are written nowhere
    query_start_loc_ptr,  # [num_reqs + 1] int32
    positions_ptr,  # [num_tokens] int64
    slot_mapping_ptr,  # [num_padded_tokens] int64, output
    num_padded_tokens,
    BLOCK_SIZE: tl.constexpr,  # tokens per KV block
    TILE: tl.constexpr,  # tokens per loop iteration; power of two
):
    # One program per request: a request's tokens are contiguous in the batch. The last program has
    # no request: it masks the padding behind the last token.
    req = tl.program_id(0)
    start = tl.load(query_start_loc_ptr + req)
    if req == tl.num_programs(0) - 1:
        for first in range(start, num_padded_tokens, TILE):
            token = first + tl.arange(0, TILE)
            nowhere = tl.full([TILE], -1, tl.int64)
            tl.store(slot_mapping_ptr + token, nowhere, mask=token < num_padded_tokens)
    else:
        end = tl.load(query_start_loc_ptr + req + 1)
        row = tl.load(rows_ptr + req)
        # Row 0 stands in where there is no row: its entries are read and dropped.
        # int64: row * stride passes 2**31 with many rows of long sequences.
        row_ptr = block_table_ptr + tl.maximum(row, 0).to(tl.int64) * block_table_stride
        for first in range(start, end, TILE):
            token = first + tl.arange(0, TILE)
            mask = token < end
            position = tl.load(positions_ptr + token, mask=mask, other=0)
            block_id = tl.load(row_ptr + position // BLOCK_SIZE, mask=mask, other=0)
            # int64: block_id * BLOCK_SIZE passes 2**31 on large caches.
            slot = block_id.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
            tl.store(slot_mapping_ptr + token, tl.where(row >= 0, slot, -1), mask=mask)


def slot_mapping(
    block_table: torch.Tensor,
    rows: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    *,
    block_size: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """Map each scheduled token to its slot in the flattened KV cache.

    slot = block_table[rows[req], position // block_size] * block_size + position % block_size

    Args:
        block_table: [max_num_seqs, max_blocks_per_seq] int32, rows may be strided.
        rows: [num_reqs] int32, the row of each request; -1 for a padded request and for one that
            stopped on the device: the slots of its tokens are -1.
        query_start_loc: [num_reqs + 1] int32, exclusive prefix sum of tokens per request.
        positions: [>= num_tokens] int64, position of each token within its sequence.
        block_size: Tokens per block; a power of two.
        out: [>= num_tokens] int64, written in place (a persistent buffer under CUDA graphs);
            what lies behind the last token becomes -1.

    Returns:
        `out`.

    Raises:
        ValueError: a shape does not match. Block ids are not range-checked here;
            `BlockTable` has done so on the host.
    """
    num_reqs = rows.numel()
    if query_start_loc.numel() != num_reqs + 1:
        raise ValueError(
            f"query_start_loc has {query_start_loc.numel()} entries for {num_reqs} rows, "
            f"expected {num_reqs + 1}"
        )
    if out.numel() > positions.numel():
        raise ValueError(f"out has {out.numel()} entries but positions {positions.numel()}")
    if block_table.stride(1) != 1:
        raise ValueError(f"a row of block_table is not contiguous: strides {block_table.stride()}")
    _slot_mapping_kernel[(num_reqs + 1,)](
        block_table,
        block_table.stride(0),
        rows,
        query_start_loc,
        positions,
        out,
        out.numel(),
        BLOCK_SIZE=block_size,
        TILE=_TILE,
    )
    return out
