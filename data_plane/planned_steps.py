"""Steps whose batch is planned on the host: what a CPU worker runs, and any backend that asks.

Owns: the order of a step's parts. Rows that stopped are left out where the host knows them and
masked where it does not; shapes are as large as the step. `resident_steps` is the other way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from data_plane import row_state as rs
from data_plane.device_step import REASON_SHIFT
from data_plane.sampler import NO_TOKEN, SamplingBatch, sample
from data_plane.stop_check import finish_reasons, mask_stop_ids

if TYPE_CHECKING:
    from data_plane.attention.base import AttentionBackend
    from data_plane.device_step import ResultSlot
    from data_plane.input_batch import InputBatch, StepInputs
    from data_plane.models.llama import LlamaModel
    from data_plane.row_state import RowState
    from data_plane.step_work import BoolArray, StepWork


class PlannedSteps:
    """Runs one step after the other; `execute` is called from one thread."""

    def __init__(
        self,
        model: LlamaModel,
        backend: AttentionBackend,
        *,
        row_state: RowState,
        input_batch: InputBatch,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self._model = model
        self._backend = backend
        self._row_state = row_state
        self._input_batch = input_batch
        self._max_num_seqs = max_num_seqs
        self._warm_up_tokens = min(max_num_batched_tokens, 2 * backend.spec.block_size)

    def execute(
        self, work: StepWork, kv_caches: list[torch.Tensor], slot: ResultSlot
    ) -> BoolArray | None:
        """Order a step's computation, its deltas being applied, and the copy of its results.

        Returns:
            Which of work.rows took part; None for all.
        """
        inputs, kept = self._input_batch.prepare(work)
        if inputs is None:
            return kept
        rows = work.rows[work.samples]
        sampled_index = (work.start_positions + work.num_new_tokens)[work.samples]
        results = self._execute(
            inputs,
            kv_caches,
            stop_width=int(self._row_state.num_ids[rows].max(initial=0)),
            has_min_tokens=bool((sampled_index < self._row_state.min_total[rows]).any()),
        )
        slot.tensor[: results.shape[0]].copy_(results, non_blocking=True)
        return kept

    def warm_up(self, kv_caches: list[torch.Tensor]) -> None:
        """Run every code path once over padding: nothing is written to the cache or to a row."""
        for num_reqs, tokens_per_req in (
            (1, self._warm_up_tokens),
            (1, 1),
            (self._max_num_seqs, 1),
        ):
            for words in _warm_up_words():
                inputs = self._input_batch.padding(num_reqs=num_reqs, tokens_per_req=tokens_per_req)
                inputs.state.words.copy_(words)
                self._execute(inputs, kv_caches, stop_width=1, has_min_tokens=True)

    def _execute(
        self,
        inputs: StepInputs,
        kv_caches: list[torch.Tensor],
        *,
        stop_width: int,
        has_min_tokens: bool,
    ) -> torch.Tensor:
        """Run a step on the device. Reads and writes device memory only.

        Args:
            inputs: Of the step.
            kv_caches: One tensor per layer.
            stop_width: Entries of stop_ids that any sampled row uses.
            has_min_tokens: Whether any sampled row may be below its min_tokens.

        Returns:
            [num_samples, 2] int32: token id; tokens produced and, above 8 bits, finish reason.
        """
        logits = self._model.forward(
            inputs.token_ids,
            inputs.attention.positions,
            kv_caches,
            self._backend,
            self._backend.build_metadata(inputs.attention),
            inputs.logits_rows,
        )
        rows, state, is_live = inputs.rows, inputs.state, inputs.is_live
        # What keys a draw's position: the index that the drawn token will have in the whole
        # sequence, prompt included. It is the same in any batch, chunking, worker and replay.
        sampled_index = inputs.lengths
        sample_reqs = inputs.sample_reqs
        if sample_reqs is not None:
            rows, state = rows.index_select(0, sample_reqs), state.select(sample_reqs)
            is_live = is_live.index_select(0, sample_reqs)
            sampled_index = sampled_index.index_select(0, sample_reqs)
        stop_ids = self._row_state.stop_ids[:, :stop_width].index_select(0, rows)
        if has_min_tokens:
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
        reasons = finish_reasons(
            token_ids, stop_ids, sampled_index, state.column(rs.MAX_TOTAL)
        ).masked_fill_(~is_live, 0)
        self._write_back(inputs, token_ids, is_going_on=reasons == 0)
        produced = is_live & (token_ids != NO_TOKEN)
        return torch.stack((token_ids, (reasons << REASON_SHIFT) + produced), dim=1)

    def _write_back(
        self, inputs: StepInputs, token_ids: torch.Tensor, *, is_going_on: torch.Tensor
    ) -> None:
        old = inputs.state.words[:, : rs.NUM_STEP_WORDS]
        if inputs.sample_reqs is None:
            new = torch.stack((token_ids, inputs.lengths, is_going_on), dim=1)
        else:
            sample_reqs = inputs.sample_reqs.long()
            new = old.clone()
            new[:, rs.LENGTH] = inputs.lengths
            new[:, rs.LAST_TOKEN].index_copy_(0, sample_reqs, token_ids)
            new[:, rs.ACTIVE].index_copy_(0, sample_reqs, is_going_on.int())
        step_words = torch.where(inputs.is_live.unsqueeze(1), new, old)
        self._row_state.write_back(inputs.rows, step_words)


def _warm_up_words() -> list[torch.Tensor]:
    greedy = torch.zeros(rs.NUM_WORDS, dtype=torch.int32)
    drawn = greedy.clone()
    drawn[rs.TOP_K] = 2
    drawn.view(torch.float32)[[rs.TEMPERATURE, rs.TOP_P]] = 0.9
    return [greedy, drawn]
