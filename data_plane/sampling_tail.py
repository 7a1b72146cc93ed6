"""The end of a step on the device: from logits to tokens, stops, row state and packed results.

Owns: the choice between the plain tail, for greedy rows and rows with a temperature, and the full
one for everything else. The host makes it once per step from what it knows of the rows
(`needs_full_tail`); for rows that need no filter both give the same tokens. Does not know where
logits come from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from data_plane import row_state as rs
from data_plane.device_step import REASON_SHIFT
from data_plane.sampler import NO_TOKEN, PURPOSE_TOKEN, SamplingBatch, sample
from data_plane.stop_check import finish_reasons, mask_stop_ids

if TYPE_CHECKING:
    from data_plane.row_state import RowState
    from data_plane.step_work import Int32Array, Int64Array


class SamplingTail(Protocol):
    """Draws tokens, checks stops and writes the state of rows back."""

    def __call__(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        row_state: RowState,
        results: torch.Tensor,
        *,
        is_full: bool,
    ) -> None:
        """Ends a step for its samples.

        Args:
            logits: [n, vocab_size]; may be changed.
            rows: [n] int32, the padding row where a sample is padding.
            row_state: Read for parameters; last token and active flag of live rows are written.
                Its lengths are those after the step.
            results: [n, 2] int32, written: token id; tokens produced and, above 8 bits, finish
                reason.
            is_full: Whether a row has a filter, or may be below its min_tokens.
        """
        ...


def needs_full_tail(row_state: RowState, rows: Int32Array, sampled_index: Int64Array) -> bool:
    """Whether a sampled row has a filter, or may be below its min_tokens."""
    return bool(
        row_state.has_filter[rows].any() or (sampled_index < row_state.min_total[rows]).any()
    )


def new_sampling_tail(
    *, max_num_samples: int, vocab_size: int, device: torch.device
) -> SamplingTail:
    """Gives the tail for a device: on a GPU one that waits for nothing and allocates nothing."""
    if device.type == "cuda":
        return _KernelTail(max_num_samples, vocab_size, device)
    return _torch_tail


class _KernelTail:
    def __init__(self, max_num_samples: int, vocab_size: int, device: torch.device) -> None:
        # Imported where it is chosen: a worker without a GPU needs no triton.
        from kernels.sample_rows import new_sample_scratch, sample_rows

        self._sample_rows = sample_rows
        self._scratch = new_sample_scratch(
            max_num_samples=max_num_samples, vocab_size=vocab_size, device=device
        )

    def __call__(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        row_state: RowState,
        results: torch.Tensor,
        *,
        is_full: bool,
    ) -> None:
        self._sample_rows(
            logits,
            rows,
            row_state.words,
            row_state.stop_ids,
            layout=rs.LAYOUT,
            purpose=PURPOSE_TOKEN,
            is_filtered=is_full,
            scratch=self._scratch,
            results=results,
        )


def _torch_tail(
    logits: torch.Tensor,
    rows: torch.Tensor,
    row_state: RowState,
    results: torch.Tensor,
    *,
    is_full: bool,
) -> None:
    state = row_state.gather(rows)
    stop_ids = row_state.stop_ids.index_select(0, rows)
    sampled_index = state.column(rs.LENGTH)
    if is_full:
        mask_stop_ids(logits, stop_ids, sampled_index, state.column(rs.MIN_TOTAL))
    token_ids = sample(
        logits,
        SamplingBatch(
            temperature=state.float_column(rs.TEMPERATURE),
            top_k=state.column(rs.TOP_K),
            top_p=state.float_column(rs.TOP_P),
            min_p=state.float_column(rs.MIN_P),
            seed=state.seeds,
            sequence_index=state.column(rs.SEQUENCE_INDEX),
            position=sampled_index,
        ),
    ).int()
    is_live = state.column(rs.ACTIVE) > 0
    reasons = finish_reasons(
        token_ids, stop_ids, sampled_index, state.column(rs.MAX_TOTAL)
    ).masked_fill_(~is_live, 0)
    old = state.words[:, : rs.NUM_STEP_WORDS]
    new = torch.stack((token_ids, sampled_index, reasons == 0), dim=1)
    row_state.write_back(rows, torch.where(is_live.unsqueeze(1), new, old))
    produced = is_live & (token_ids != NO_TOKEN)
    torch.stack((token_ids, (reasons << REASON_SHIFT) + produced), dim=1, out=results)
