"""The end of a step on the device: from logits to tokens, stops, row state and packed results.

Owns: the two tails. The plain one serves greedy rows and rows with a temperature; the full one
everything else. The host picks one per step from what it knows of the rows (`needs_full_tail`); for
rows that need no filter both give the same tokens. Does not know where logits come from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from data_plane import row_state as rs
from data_plane.device_step import REASON_SHIFT
from data_plane.sampler import NO_TOKEN, SamplingBatch, gumbel_noise, sample
from data_plane.stop_check import finish_reasons, mask_stop_ids

if TYPE_CHECKING:
    from data_plane.row_state import RowState
    from data_plane.step_work import Int32Array, Int64Array


def needs_full_tail(row_state: RowState, rows: Int32Array, sampled_index: Int64Array) -> bool:
    """Whether a sampled row has a filter, or may be below its min_tokens."""
    return bool(
        row_state.has_filter[rows].any() or (sampled_index < row_state.min_total[rows]).any()
    )


def full_tail_is_capturable(device: torch.device) -> bool:
    """Whether `full_tail` runs there without waiting."""
    del device
    return False


def plain_tail(
    logits: torch.Tensor, rows: torch.Tensor, row_state: RowState, results: torch.Tensor
) -> None:
    """Draw by temperature alone; fit for capture.

    Args:
        logits: [n, vocab_size] float32.
        rows: [n] int32, the padding row where a sample is padding.
        row_state: Read for parameters; last token and active flag of live rows are written. Its
            lengths are those after the step.
        results: [n, 2] int32, written: token id; tokens produced and, above 8 bits, finish reason.
    """
    state = row_state.gather(rows)
    highest, likeliest = logits.max(dim=-1)
    temperature = state.float_column(rs.TEMPERATURE)
    batch = _sampling_batch(state)
    scores = (logits - highest[:, None]) / temperature.clamp(min=1e-30)[:, None]
    ids = torch.arange(logits.shape[1], device=logits.device).expand(logits.shape)
    drawn = (scores + gumbel_noise(ids, batch)).argmax(dim=-1)
    tokens = torch.where(temperature > 0, drawn, likeliest)
    tokens = torch.where(torch.isfinite(highest), tokens, NO_TOKEN)
    _finish(tokens.int(), rows, state, row_state, results)


def full_tail(
    logits: torch.Tensor, rows: torch.Tensor, row_state: RowState, results: torch.Tensor
) -> None:
    """Draw with every parameter; arguments as of `plain_tail`. Waits for the device."""
    state = row_state.gather(rows)
    mask_stop_ids(
        logits,
        row_state.stop_ids.index_select(0, rows),
        state.column(rs.LENGTH),
        state.column(rs.MIN_TOTAL),
    )
    _finish(sample(logits, _sampling_batch(state)).int(), rows, state, row_state, results)


def _sampling_batch(state: rs.GatheredRows) -> SamplingBatch:
    return SamplingBatch(
        temperature=state.float_column(rs.TEMPERATURE),
        top_k=state.column(rs.TOP_K),
        top_p=state.float_column(rs.TOP_P),
        min_p=state.float_column(rs.MIN_P),
        seed=state.seeds,
        sequence_index=state.column(rs.SEQUENCE_INDEX),
        position=state.column(rs.LENGTH),
    )


def _finish(
    token_ids: torch.Tensor,
    rows: torch.Tensor,
    state: rs.GatheredRows,
    row_state: RowState,
    results: torch.Tensor,
) -> None:
    is_live = state.column(rs.ACTIVE) > 0
    reasons = finish_reasons(
        token_ids,
        row_state.stop_ids.index_select(0, rows),
        state.column(rs.LENGTH),
        state.column(rs.MAX_TOTAL),
    ).masked_fill_(~is_live, 0)
    old = state.words[:, : rs.NUM_STEP_WORDS]
    new = torch.stack((token_ids, state.column(rs.LENGTH), reasons == 0), dim=1)
    row_state.write_back(rows, torch.where(is_live.unsqueeze(1), new, old))
    produced = is_live & (token_ids != NO_TOKEN)
    torch.stack((token_ids, (reasons << REASON_SHIFT) + produced), dim=1, out=results)
