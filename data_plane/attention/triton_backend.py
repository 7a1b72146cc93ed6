"""Attention by our own kernels: the default on GPUs.

Reads lengths on the device only, waits for nothing, and allocates nothing once every batch size has
been seen, so that a step can be captured in a CUDA graph and replayed with other lengths. One step
at a time: steps share the plan's buffers, in the order of one stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from kernels.attention_plan import max_prefill_tiles, new_decode_plan, plan_decode, plan_prefill
from kernels.copy_blocks import cache_addresses, copy_blocks
from kernels.paged_attention import paged_attention
from kernels.paged_prefill import paged_prefill, prefill_tiles
from kernels.reshape_and_cache import reshape_and_cache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from data_plane.attention.base import (
        AttentionBackend,
        AttentionInputs,
        AttentionMetadata,
        AttentionSpec,
    )

_MAX_REQS = 1 << 16  # of one step; a plan has one word for each


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonMetadata:
    """One step as this backend runs it: its inputs, and the tiles of requests with many queries."""

    slot_mapping: torch.Tensor
    inputs: AttentionInputs
    tiles: torch.Tensor | None  # [n, 2] int32


class TritonAttention:
    """See the module; KV shape (2, num_blocks, block_size, num_kv_heads, head_size)."""

    name = "triton"

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self._window = spec.sliding_window or 0
        self._plan = new_decode_plan(
            max_num_reqs=_MAX_REQS,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            dtype=spec.dtype,
            device=spec.device,
            window=self._window,
        )
        self._query_tile = prefill_tiles(spec.head_size, spec.dtype).query_tile
        # One list per power of two, kept for good: captured graphs hold their addresses.
        self._tiles: dict[int, torch.Tensor] = {}
        self._addresses: dict[tuple[int, ...], torch.Tensor] = {}

    def get_kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    def build_metadata(self, batch: AttentionInputs) -> TritonMetadata:
        num_reqs = batch.seq_lens.numel()
        tiles = None
        if num_reqs:
            plan_decode(self._plan, batch.query_start_loc, batch.seq_lens)
            if batch.max_query_len > 1:
                tiles = self._prefill_tiles(batch, num_reqs)
        return TritonMetadata(slot_mapping=batch.slot_mapping, inputs=batch, tiles=tiles)

    def write_kv(
        self,
        kv_cache: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        reshape_and_cache(key, value, kv_cache[0], kv_cache[1], slot_mapping)

    def copy_blocks(
        self, kv_caches: Sequence[torch.Tensor], src: torch.Tensor, dst: torch.Tensor
    ) -> None:
        key = tuple(cache.data_ptr() for cache in kv_caches)
        addresses = self._addresses.get(key)
        if addresses is None:
            addresses = self._addresses[key] = cache_addresses(kv_caches)
        copy_blocks(kv_caches, src, dst, addresses=addresses)

    def forward(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
        *,
        settled: bool = False,
    ) -> None:
        """See the protocol; `settled`: something was launched between `build_metadata` and this."""
        step = cast("TritonMetadata", metadata)
        batch = step.inputs
        if not batch.seq_lens.numel():
            out.zero_()
            return
        paged_attention(
            query,
            batch.query_start_loc,
            kv_cache[0],
            kv_cache[1],
            batch.block_tables,
            batch.seq_lens,
            self._plan,
            scale=self.spec.scale,
            rows=batch.rows,
            settled=settled,
            out=out,
        )
        if step.tiles is not None:
            paged_prefill(
                query,
                batch.query_start_loc,
                kv_cache[0],
                kv_cache[1],
                batch.block_tables,
                batch.seq_lens,
                step.tiles,
                scale=self.spec.scale,
                rows=batch.rows,
                window=self._window,
                out=out,
            )

    def _prefill_tiles(self, batch: AttentionInputs, num_reqs: int) -> torch.Tensor:
        most = num_reqs if batch.max_prefill_reqs is None else batch.max_prefill_reqs
        num_tiles = max_prefill_tiles(batch.num_tokens, most, self._query_tile)
        capacity = 1 << max(10, (num_tiles - 1).bit_length())
        tiles = self._tiles.get(capacity)
        if tiles is None:
            tiles = torch.empty((capacity, 2), dtype=torch.int32, device=self.spec.device)
            self._tiles[capacity] = tiles
        return plan_prefill(
            batch.query_start_loc, query_tile=self._query_tile, out=tiles[:num_tiles]
        )


def create(spec: AttentionSpec) -> AttentionBackend:
    """Makes the backend for `spec`; called by `select_backend`."""
    return TritonAttention(spec)
