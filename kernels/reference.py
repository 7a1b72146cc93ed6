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


def paged_attention_ref(
    query: torch.Tensor,
    query_start_loc: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    rows: torch.Tensor | None = None,
    soft_cap: float | None = None,
    window: int = 0,
    out: torch.Tensor,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """See `kernels.paged_attention.paged_attention` and `kernels.paged_prefill.paged_prefill`.

    Serves requests with any number of queries; tokens behind the last request give zeros. `dtype`
    is what products and softmax are computed in.
    """
    group = query.shape[1] // key_cache.shape[2]
    block_size = key_cache.shape[1]
    starts = query_start_loc.tolist()
    out.zero_()
    for req, seq_len in enumerate(seq_lens.tolist()):
        start, end = starts[req], starts[req + 1]
        if seq_len == 0 or start == end:
            continue
        table = block_table[req if rows is None else int(rows[req])]
        index = torch.arange(seq_len, device=query.device)
        position = index[seq_len - (end - start) :]
        is_seen = index <= position[:, None]
        if window:
            is_seen &= index > position[:, None] - window
        # Only what some query sees is read: the rest may be anything, NaN too.
        is_read = is_seen.any(dim=0)
        index, is_seen = index[is_read], is_seen[:, is_read]
        block, slot = table[index // block_size].long(), index % block_size
        key = key_cache[block, slot].to(dtype).repeat_interleave(group, 1)
        value = value_cache[block, slot].to(dtype).repeat_interleave(group, 1)
        score = torch.einsum("qhd,khd->hqk", query[start:end].to(dtype), key) * scale
        if soft_cap is not None:
            score = soft_cap * torch.tanh(score / soft_cap)
        weight = score.masked_fill(~is_seen, -torch.inf).softmax(-1)
        out[start:end] = torch.einsum("hqk,khd->qhd", weight, value).to(out.dtype)
    return out
