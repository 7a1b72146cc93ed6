"""What every kernel computes, in plain torch: its tests' reference, and what a CPU worker runs.

Owns: one `x_ref` per kernel `x`, with the same arguments and the same result. Does not import
triton, so that a worker without a GPU never does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


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


def rms_norm_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    residual: torch.Tensor | None = None,
    out: torch.Tensor,
) -> torch.Tensor:
    """See `kernels.rms_norm.rms_norm`."""
    if residual is not None:
        residual.add_(x)
        x = residual
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return out.copy_((wide * scale * weight.float()).to(out.dtype))


def silu_mul_ref(gate_up: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """See `kernels.silu_mul.silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return out.copy_(torch.nn.functional.silu(gate) * up)


def rotary_and_cache_ref(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    query: torch.Tensor,
) -> torch.Tensor:
    """See `kernels.rotary_and_cache.rotary_and_cache`."""
    _, num_heads, head_size = query.shape
    num_kv_heads = key_cache.shape[2]
    heads = qkv.unflatten(1, (num_heads + 2 * num_kv_heads, head_size))
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        q = rms_norm_ref(q, q_norm, eps=eps, out=torch.empty_like(q))
        k = rms_norm_ref(k, k_norm, eps=eps, out=torch.empty_like(k))
    angle = positions.float()[:, None, None] * inv_freq
    cos, sin = angle.cos(), angle.sin()

    def rotated(x: torch.Tensor) -> torch.Tensor:
        first, second = x.float().chunk(2, dim=-1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat(turned, dim=-1).to(x.dtype)

    reshape_and_cache_ref(rotated(k), v, key_cache, value_cache, slot_mapping)
    return query.copy_(rotated(q))


def merge_attention_states_ref(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> torch.Tensor:
    """See `kernels.merge_attention_states.merge_attention_states`."""
    torch.logaddexp(lse_a, lse_b, out=lse)
    out.zero_()
    for part, part_lse in ((out_a, lse_a), (out_b, lse_b)):
        share = torch.where(part_lse == -torch.inf, 0.0, (part_lse - lse).exp())[..., None]
        out += torch.where(share == 0, 0.0, part.double() * share).to(out.dtype)
    return out


def copy_blocks_ref(
    kv_caches: Sequence[torch.Tensor], src: torch.Tensor, dst: torch.Tensor
) -> None:
    """See `kernels.copy_blocks.copy_blocks`."""
    for cache in kv_caches:
        cache[:, dst] = cache[:, src]
