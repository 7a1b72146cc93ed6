"""Steps whose batch lives on the device: the host sends row numbers, the device knows the rest.

Owns: the buffers of a step's inputs and results at fixed addresses, the order of its parts, the
sizes it is padded to, and its graphs. Does not know: deltas, the model's arithmetic, attention's
plan.

A step has two parts. The body takes rows and known tokens, reads positions, slots, lengths and last
tokens from the rows' state, and leaves the hidden states of the sampled tokens; its sizes are
(tokens, requests). The head takes those to tokens, stop checks, row state and packed results; its
size is the number of samples, and there is one for each tail. So the sizes do not multiply, and the
same two parts run captured, or uncaptured for debugging or because a step is too long: with the
same padding they give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from data_plane.attention.base import AttentionInputs
from data_plane.cuda_graphs import GraphSet, decode_buckets, token_buckets
from data_plane.row_state import LAYOUT
from data_plane.sampling_tail import needs_full_tail, new_sampling_tail
from data_plane.staging import StagingRing

if TYPE_CHECKING:
    from collections.abc import Callable

    from data_plane.attention.base import AttentionBackend
    from data_plane.block_table import BlockTable
    from data_plane.device_step import ResultSlot
    from data_plane.models.llama import LlamaModel
    from data_plane.row_state import RowState
    from data_plane.step_work import Int32Array, StepWork

# Requests of a mixed step, and those of them that have several tokens, are padded to this many, or
# to all rows.
_FEW_REQS = 8
# Uncaptured steps are padded too, so that no size is the first of its kind for a compiler.
_TOKEN_STEP = 16


@dataclass(frozen=True, slots=True)
class Body:
    """Sizes of a body: padded tokens and requests; a decode has one token per request.

    `num_prefills` is no less than the number of requests that have several tokens: room for their
    tiles of queries. Attention would drop what does not fit.
    """

    num_tokens: int
    num_reqs: int
    num_prefills: int

    @property
    def is_decode(self) -> bool:
        """Whether the device knows all of its inputs but the rows."""
        return self.num_prefills == 0


@dataclass(frozen=True, slots=True)
class Head:
    """Sizes of a head: padded samples, and which tail."""

    num_samples: int
    is_full: bool


def plans_on_host(backend: AttentionBackend) -> bool:
    """Whether a backend needs lengths that only the device knows."""
    return backend.name == "torch"


class ResidentSteps:
    """Runs one step after the other; `execute` is called from one thread and never waits for it.

    Args:
        model: Computes hidden states and logits.
        backend: Plans on the device.
        block_table: Read through row indices.
        row_state: Read and advanced.
        max_num_seqs: Most rows of a step.
        max_num_batched_tokens: Most tokens of a step.
        max_model_len: Longest sequence.
        num_slots: Uploads that may be under way.
        captures: Whether `warm_up` captures graphs; otherwise every step is ordered kernel by
            kernel.
    """

    def __init__(
        self,
        model: LlamaModel,
        backend: AttentionBackend,
        *,
        block_table: BlockTable,
        row_state: RowState,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        num_slots: int,
        captures: bool,
    ) -> None:
        device = model.device
        self._model = model
        self._backend = backend
        self._table = block_table.device_table
        self._row_state = row_state
        self._max_model_len = max_model_len
        self._is_cpu = device.type == "cpu"
        self._row_buckets = decode_buckets(max_num_seqs)
        self._token_buckets = token_buckets(max_num_batched_tokens)
        self._req_buckets = tuple(sorted({min(_FEW_REQS, max_num_seqs), max_num_seqs}))
        max_tokens = -(-max_num_batched_tokens // _TOKEN_STEP) * _TOKEN_STEP
        self.max_num_tokens = max_tokens

        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._token_ids = empty(max_tokens, dtype=torch.int64)
        self._positions = empty(max_tokens, dtype=torch.int64)
        self._slot_mapping = empty(max_tokens, dtype=torch.int64)
        self._seq_lens = empty(max_num_seqs, dtype=torch.int32)
        self._sample_hidden = empty(max_num_seqs, model.config.hidden_size, dtype=model.dtype)
        self._results = empty(max_num_seqs, 2, dtype=torch.int32)
        # A decode's starts and tokens are all the device's; its requests have one token each.
        self._unknown = torch.full((max_num_seqs,), -1, dtype=torch.int32, device=device)
        self._one_token_each = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        # Samples lie first, at one address for every size of body.
        self._staging = StagingRing(
            num_slots=num_slots, num_words=5 * max_num_seqs + max_tokens + 64, device=device
        )
        self._decode_rows: Int32Array | None = None
        self._prepare = _select_op(device)
        self._tail = new_sampling_tail(
            max_num_samples=max_num_seqs, vocab_size=model.config.vocab_size, device=device
        )
        self._graphs = GraphSet(device) if captures else None

    @property
    def captures(self) -> bool:
        """Whether steps run as graphs."""
        return self._graphs is not None

    def execute(self, work: StepWork, kv_caches: list[torch.Tensor], slot: ResultSlot) -> None:
        """Order a step's computation, its deltas being applied, and the copy of its results.

        Every row takes part: what stopped is masked on the device.
        """
        if not work.rows.size:
            return
        rows = work.rows[work.samples]
        body = self._upload(work, rows)
        self._run(body, kv_caches)
        if not rows.size:
            return
        sampled_index = (work.start_positions + work.num_new_tokens)[work.samples]
        is_full = needs_full_tail(self._row_state, rows, sampled_index)
        self._run(Head(_bucket(self._row_buckets, rows.size), is_full), kv_caches)
        slot.tensor[: rows.size].copy_(self._results[: rows.size], non_blocking=True)

    def warm_up(self, kv_caches: list[torch.Tensor]) -> None:
        """Run every kind of part once and capture what steps replay."""
        self.run_largest(kv_caches)
        if self._graphs is not None:
            for part in self.captured_parts():
                self.capture(part, kv_caches)

    def run_largest(self, kv_caches: list[torch.Tensor]) -> None:
        """Run parts of every kind over padding: nothing is written to the cache or to a row."""
        for part in self.largest_parts():
            self._pad(part)
            self._run(part, kv_caches)

    def largest_parts(self) -> list[Body | Head]:
        """The parts that need the most memory, for each kind of kernel."""
        rows = self._row_buckets[-1]
        return [
            *(Body(self.max_num_tokens, reqs, reqs) for reqs in self._req_buckets[::-1]),
            Body(rows, rows, 0),
            Head(rows, is_full=True),
            Head(rows, is_full=False),
        ]

    def captured_parts(self) -> list[Body | Head]:
        """What `warm_up` captures, in order of memory, largest first."""
        bodies: list[Body | Head] = [
            Body(tokens, reqs, prefills)
            for tokens in self._token_buckets[::-1]
            for reqs in self._req_buckets[::-1]
            for prefills in self._req_buckets[::-1]
            if prefills <= reqs
        ]
        sizes = self._row_buckets[::-1]
        heads = [Head(size, is_full) for is_full in (True, False) for size in sizes]
        return [*heads, *bodies, *(Body(size, size, 0) for size in sizes)]

    def capture(self, part: Body | Head, kv_caches: list[torch.Tensor]) -> None:
        """Make a graph of a part, run over padding."""
        if self._graphs is None:
            raise RuntimeError("these steps run without graphs")
        self._pad(part)
        self._graphs.capture(part, lambda: self._run_parts(part, kv_caches))

    def drop_graphs(self) -> None:
        """Forget captured graphs: their memory goes back to the allocator."""
        if self._graphs is not None:
            self._graphs = GraphSet(self._results.device)

    def _run(self, part: Body | Head, kv_caches: list[torch.Tensor]) -> None:
        if self._graphs is None or not self._graphs.replay(part):
            self._run_parts(part, kv_caches)

    def _run_parts(self, part: Body | Head, kv_caches: list[torch.Tensor]) -> None:
        if isinstance(part, Body):
            self._run_body(part, kv_caches)
        else:
            self._run_head(part)

    def _upload(self, work: StepWork, sampled_rows: Int32Array) -> Body:
        num_reqs = work.rows.size
        padding = self._row_state.padding_row
        if num_reqs == sampled_rows.size and bool(work.is_decode.all()):
            size = _bucket(self._row_buckets, num_reqs)
            rows = _padded(work.rows, size, padding)
            # Most steps have the rows of the one before.
            if self._decode_rows is None or not np.array_equal(rows, self._decode_rows):
                self._staging.upload(rows)
                self._decode_rows = rows
            return Body(size, size, 0)
        self._decode_rows = None
        size = _bucket(self._req_buckets, num_reqs)
        num_new = work.num_new_tokens
        query_start_loc = np.zeros(size + 1, np.int32)
        np.cumsum(num_new, out=query_start_loc[1 : num_reqs + 1])
        num_tokens = int(query_start_loc[num_reqs])
        query_start_loc[num_reqs + 1 :] = num_tokens
        known = np.full(self._padded_tokens(num_tokens), -1, np.int32)
        known[:num_tokens][np.repeat(~work.is_decode, num_new)] = work.chunk_token_ids
        starts = np.where(work.is_decode, -1, work.start_positions).astype(np.int32)
        max_samples = self._row_buckets[-1]
        last_token = query_start_loc[1 : num_reqs + 1][_logits_source(work)][work.samples] - 1
        self._staging.upload(
            _padded(sampled_rows, max_samples, padding),
            _padded(last_token, max_samples, 0),
            _padded(work.rows, size, padding),
            _padded(starts, size, 0),
            query_start_loc,
            known,
        )
        num_prefills = self._padded_prefills(int((num_new > 1).sum()), known.size)
        return Body(known.size, size, min(num_prefills, size))

    def _pad(self, part: Body | Head) -> None:
        """Make the inputs of a part padding alone: rows that are not active, no tokens."""
        self._decode_rows = None
        max_samples = self._row_buckets[-1]
        arrays = [np.full(max_samples, self._row_state.padding_row, np.int32)]
        if isinstance(part, Body) and not part.is_decode:
            arrays += [
                np.zeros(max_samples, np.int32),
                np.full(part.num_reqs, self._row_state.padding_row, np.int32),
                np.zeros(part.num_reqs, np.int32),
                np.zeros(part.num_reqs + 1, np.int32),
                np.zeros(part.num_tokens, np.int32),
            ]
        self._staging.upload(*arrays)

    def _run_body(self, body: Body, kv_caches: list[torch.Tensor]) -> None:
        num_tokens, num_reqs = body.num_tokens, body.num_reqs
        logits_rows: torch.Tensor | None = None
        if body.is_decode:
            rows = self._staging.device_buffer[:num_reqs]
            starts = known = self._unknown[:num_reqs]
            query_start_loc = self._one_token_each[: num_reqs + 1]
        else:
            max_samples = self._row_buckets[-1]
            _, logits_rows, rows, starts, query_start_loc, known = self._staging.views(
                max_samples, max_samples, num_reqs, num_reqs, num_reqs + 1, num_tokens
            )
        seq_lens = self._seq_lens[:num_reqs]
        slot_mapping, positions = self._slot_mapping[:num_tokens], self._positions[:num_tokens]
        token_ids = self._token_ids[:num_tokens]
        self._prepare(
            self._row_state.words,
            self._table,
            rows,
            starts,
            query_start_loc,
            known,
            layout=LAYOUT,
            block_size=self._backend.spec.block_size,
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            seq_lens=seq_lens,
        )
        attention = AttentionInputs(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_tables=self._table,
            rows=rows,
            slot_mapping=slot_mapping,
            positions=positions,
            max_query_len=1 if body.is_decode else num_tokens,
            max_seq_len=self._max_model_len,
            max_prefill_reqs=body.num_prefills,
            num_tokens=num_tokens,
            query_start_loc_host=self._on_host(query_start_loc),
            seq_lens_host=self._on_host(seq_lens),
        )
        metadata = self._backend.build_metadata(attention)
        hidden = self._model.forward_hidden(
            token_ids,
            positions,
            kv_caches,
            self._backend,
            metadata,
            out=self._sample_hidden[:num_tokens] if body.is_decode else None,
        )
        if logits_rows is not None:
            torch.index_select(hidden, 0, logits_rows, out=self._sample_hidden)

    def _run_head(self, head: Head) -> None:
        size = head.num_samples
        rows = self._staging.device_buffer[:size]
        logits = self._model.compute_logits(self._sample_hidden[:size])
        self._tail(logits, rows, self._row_state, self._results[:size], is_full=head.is_full)

    def _padded_tokens(self, num_tokens: int) -> int:
        if self._token_buckets and num_tokens <= self._token_buckets[-1]:
            return _bucket(self._token_buckets, num_tokens)
        return -(-num_tokens // _TOKEN_STEP) * _TOKEN_STEP

    def _padded_prefills(self, num_prefills: int, num_tokens: int) -> int:
        # At least one: a step that is not a decode may have no request with several tokens.
        if num_tokens in self._token_buckets:
            return _bucket(self._req_buckets, num_prefills)
        return max(1, -(-num_prefills // _FEW_REQS)) * _FEW_REQS

    def _on_host(self, tensor: torch.Tensor) -> Int32Array:
        # A backend that plans with host copies can serve here on the CPU only, where they are the
        # tensors themselves; on a GPU it would find nothing.
        return tensor.numpy() if self._is_cpu else np.empty(0, np.int32)


def _bucket(sizes: tuple[int, ...], size: int) -> int:
    return sizes[int(np.searchsorted(sizes, size))]


def _padded(values: Int32Array, size: int, padding: int) -> Int32Array:
    padded = np.full(size, padding, np.int32)
    padded[: values.size] = values
    return padded


def _logits_source(work: StepWork) -> np.ndarray:
    """For each request the one whose last token's logits it samples from: itself but for forks."""
    source = np.arange(work.rows.size)
    shares = work.forks.shares_logits
    if shares.any():
        # A child computes nothing: it starts where its parent's chunk ends, in this same step.
        child_reqs = np.searchsorted(work.rows, work.forks.child_rows[shares])
        source[child_reqs] = np.searchsorted(work.rows, work.forks.parent_rows[shares])
    return source


def _select_op(device: torch.device) -> Callable[..., None]:
    # Imported where it is chosen: a worker without a GPU needs no triton.
    if device.type == "cuda":
        from kernels.prepare_step import prepare_step

        return prepare_step
    from kernels.step_reference import prepare_step_ref

    return prepare_step_ref
