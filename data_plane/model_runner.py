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

from data_plane.attention.base import select_backend
from data_plane.block_table import BlockTable
from data_plane.device_step import DeviceStep, ResultSlot, as_step_error
from data_plane.input_batch import InputBatch
from data_plane.kv_cache import allocate_kv_caches, plan_kv_cache
from data_plane.memory_profile import measure_activation_bytes, measure_resident_bytes
from data_plane.planned_steps import PlannedSteps
from data_plane.resident_steps import ResidentSteps, plans_on_host
from data_plane.row_state import RowState
from data_plane.staging import StagingRing

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
        enforce_eager: Order every step kernel by kernel instead of replaying graphs.
        resident: Whether the batch lives on the device; None: on a GPU, if the backend can.
        decode_sizes: Numbers of rows to which decode steps planned on the host are padded.
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
    enforce_eager: bool = False
    resident: bool | None = None
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
            self._model.attention_spec(config.block_size), config.attention_backend
        )
        is_resident = config.resident
        if is_resident is None:
            is_resident = self._is_cuda and not plans_on_host(self.backend)
        activation_bytes = 0
        if config.num_blocks is None and config.kv_cache_memory is None and self._is_cuda:
            activation_bytes = self._measure_bytes(is_resident=is_resident)
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
        self.row_state, self.block_table = self._new_state(self.kv_cache.num_blocks)
        self._steps: PlannedSteps | ResidentSteps
        if is_resident:
            self._steps = self._new_resident_steps(self.row_state, self.block_table)
        else:
            self._steps = self._new_planned_steps()
        self._copy_staging = StagingRing(num_slots=config.num_slots, num_words=256, device=device)
        self._results: deque[ResultSlot] = deque(
            self._new_result_slot() for _ in range(config.num_slots)
        )
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
            kept = self._steps.execute(work, self._kv_caches, slot)
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
            self._steps.warm_up(self._kv_caches)
            if self._is_cuda:
                torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            raise as_step_error(error) from error

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

    def _new_state(self, num_blocks: int) -> tuple[RowState, BlockTable]:
        config = self._config
        table = BlockTable(
            max_num_seqs=config.max_num_seqs,
            max_blocks_per_seq=-(-self.max_model_len // config.block_size),
            num_blocks=num_blocks,
            device=self.device,
            num_slots=config.num_slots,
        )
        state = RowState(
            max_num_seqs=config.max_num_seqs, device=self.device, num_slots=config.num_slots
        )
        return state, table

    def _new_resident_steps(self, row_state: RowState, block_table: BlockTable) -> ResidentSteps:
        config = self._config
        return ResidentSteps(
            self._model,
            self.backend,
            block_table=block_table,
            row_state=row_state,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            num_slots=config.num_slots,
            captures=self._is_cuda and not config.enforce_eager,
        )

    def _new_planned_steps(self) -> PlannedSteps:
        config = self._config
        skip_inactive = config.skip_inactive
        input_batch = InputBatch(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            block_size=config.block_size,
            device=self.device,
            block_table=self.block_table,
            row_state=self.row_state,
            decode_sizes=config.decode_sizes,
            skip_inactive=not self._is_cuda if skip_inactive is None else skip_inactive,
            num_slots=config.num_slots,
        )
        return PlannedSteps(
            self._model,
            self.backend,
            row_state=self.row_state,
            input_batch=input_batch,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )

    def _measure_bytes(self, *, is_resident: bool) -> int:
        config = self._config
        if is_resident:
            return measure_resident_bytes(
                lambda: self._new_resident_steps(*self._new_state(num_blocks=1)),
                self.backend,
                self._model.config.num_layers,
            )
        return measure_activation_bytes(
            self._model,
            self.backend,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
        )

    def _new_result_slot(self) -> ResultSlot:
        # As many as steps are under way at once; the window of the control stream bounds them.
        num_rows = max(self._config.max_num_seqs, *self._config.decode_sizes, 1)
        return ResultSlot(num_rows, is_cuda=self._is_cuda)
