"""Scatters the changed entries of a step into the device block table."""

# Triton turns plain ints into constexpr arguments; its annotations do not say so.
# pyright: reportArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

_TILE = 128  # block ids per loop iteration


@triton.jit
def _apply_block_table_delta_kernel(
    block_table_ptr,  # [max_num_seqs, max_blocks_per_seq] int32, written in place
    block_table_stride,  # elements between two rows
    rows_ptr,  # [num_segments] int32
    first_columns_ptr,  # [num_segments] int32
    id_offsets_ptr,  # [num_segments + 1] int32
    block_ids_ptr,  # [num_ids] int32
    TILE: tl.constexpr,  # block ids per loop iteration; power of two
):
    # One program per segment: consecutive entries of one row.
    segment = tl.program_id(0)
    # int64: row * stride passes 2**31 with many rows of long sequences.
    row = tl.load(rows_ptr + segment).to(tl.int64)
    column = tl.load(first_columns_ptr + segment)
    start = tl.load(id_offsets_ptr + segment)
    end = tl.load(id_offsets_ptr + segment + 1)
    entry_ptr = block_table_ptr + row * block_table_stride + column
    for first in range(start, end, TILE):
        i = first + tl.arange(0, TILE)
        mask = i < end
        block_id = tl.load(block_ids_ptr + i, mask=mask, other=0)
        tl.store(entry_ptr + (i - start), block_id, mask=mask)


def apply_block_table_delta(
    block_table: torch.Tensor,
    rows: torch.Tensor,
    first_columns: torch.Tensor,
    id_offsets: torch.Tensor,
    block_ids: torch.Tensor,
) -> None:
    """Write segments of block ids into the table: entries that no segment names keep their value.

    block_table[rows[i], first_columns[i] + j] = block_ids[id_offsets[i] + j]

    Args:
        block_table: [max_num_seqs, max_blocks_per_seq] int32, rows may be strided; in place.
        rows: [num_segments] int32. A row may occur more than once; where segments overlap their
            ids must agree, because their order is not defined.
        first_columns: [num_segments] int32, first entry of each segment.
        id_offsets: [num_segments + 1] int32, exclusive prefix sum of ids per segment.
        block_ids: [num_ids] int32, the ids of all segments.

    Raises:
        ValueError: a shape does not match. Rows and columns are not range-checked here;
            `BlockTable` has done so on the host.
    """
    num_segments = rows.numel()
    if first_columns.numel() != num_segments or id_offsets.numel() != num_segments + 1:
        raise ValueError(
            f"{num_segments} rows need as many first columns and one offset more, got "
            f"{first_columns.numel()} and {id_offsets.numel()}"
        )
    if block_table.stride(1) != 1:
        raise ValueError(f"a row of block_table is not contiguous: strides {block_table.stride()}")
    if num_segments == 0:
        return
    _apply_block_table_delta_kernel[(num_segments,)](
        block_table,
        block_table.stride(0),
        rows,
        first_columns,
        id_offsets,
        block_ids,
        TILE=_TILE,
    )
