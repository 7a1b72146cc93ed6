"""Host mirror of the worker's rows: validates a plan whole, then applies it whole.

Owns: which rows are occupied, how many tokens each has computed, which block ids are in which
table, and from that the work of every step. Both planes compute the rows of a step by the same
rules. Does not know: tensors, the device, or whether a row stopped there on its own; a row is
occupied from the plan that adds it to the plan that removes it.

numpy only: a steady decode plan of 256 rows costs well under 100 us.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from data_plane.host_rows import HostRows
from data_plane.plan_draft import PlanDraft
from data_plane.plan_reader import Limits, read_plan
from data_plane.plan_refused import PlanRefused, Refusal
from data_plane.plan_work import order_steps

if TYPE_CHECKING:
    from data_plane.step_work import Int32Array, StepWork
    from protos.pagewire.v1 import worker_pb2


class RowTable:
    """The rows of one worker, changed by plans and resets only. Not thread-safe."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        num_blocks: int,
        max_model_len: int,
        block_size: int,
        max_num_batched_tokens: int,
        vocab_size: int,
    ) -> None:
        limits = Limits(
            max_num_seqs=max_num_seqs,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            block_size=block_size,
            max_num_batched_tokens=max_num_batched_tokens,
            vocab_size=vocab_size,
        )
        self._num_blocks_owned = num_blocks
        self._state = HostRows(limits, num_blocks)
        self._applied_version = 0

    @property
    def applied_version(self) -> int:
        """Version of the last plan or reset that was applied; 0 for none."""
        return self._applied_version

    @property
    def num_blocks(self) -> int:
        """Block ids are below this: the replica's smallest, at most what this worker owns."""
        return self._state.limits.num_blocks

    @property
    def num_rows(self) -> int:
        """Occupied rows."""
        return int(np.count_nonzero(self._state.rows.occupied))

    @property
    def num_live_rows(self) -> int:
        """Occupied rows that no result has reported as finished."""
        return int(np.count_nonzero(self._state.live))

    def apply(self, plan: worker_pb2.Plan) -> list[StepWork]:
        """Apply a plan.

        Returns:
            One StepWork per step; the first carries the deltas.

        Raises:
            PlanRefused: the plan breaks a rule. Nothing was changed.
        """
        if plan.base_version != self._applied_version:
            raise PlanRefused(
                Refusal.BASE_VERSION_MISMATCH,
                f"plan {plan.version} builds on version {plan.base_version}, this worker is at "
                f"{self._applied_version}",
                field="base_version",
                value=plan.base_version,
                limit=self._applied_version,
            )
        if plan.version != plan.base_version + 1:
            raise PlanRefused(
                Refusal.BASE_VERSION_MISMATCH,
                f"version is {plan.version}, it must be base_version + 1 = {plan.base_version + 1}",
                field="version",
                value=plan.version,
                limit=plan.base_version + 1,
            )
        columns = read_plan(plan, self._state.limits)
        draft = PlanDraft(self._state, columns)
        try:
            works = order_steps(draft, draft.apply_deltas(plan.version), plan.version)
        except PlanRefused:
            draft.roll_back()
            raise
        draft.commit(plan.version)
        self._applied_version = plan.version
        return works

    def reset(self, version: int, *, num_blocks: int | None = None) -> None:
        """Drop all rows and go to `version`; from now on ids are below `num_blocks` if given."""
        if num_blocks is not None:
            if not 2 <= num_blocks <= self._num_blocks_owned:
                raise ValueError(
                    f"num_blocks must be in [2, {self._num_blocks_owned}], got {num_blocks}"
                )
        else:
            num_blocks = self._state.limits.num_blocks
        limits = dataclasses.replace(self._state.limits, num_blocks=num_blocks)
        self._state = HostRows(limits, self._num_blocks_owned)
        self._applied_version = version

    def mark_finished(self, version: int, rows: Int32Array) -> None:
        """Note rows that the result of a step of `version` reports as finished.

        They stay occupied. A row that was assigned again since is left alone.
        """
        self._state.live[rows[self._state.rows.since[rows] <= version]] = False

    def block_table(self, row: int) -> Int32Array:
        """Return a copy of a row's block ids."""
        return self._state.block_table(row)
