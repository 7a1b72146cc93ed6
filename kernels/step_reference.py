"""What the kernels around a step's forward pass compute, in plain torch; see `reference`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.reference import slot_mapping_ref

if TYPE_CHECKING:
    import torch

    from kernels.row_layout import RowLayout


def prepare_step_ref(
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
    """See `kernels.prepare_step.prepare_step`."""
    for tensor in (token_ids, positions):
        tensor.zero_()
    slot_mapping.fill_(-1)
    bounds = query_start_loc.tolist()
    live_rows = rows.clone()
    for req, row in enumerate(rows.tolist()):
        first, end = bounds[req], bounds[req + 1]
        is_live = bool(state[row, layout.active] > 0)
        start = int(starts[req])
        start = int(state[row, layout.length]) if start < 0 else start
        length = start + end - first
        known = known_tokens[first:end]
        token_ids[first:end] = known.where(known >= 0, state[row, layout.last_token].clamp(min=0))
        for token in range(first, end):
            positions[token] = start + token - first
        seq_lens[req] = length if is_live else 0
        if is_live:
            state[row, layout.length] = length
        else:
            live_rows[req] = -1
    num_tokens = bounds[-1]
    slot_mapping_ref(
        block_table,
        live_rows,
        query_start_loc,
        positions[:num_tokens],
        block_size=block_size,
        out=slot_mapping[:num_tokens],
    )
