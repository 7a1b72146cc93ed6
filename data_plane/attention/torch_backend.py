"""Attention in plain torch: the reference of all backends and the default on CPUs.

Decodes are grouped and each group is gathered page by page and computed at once; prefills are
computed per request. Softmax and accumulation are fp32 inside torch's scaled dot-product attention.
Plans with host copies of lengths, so it is not for CUDA graphs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Sequence

    from data_plane.attention.base import (
        AttentionBackend,
        AttentionInputs,
        AttentionMetadata,
        AttentionSpec,
    )

# Gathered keys and values of a group stay in the last-level cache: measured on 8 and 16 rows of
# 100 to 1000 tokens, larger groups lose more to memory than they save in calls.
_MAX_GROUP_TOKENS = 4096
# A group pads to its longest row; rows join while less than this share of it is padding.
_MAX_PADDING = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decodes:
    """Requests with one query each, padded to the same number of pages.

    `tokens` is [n] int64, `pages` [n * pages_per_row] int64 with null blocks as padding, `hidden`
    [num_hidden] int64 (gathered positions no query may see) and `mask` [n, 1, 1, num_gathered]
    bool; the last two are None when every gathered position is seen.
    """

    tokens: torch.Tensor
    pages: torch.Tensor
    hidden: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prefill:
    """One request with several queries.

    Its tokens are [start, end) of the batch; the first num_keys gathered positions are read.
    `mask` is [end - start, num_keys] bool; None: plainly causal, no history.
    """

    start: int
    end: int
    pages: torch.Tensor
    num_keys: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchMetadata:
    """One step as this backend runs it."""

    slot_mapping: torch.Tensor
    decodes: list[_Decodes]
    prefills: list[_Prefill]
    silent: torch.Tensor | None  # [n] int64: tokens that attend to nothing, padding among them


class TorchAttention:
    """See the module; KV shape (2, num_blocks, block_size, num_kv_heads, head_size)."""

    name = "torch"

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self._page_size = spec.block_size * spec.num_kv_heads * spec.head_size
        # Two gather buffers, reused by every layer and step: fresh ones of this size would be
        # mapped and faulted in by the kernel again and again.
        self._scratch = torch.empty((2, 0, self._page_size), dtype=spec.dtype, device=spec.device)

    def get_kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    def build_metadata(self, batch: AttentionInputs) -> TorchMetadata:
        if batch.rows is not None:
            batch = replace(batch, block_tables=batch.gathered_tables(), rows=None)
        starts = batch.query_start_loc_host[:-1].astype(np.int64)
        ends = batch.query_start_loc_host[1:].astype(np.int64)
        lens = batch.seq_lens_host.astype(np.int64)
        query_lens = ends - starts
        if (lens[lens > 0] < query_lens[lens > 0]).any():
            raise ValueError("a request has more queries than tokens in its sequence")
        metadata = TorchMetadata(
            slot_mapping=batch.slot_mapping,
            decodes=[
                self._decodes(batch, rows, starts, lens)
                for rows in self._groups(np.flatnonzero((query_lens == 1) & (lens > 0)), lens)
            ],
            prefills=[
                self._prefill(batch, int(row), int(starts[row]), int(ends[row]), int(lens[row]))
                for row in np.flatnonzero((query_lens > 1) & (lens > 0))
            ],
            silent=self._silent(batch, starts, ends, lens),
        )
        self._reserve(metadata)
        return metadata

    def write_kv(
        self,
        kv_cache: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        if slot_mapping.numel() and int(slot_mapping.min()) < 0:
            written = slot_mapping >= 0
            key, value, slot_mapping = key[written], value[written], slot_mapping[written]
        slots = kv_cache.view(2, -1, *key.shape[1:])
        slots[0].index_copy_(0, slot_mapping, key)
        slots[1].index_copy_(0, slot_mapping, value)

    def copy_blocks(
        self, kv_caches: Sequence[torch.Tensor], src: torch.Tensor, dst: torch.Tensor
    ) -> None:
        for kv_cache in kv_caches:
            kv_cache.index_copy_(1, dst, kv_cache.index_select(1, src))

    def forward(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        step = cast("TorchMetadata", metadata)
        for group in step.decodes:
            self._run_decodes(query, kv_cache, group, out)
        for prefill in step.prefills:
            self._run_prefill(query, kv_cache, prefill, out)
        if step.silent is not None:
            out.index_fill_(0, step.silent, 0.0)

    def _run_decodes(
        self, query: torch.Tensor, kv_cache: torch.Tensor, group: _Decodes, out: torch.Tensor
    ) -> None:
        spec = self.spec
        num_rows = group.tokens.numel()
        keys, values = self._gather(kv_cache, group.pages)
        if group.hidden is not None:
            # Cleared, not only masked: what lies there may be NaN, and 0 * NaN is NaN.
            keys.index_fill_(0, group.hidden, 0.0)
            values.index_fill_(0, group.hidden, 0.0)
        shape = (num_rows, -1, spec.num_kv_heads, spec.head_size)
        # The query heads of a KV head become its queries: K and V are read once, never repeated.
        attended = functional.scaled_dot_product_attention(
            query.index_select(0, group.tokens).view(
                num_rows, spec.num_kv_heads, -1, spec.head_size
            ),
            keys.view(shape).transpose(1, 2),
            values.view(shape).transpose(1, 2),
            attn_mask=group.mask,
            scale=spec.scale,
        )
        out.index_copy_(0, group.tokens, attended.reshape(num_rows, *out.shape[1:]))

    def _run_prefill(
        self, query: torch.Tensor, kv_cache: torch.Tensor, prefill: _Prefill, out: torch.Tensor
    ) -> None:
        spec = self.spec
        keys, values = self._gather(kv_cache, prefill.pages)
        num_queries = prefill.end - prefill.start
        group_size = spec.num_heads // spec.num_kv_heads
        grouped = query[prefill.start : prefill.end].unflatten(1, (spec.num_kv_heads, group_size))

        def shared(x: torch.Tensor) -> torch.Tensor:
            # [num_kv_heads, group_size, num_keys, head_size], one copy for the whole group.
            return x[: prefill.num_keys].transpose(0, 1)[:, None].expand(-1, group_size, -1, -1)

        attended = functional.scaled_dot_product_attention(
            grouped.permute(1, 2, 0, 3),
            shared(keys),
            shared(values),
            attn_mask=prefill.mask,
            is_causal=prefill.mask is None,
            scale=spec.scale,
        )
        out[prefill.start : prefill.end] = attended.permute(2, 0, 1, 3).reshape(
            num_queries, *out.shape[1:]
        )

    def _gather(
        self, kv_cache: torch.Tensor, pages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies pages into the scratch buffers; both [num_gathered, num_kv_heads, head_size]."""
        spec = self.spec
        gathered: list[torch.Tensor] = []
        for part, buffer in zip(kv_cache, self._scratch, strict=True):
            target = buffer[: pages.numel()]
            torch.index_select(part.view(-1, self._page_size), 0, pages, out=target)
            gathered.append(target.view(-1, spec.num_kv_heads, spec.head_size))
        return gathered[0], gathered[1]

    def _groups(self, rows: np.ndarray, lens: np.ndarray) -> list[np.ndarray]:
        """Splits rows into groups of similar lengths and bounded size."""
        if not rows.size:
            return []
        rows = rows[np.argsort(lens[rows], kind="stable")]
        sizes = lens[rows]
        if self.spec.sliding_window is not None:
            sizes = np.minimum(sizes, self.spec.sliding_window)
        cuts: list[int] = []
        start = total = 0
        for index, size in enumerate(sizes.tolist()):
            padded = size * (index - start + 1)  # ascending: this row is the longest so far
            wasted = padded - total - size > _MAX_PADDING * padded + self.spec.block_size
            if index > start and (padded > _MAX_GROUP_TOKENS or wasted):
                cuts.append(index)
                start, total = index, 0
            total += size
        return np.split(rows, cuts)

    def _decodes(
        self, batch: AttentionInputs, rows: np.ndarray, starts: np.ndarray, lens: np.ndarray
    ) -> _Decodes:
        block_size = self.spec.block_size
        device = self.spec.device
        row_lens = torch.from_numpy(lens[rows]).to(device)
        first_seen = torch.zeros_like(row_lens)
        if self.spec.sliding_window is not None:
            first_seen = (row_lens - self.spec.sliding_window).clamp(min=0)
        first_page = first_seen // block_size
        num_pages = (row_lens + block_size - 1) // block_size - first_page
        columns = torch.arange(int(num_pages.max()), device=device)[None, :]
        table_columns = (first_page[:, None] + columns).clamp(max=batch.block_tables.shape[1] - 1)
        table = batch.block_tables.index_select(0, torch.from_numpy(rows).to(device))
        pages = torch.gather(table, 1, table_columns).to(torch.int64)
        pages = torch.where(columns < num_pages[:, None], pages, 0)
        offsets = torch.arange(pages.shape[1] * block_size, device=device)[None, :]
        positions = first_page[:, None] * block_size + offsets
        mask = (positions >= first_seen[:, None]) & (positions < row_lens[:, None])
        hidden = (~mask).view(-1).nonzero().view(-1)
        return _Decodes(
            tokens=torch.from_numpy(starts[rows]).to(device),
            pages=pages.view(-1),
            hidden=hidden if hidden.numel() else None,
            mask=mask[:, None, None, :] if hidden.numel() else None,
        )

    def _prefill(
        self, batch: AttentionInputs, row: int, start: int, end: int, seq_len: int
    ) -> _Prefill:
        block_size = self.spec.block_size
        window = self.spec.sliding_window
        num_computed = seq_len - (end - start)
        first_page = 0
        if window is not None:
            first_page = max(0, num_computed + 1 - window) // block_size
        last_page = -(-seq_len // block_size)
        first_key = first_page * block_size
        mask = None
        if num_computed or (window is not None and seq_len > window):
            queries = torch.arange(num_computed, seq_len, device=self.spec.device)[:, None]
            keys = torch.arange(first_key, seq_len, device=self.spec.device)[None, :]
            mask = keys <= queries
            if window is not None:
                mask &= keys > queries - window
        return _Prefill(
            start=start,
            end=end,
            pages=batch.block_tables[row, first_page:last_page].to(torch.int64),
            num_keys=seq_len - first_key,
            mask=mask,
        )

    def _silent(
        self, batch: AttentionInputs, starts: np.ndarray, ends: np.ndarray, lens: np.ndarray
    ) -> torch.Tensor | None:
        num_real = int(ends[-1]) if ends.size else 0
        parts = [np.arange(starts[row], ends[row]) for row in np.flatnonzero(lens == 0)]
        parts.append(np.arange(num_real, batch.num_tokens))
        tokens = np.concatenate(parts)
        return torch.from_numpy(tokens).to(self.spec.device) if tokens.size else None

    def _reserve(self, metadata: TorchMetadata) -> None:
        units = [*metadata.decodes, *metadata.prefills]
        needed = max((unit.pages.numel() for unit in units), default=0)
        if needed > self._scratch.shape[1]:
            self._scratch = self._scratch.new_empty((2, needed, self._page_size))


def create(spec: AttentionSpec) -> AttentionBackend:
    """Makes the backend for `spec`; called by `select_backend`."""
    return TorchAttention(spec)
