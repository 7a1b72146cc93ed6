"""Executes steps: deltas, inputs, forward pass, sampling, stop checks, results.

Owns: the KV cache, the block table, the rows' device state, and the order of what happens to them.
Decides nothing: which rows run, which blocks hold what and who starts come with the work. Does not
know messages, versions' rules or how a model computes.

`launch` orders a step on the device and returns; on a GPU it waits for nothing that the device
has yet to do. `PendingStep.wait` is the only wait. On the CPU the step has run when `launch`
returns, and rows that stopped are left out instead of being masked.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from data_plane import row_state as rs
from data_plane.attention.base import AttentionSpec, select_backend
from data_plane.block_table import BlockTable
from data_plane.device_step import REASON_SHIFT, DeviceStep, ResultSlot, as_step_error
from data_plane.input_batch import InputBatch, StepInputs
from data_plane.kv_cache import allocate_kv_caches, plan_kv_cache
from data_plane.memory_profile import measure_activation_bytes
from data_plane.row_state import RowState
from data_plane.sampler import NO_TOKEN, SamplingBatch, sample
from data_plane.staging import StagingRing
from data_plane.stop_check import finish_reasons, mask_stop_ids

if TYPE_CHECKING:
    from data_plane.models.loader import LoadedModel
    from data_plane.step_work import Int64Array, StepWork


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """Limits and sizes of one worker. Immutable.

    Attributes:
        max_num_seqs: Rows.
        max_num_batched_tokens: Most tokens a step computes; >= max_num_seqs.
        max_model_len: Longest sequence of a row; None: what the model was trained for.
        block_size: Tokens per KV block; a power of two.
        num_blocks: Blocks, the null block included; None: as many as the memory budget holds.
        kv_cache_memory: Budget in bytes; None: measured.
        gpu_memory_utilization: Share of a GPU's memory that may be in use, in (0, 1].
        attention_backend: A name, or "auto".
        decode_sizes: Numbers of rows to which decode steps are padded.
        num_slots: Steps that may be under way: lookahead + 2.
        skip_inactive: None: on the CPU.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    attention_backend: str = "auto"
    decode_sizes: tuple[int, ...] = ()
    num_slots: int = 4
    skip_inactive: bool | None = None

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1 or self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens must be at least max_num_seqs, which is at least 1; got "
                f"{self.max_num_batched_tokens} and {self.max_num_seqs}"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}"
            )


class ModelRunner:
    """One model on one device. `launch` and `reset` are called from one thread.

    Attributes:
        kv_cache: Shape of the KV cache.
        backend: The attention backend in use.
        block_table: Blocks of each row.
        row_state: Device state of each row.
        device: Where everything lives.
    """

    def __init__(self, model: LoadedModel, config: RunnerConfig) -> None:
        """Allocate everything that steps need.

        Raises:
            BackendError: no attention backend can serve the model.
            KVCacheError: the memory does not hold one longest sequence.
            ValueError: max_model_len is above what the model was trained for.
        """
        shape = model.config
        device, dtype = model.model.device, model.model.dtype
        max_model_len = config.max_model_len or shape.max_model_len
        if max_model_len > shape.max_model_len:
            raise ValueError(
                f"max_model_len is {max_model_len}, but the model was trained for "
                f"{shape.max_model_len} positions"
            )
        self.device = device
        self.eos_token_ids = model.eos_token_ids
        self.max_model_len = max_model_len
        self._config = config
        self._model = model.model
        self._is_cuda = device.type == "cuda"
        self.backend = select_backend(
            AttentionSpec(
                num_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
                head_size=shape.head_size,
                scale=shape.scale,
                sliding_window=shape.sliding_window,
                dtype=dtype,
                block_size=config.block_size,
                device=device,
            ),
            config.attention_backend,
        )
        activation_bytes = 0
        if config.num_blocks is None and config.kv_cache_memory is None and self._is_cuda:
            activation_bytes = measure_activation_bytes(
                model.model,
                self.backend,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=max_model_len,
            )
        self.kv_cache = plan_kv_cache(
            block_size=config.block_size,
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_size=shape.head_size,
            dtype=dtype,
            max_model_len=max_model_len,
            device=device,
            num_blocks=config.num_blocks,
            kv_cache_memory=config.kv_cache_memory,
            gpu_memory_utilization=config.gpu_memory_utilization,
            activation_bytes=activation_bytes,
        )
        self._kv_caches = allocate_kv_caches(self.kv_cache, self.backend, device)
        self.block_table = BlockTable(
            max_num_seqs=config.max_num_seqs,
            max_blocks_per_seq=-(-max_model_len // config.block_size),
            num_blocks=self.kv_cache.num_blocks,
            device=device,
            num_slots=config.num_slots,
        )
        self.row_state = RowState(
            max_num_seqs=config.max_num_seqs, device=device, num_slots=config.num_slots
        )
        skip_inactive = config.skip_inactive
        self._input_batch = InputBatch(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            block_size=config.block_size,
            device=device,
            block_table=self.block_table,
            row_state=self.row_state,
            decode_sizes=config.decode_sizes,
            skip_inactive=not self._is_cuda if skip_inactive is None else skip_inactive,
            num_slots=config.num_slots,
        )
        self._copy_staging = StagingRing(num_slots=config.num_slots, num_words=256, device=device)
        self._results: deque[ResultSlot] = deque()
        self._generations: Int64Array = np.zeros(self.kv_cache.num_blocks, np.int64)

    @property
    def num_blocks(self) -> int:
        """Blocks allocated, the null block included."""
        return self.kv_cache.num_blocks

    @property
    def generations(self) -> Int64Array:
        """[num_blocks] int64: version of the plan that last handed the block out, 0 for never."""
        return self._generations

    @torch.inference_mode()
    def launch(self, work: StepWork) -> DeviceStep:
        """Order a step on the device.

        Raises:
            StepError: it could not be ordered. State is undefined until the next reset.
        """
        started_s = time.perf_counter()
        slot = self._results.popleft() if self._results else self._new_result_slot()
        try:
            if slot.started is not None:
                slot.started.record()
            self._apply_deltas(work)
            inputs, kept = self._input_batch.prepare(work)
            if inputs is not None:
                self._execute_into(slot, inputs, work)
            if slot.ended is not None:
                slot.ended.record()
        except RuntimeError as error:
            raise as_step_error(error) from error
        return DeviceStep(
            sampled_rows=work.rows[work.samples],
            kept=None if kept is None else kept[work.samples],
            slot=slot,
            pool=self._results,
            host_time_us=round((time.perf_counter() - started_s) * 1e6),
        )

    @torch.inference_mode()
    def reset(self) -> None:
        """Drop all rows; KV bytes and generations stay. No step is under way."""
        self.block_table.clear()
        self.row_state.stop_all()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run every code path once, so that the first request does not pay for it.

        Padding only: nothing is written to the cache or to a row.

        Raises:
            StepError: the device cannot run a step.
        """
        try:
            tokens = min(self._config.max_num_batched_tokens, 2 * self._config.block_size)
            for num_reqs, tokens_per_req in ((1, tokens), (1, 1), (self._config.max_num_seqs, 1)):
                for words in self._warm_up_words():
                    inputs = self._input_batch.padding(
                        num_reqs=num_reqs, tokens_per_req=tokens_per_req
                    )
                    inputs.state.words.copy_(words)
                    self._execute(inputs, stop_width=1, has_min_tokens=True)
            if self._is_cuda:
                torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            raise as_step_error(error) from error

    def _warm_up_words(self) -> list[torch.Tensor]:
        greedy = torch.zeros(rs.NUM_WORDS, dtype=torch.int32)
        drawn = greedy.clone()
        drawn[rs.TOP_K] = 2
        drawn.view(torch.float32)[[rs.TEMPERATURE, rs.TOP_P]] = 0.9
        return [greedy, drawn]

    def _apply_deltas(self, work: StepWork) -> None:
        table = self.block_table
        self._generations[work.handed_out] = work.version
        for row in work.removed_rows.tolist():
            table.clear_row(row)
        for new_row in work.added:
            table.add_row(new_row.row, new_row.block_ids)
        self.row_state.add(work.added)
        for parent, child in zip(
            work.forks.parent_rows.tolist(), work.forks.child_rows.tolist(), strict=True
        ):
            table.copy_row(parent, child)
        self.row_state.fork(work.forks)
        copies = work.copies
        if copies.src.size:
            for row, index, block_id in zip(
                copies.rows.tolist(), copies.indices.tolist(), copies.dst.tolist(), strict=True
            ):
                table.set_entry(row, index, block_id)
            src, dst = self._copy_staging.upload(copies.src, copies.dst)
            self.backend.copy_blocks(self._kv_caches, src.long(), dst.long())
        first = 0
        for row, count in zip(
            work.appended_rows.tolist(), work.appended_counts.tolist(), strict=True
        ):
            table.append_row(row, work.appended_block_ids[first : first + count])
            first += count
        table.commit()

    def _execute_into(self, slot: ResultSlot, inputs: StepInputs, work: StepWork) -> None:
        rows = work.rows[work.samples]
        sampled_index = (work.start_positions + work.num_new_tokens)[work.samples]
        results = self._execute(
            inputs,
            stop_width=int(self.row_state.num_ids[rows].max(initial=0)),
            has_min_tokens=bool((sampled_index < self.row_state.min_total[rows]).any()),
        )
        slot.tensor[: results.shape[0]].copy_(results, non_blocking=True)

    def _execute(
        self, inputs: StepInputs, *, stop_width: int, has_min_tokens: bool
    ) -> torch.Tensor:
        """Run a step on the device. Reads and writes device memory only.

        Args:
            inputs: Of the step.
            stop_width: Entries of stop_ids that any sampled row uses.
            has_min_tokens: Whether any sampled row may be below its min_tokens.

        Returns:
            [num_samples, 2] int32: token id; tokens produced and, above 8 bits, finish reason.
        """
        logits = self._model.forward(
            inputs.token_ids,
            inputs.attention.positions,
            self._kv_caches,
            self.backend,
            self.backend.build_metadata(inputs.attention),
            inputs.logits_rows,
        )
        rows, state, is_live = inputs.rows, inputs.state, inputs.is_live
        # The one place that says what keys a draw's position: the index that the drawn token will
        # have in the whole sequence, prompt included. It is the same in any batch, chunking,
        # worker and replay.
        sampled_index = inputs.lengths
        sample_reqs = inputs.sample_reqs
        if sample_reqs is not None:
            rows, state = rows.index_select(0, sample_reqs), state.select(sample_reqs)
            is_live = is_live.index_select(0, sample_reqs)
            sampled_index = sampled_index.index_select(0, sample_reqs)
        stop_ids = self.row_state.stop_ids[:, :stop_width].index_select(0, rows)
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
        self.row_state.write_back(inputs.rows, step_words)

    def _new_result_slot(self) -> ResultSlot:
        # As many as steps are under way at once; the window of the control stream bounds them.
        num_rows = max(self._config.max_num_seqs, *self._config.decode_sizes, 1)
        return ResultSlot(num_rows, is_cuda=self._is_cuda)
