"""What every kernel computes, in plain torch: its tests' reference, and what a CPU worker runs.

Owns: one `x_ref` per kernel `x`, with the same arguments and the same result. Does not import
triton, so that a worker without a GPU never does.
"""

from __future__ import annotations

import torch


def slot_mapping_ref(
    block_table: torch.Tensor,
    rows: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    *,
    block_size: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """See `kernels.slot_mapping.slot_mapping`."""
    num_tokens = int(query_start_loc[-1])
    out.fill_(-1)
    row_of_token = torch.repeat_interleave(
        rows.long(), query_start_loc.diff(), output_size=num_tokens
    )
    position = positions[:num_tokens]
    block_id = block_table[row_of_token.clamp(min=0), position // block_size].long()
    slot = block_id * block_size + position % block_size
    out[:num_tokens] = slot.masked_fill_(row_of_token < 0, -1)
    return out


def apply_block_table_delta_ref(
    block_table: torch.Tensor,
    rows: torch.Tensor,
    first_columns: torch.Tensor,
    id_offsets: torch.Tensor,
    block_ids: torch.Tensor,
) -> None:
    """See `kernels.apply_block_table_delta.apply_block_table_delta`."""
    offsets = id_offsets.tolist()
    for i, (row, column) in enumerate(zip(rows.tolist(), first_columns.tolist(), strict=True)):
        ids = block_ids[offsets[i] : offsets[i + 1]]
        block_table[row, column : column + ids.numel()] = ids


def reshape_and_cache_ref(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See `kernels.reshape_and_cache.reshape_and_cache`."""
    written = slot_mapping >= 0
    slot = slot_mapping[written]
    block_size = key_cache.shape[1]
    key_cache[slot // block_size, slot % block_size] = key[written]
    value_cache[slot // block_size, slot % block_size] = value[written]
