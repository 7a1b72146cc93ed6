"""From a step's work to what the device computes on.

Owns: the order and layout of a step's inputs, and which of them the host sends. Does not know the
model, sampling, or how work came about.

Requests of a step lie in row order. What the host knows travels in one copy; what only the device
knows (a decoding row's last token, its length, whether it stopped) is read there through the row
index, so that a step can be ordered before the results of the one before it are known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from data_plane.attention.base import AttentionInputs
from data_plane.row_state import ACTIVE, LAST_TOKEN, LENGTH, GatheredRows, RowState
from data_plane.staging import StagingRing

if TYPE_CHECKING:
    from collections.abc import Callable

    from data_plane.block_table import BlockTable
    from data_plane.step_work import BoolArray, Int32Array, Int64Array, StepWork


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Device inputs of one step. Borrowed until the next step is prepared.

    Attributes:
        rows: [num_reqs] int32, the padding row where a request is padding.
        state: State of those rows at the start of the step.
        is_live: [num_reqs] bool, not padding and not stopped: only these write anything.
        lengths: [num_reqs] int32, tokens with KV after the step.
        token_ids: [num_tokens] int64.
        attention: What the attention backend plans with.
        logits_rows: [num_samples] int64, token whose logits each sample is drawn from.
        sample_reqs: [num_samples] int32, request of each sample; None: one sample per request.
    """

    rows: torch.Tensor
    state: GatheredRows
    is_live: torch.Tensor
    lengths: torch.Tensor
    token_ids: torch.Tensor
    attention: AttentionInputs
    logits_rows: torch.Tensor
    sample_reqs: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _HostBatch:
    """The requests of a step on the host, padding not included."""

    rows: Int32Array
    num_new_tokens: Int32Array
    start_positions: Int64Array
    is_decode: BoolArray
    samples: BoolArray
    chunk_token_ids: Int32Array
    # For each request the one whose last token's logits it samples from: itself but for forks.
    logits_source: Int64Array | None


class InputBatch:
    """Builds StepInputs in buffers that live as long as the worker."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        block_size: int,
        device: torch.device,
        block_table: BlockTable,
        row_state: RowState,
        decode_sizes: tuple[int, ...] = (),
        skip_inactive: bool = False,
        num_slots: int = 4,
    ) -> None:
        """Allocate the buffers.

        Args:
            max_num_seqs: Most requests of a step.
            max_num_batched_tokens: Most tokens of a step.
            block_size: Tokens per KV block.
            device: Of all tensors.
            block_table: Read for slots and attention.
            row_state: Read for what only the device knows.
            decode_sizes: Ascending numbers of requests to which steps that only decode are padded;
                past the largest one, and with none, they are not.
            skip_inactive: Leave rows out that stopped on the device; needs the device's flags in
                host memory. Otherwise they stay in and are masked.
            num_slots: Uploads that may be under way.
        """
        self._block_size = block_size
        self._block_table = block_table
        self._row_state = row_state
        self._decode_sizes = decode_sizes
        self._skip_inactive = skip_inactive
        max_reqs = max(max_num_seqs, *decode_sizes, 1)
        max_tokens = max(max_num_batched_tokens, max_reqs)
        # Per request: row, start, decode flag, offset, sample; per token: id, request, offset.
        num_words = 8 * max_reqs + 3 * max_tokens + 64
        self._staging = StagingRing(num_slots=num_slots, num_words=num_words, device=device)
        self._slot_mapping = torch.empty(max_tokens, dtype=torch.int64, device=device)
        self._one_token_each = torch.arange(max_reqs + 1, dtype=torch.int32, device=device)
        self._one_token_each_host = np.arange(max_reqs + 1, dtype=np.int32)
        self._index = torch.arange(max_reqs, dtype=torch.int64, device=device)
        self._compute_slots = _select_op(device)

    def prepare(self, work: StepWork) -> tuple[StepInputs | None, BoolArray | None]:
        """Put a step's inputs in place, without waiting for the device.

        Returns:
            The inputs, None if there is nothing to compute; and which of work.rows are in them,
            None for all.
        """
        kept = self._kept(work)
        batch = _host_batch(work, kept)
        if not batch.rows.size:
            return None, kept
        if batch.is_decode.all():
            return self._prepare_decode(batch), kept
        return self._prepare_mixed(batch), kept

    def padding(self, *, num_reqs: int, tokens_per_req: int) -> StepInputs:
        """Inputs that read the null block and write nowhere: for warm-up and measurement."""
        num_tokens = num_reqs * tokens_per_req
        query_start_loc = np.arange(0, num_tokens + 1, tokens_per_req, dtype=np.int32)
        rows = np.full(num_reqs, self._row_state.padding_row, np.int32)
        (device_rows, offsets) = self._staging.upload(rows, query_start_loc)
        state = self._row_state.gather(device_rows)
        zeros = torch.zeros(num_tokens, dtype=torch.int64, device=device_rows.device)
        return self._finish(
            rows=device_rows,
            state=state,
            start=state.column(LENGTH),
            num_new_tokens=offsets.diff(),
            query_start_loc=offsets,
            query_start_loc_host=query_start_loc,
            seq_lens_host=np.zeros(num_reqs, np.int32),
            positions=zeros,
            token_ids=zeros,
            logits_rows=(offsets[1:] - 1).long(),
            sample_reqs=None,
        )

    def _kept(self, work: StepWork) -> BoolArray | None:
        if not self._skip_inactive:
            return None
        kept = self._row_state.are_active(work.rows)
        return None if kept.all() else kept

    def _prepare_decode(self, batch: _HostBatch) -> StepInputs:
        num_reqs = batch.rows.size
        padded = next((size for size in self._decode_sizes if size >= num_reqs), num_reqs)
        rows, seq_lens_host = batch.rows, (batch.start_positions + 1).astype(np.int32)
        if padded > num_reqs:
            rows = np.full(padded, self._row_state.padding_row, np.int32)
            rows[:num_reqs] = batch.rows
            seq_lens_host = np.concatenate([seq_lens_host, np.zeros(padded - num_reqs, np.int32)])
        (device_rows,) = self._staging.upload(rows)
        state = self._row_state.gather(device_rows)
        start = state.column(LENGTH)
        return self._finish(
            rows=device_rows,
            state=state,
            start=start,
            num_new_tokens=1,
            query_start_loc=self._one_token_each[: padded + 1],
            query_start_loc_host=self._one_token_each_host[: padded + 1],
            seq_lens_host=seq_lens_host,
            positions=start.long(),
            token_ids=state.column(LAST_TOKEN).long(),
            logits_rows=self._index[:padded],
            sample_reqs=None,
        )

    def _prepare_mixed(self, batch: _HostBatch) -> StepInputs:
        num_new = batch.num_new_tokens
        query_start_loc = np.zeros(num_new.size + 1, np.int32)
        np.cumsum(num_new, out=query_start_loc[1:])
        req_of_token = np.repeat(np.arange(num_new.size, dtype=np.int32), num_new)
        num_tokens = req_of_token.size
        offset_of_token = np.arange(num_tokens, dtype=np.int32) - query_start_loc[req_of_token]
        # -1: the token is the device's last one of that row.
        known = np.full(num_tokens, -1, np.int32)
        known[~batch.is_decode[req_of_token]] = batch.chunk_token_ids
        sample_reqs = np.flatnonzero(batch.samples)
        source = sample_reqs if batch.logits_source is None else batch.logits_source[sample_reqs]
        (
            rows,
            host_start,
            is_decode,
            new_tokens,
            device_query_start_loc,
            req,
            offset,
            device_known,
            device_sample_reqs,
            logits_rows,
        ) = self._staging.upload(
            batch.rows,
            batch.start_positions,
            batch.is_decode,
            num_new,
            query_start_loc,
            req_of_token,
            offset_of_token,
            known,
            sample_reqs,
            query_start_loc[source + 1] - 1,
        )
        state = self._row_state.gather(rows)
        start = torch.where(is_decode > 0, state.column(LENGTH), host_start)
        last_tokens = state.column(LAST_TOKEN).index_select(0, req)
        return self._finish(
            rows=rows,
            state=state,
            start=start,
            num_new_tokens=new_tokens,
            query_start_loc=device_query_start_loc,
            query_start_loc_host=query_start_loc,
            seq_lens_host=(batch.start_positions + num_new).astype(np.int32),
            positions=(start.index_select(0, req) + offset).long(),
            token_ids=torch.where(device_known < 0, last_tokens, device_known).long(),
            logits_rows=logits_rows.long(),
            sample_reqs=device_sample_reqs,
        )

    def _finish(
        self,
        *,
        rows: torch.Tensor,
        state: GatheredRows,
        start: torch.Tensor,
        num_new_tokens: torch.Tensor | int,
        query_start_loc: torch.Tensor,
        query_start_loc_host: Int32Array,
        seq_lens_host: Int32Array,
        positions: torch.Tensor,
        token_ids: torch.Tensor,
        logits_rows: torch.Tensor,
        sample_reqs: torch.Tensor | None,
    ) -> StepInputs:
        is_live = state.column(ACTIVE) > 0
        lengths = start + num_new_tokens
        num_tokens = token_ids.numel()
        table = self._block_table.device_table
        max_seq_len = int(seq_lens_host.max())
        num_columns = max(1, -(-max_seq_len // self._block_size))
        slot_mapping = self._compute_slots(
            table,
            torch.where(is_live, rows, -1),
            query_start_loc,
            positions,
            block_size=self._block_size,
            out=self._slot_mapping[:num_tokens],
        )
        attention = AttentionInputs(
            query_start_loc=query_start_loc,
            seq_lens=torch.where(is_live, lengths, 0),
            block_tables=table[:, :num_columns].index_select(0, rows),
            slot_mapping=slot_mapping,
            positions=positions,
            max_query_len=int(np.diff(query_start_loc_host).max()),
            max_seq_len=max_seq_len,
            num_tokens=num_tokens,
            query_start_loc_host=query_start_loc_host,
            seq_lens_host=seq_lens_host,
        )
        return StepInputs(
            rows=rows,
            state=state,
            is_live=is_live,
            lengths=lengths,
            token_ids=token_ids,
            attention=attention,
            logits_rows=logits_rows,
            sample_reqs=sample_reqs,
        )


def _host_batch(work: StepWork, kept: BoolArray | None) -> _HostBatch:
    logits_source = None
    if work.forks.shares_logits.any():
        # A child computes nothing: it starts where its parent's chunk ends, in this same step.
        child_reqs = np.searchsorted(work.rows, work.forks.child_rows[work.forks.shares_logits])
        parent_reqs = np.searchsorted(work.rows, work.forks.parent_rows[work.forks.shares_logits])
        logits_source = np.arange(work.rows.size)
        logits_source[child_reqs] = parent_reqs
    if kept is None:
        return _HostBatch(
            rows=work.rows,
            num_new_tokens=work.num_new_tokens,
            start_positions=work.start_positions,
            is_decode=work.is_decode,
            samples=work.samples,
            chunk_token_ids=work.chunk_token_ids,
            logits_source=logits_source,
        )
    if logits_source is not None:
        new_index = np.cumsum(kept) - 1
        logits_source = new_index[logits_source[kept]]
    return _HostBatch(
        rows=work.rows[kept],
        num_new_tokens=work.num_new_tokens[kept],
        start_positions=work.start_positions[kept],
        is_decode=work.is_decode[kept],
        samples=work.samples[kept],
        # Only decoding rows stop, so no chunk is ever left out.
        chunk_token_ids=work.chunk_token_ids,
        logits_source=logits_source,
    )


def _select_op(device: torch.device) -> Callable[..., torch.Tensor]:
    # Imported where it is chosen: a worker without a GPU needs no triton.
    if device.type == "cuda":
        from kernels.slot_mapping import slot_mapping

        return slot_mapping
    from kernels.reference import slot_mapping_ref

    return slot_mapping_ref
