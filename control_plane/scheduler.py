"""Which sequences compute what in the next step of one replica, and what a step's result means.

Continuous batching with chunked prefill: decoding rows first, then rows in prefill, then requests
that wait. Steps are ordered ahead of results, since a decode step needs no token values; results
are resolved through the rows as they were when their step was ordered.

Owns: the order of everything. Does not know: tokens' meaning, text, streams, time, the worker
beyond its rows and blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from control_plane.errors import InvariantError
from control_plane.replica_state import ReplicaState, rank
from control_plane.request import FinishReason, Request, Sequence, Version
from control_plane.running_batch import InFlightStep
from control_plane.scheduled_step import (
    AddedSequence,
    ResultMismatchError,
    ScheduledStep,
    StepUpdate,
)
from control_plane.step_result import check_result, resolve_tokens

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NO_ROWS: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
_NO_ROWS.setflags(write=False)


class Scheduler(ReplicaState):
    """Schedules one replica: `schedule` orders a step, `update` takes its result.

    Steps may be ordered while the results of earlier ones are out; the caller bounds how many.
    """

    # Ordering a step.

    def schedule(self, version: Version) -> ScheduledStep | None:
        """Decide the next step, or None if there is nothing to compute now.

        Args:
            version: Of the plan that will carry it; above all earlier ones. Not used up by None.
        """
        if version <= self._last_version:
            raise InvariantError(f"plan {version} follows plan {self._last_version}")
        batch, kv = self._batch, self.kv_cache_manager
        rows, sequences = batch.decoding()
        growing = kv.rows_to_grow(rows, batch.num_computed)
        has_preempted = False
        if growing.size > kv.pool.num_free_blocks:
            has_preempted = self._make_room(growing)
            rows, sequences = batch.decoding()
            growing = kv.rows_to_grow(rows, batch.num_computed)
        appended = kv.grow(growing, version) if growing.size else _NO_ROWS
        ending: list[int] = []
        if rows.size:
            batch.num_computed[rows] += 1
            at_limit = rows[batch.num_computed[rows] == batch.limit[rows]]
            if at_limit.size:
                ending = at_limit.tolist()
                batch.stop_decoding(at_limit)

        chunks: dict[int, int] = {}
        budget = self.config.max_num_batched_tokens - rows.size
        for sequence in sorted(self._prefilling, key=lambda s: (rank(s.request), s.index)):
            budget -= self._schedule_chunk(sequence, budget, version, chunks)
        added: list[AddedSequence] = []
        num_added_tokens = 0
        if len(self._waiting) and budget > 0 and not has_preempted:
            for group in self._waiting.start(version, has_in_flight=bool(self._in_flight)):
                self._running[group[0].sequence.request] = None
                for one in group:
                    self._prefilling[one.sequence] = None
                    budget -= self._schedule_chunk(one.sequence, budget, version, chunks)
                    num_added_tokens += one.token_ids.size
                added += group
                if budget <= 0 or num_added_tokens >= self.config.max_added_tokens:
                    break
        if not rows.size and not chunks:
            return None
        self._last_version = version
        step = self._record(version, rows, sequences, chunks, ending)
        return ScheduledStep(
            version=version,
            removed_rows=batch.take_vacated(),
            added=sorted(added, key=lambda one: one.row),
            appended_rows=growing,
            appended_counts=np.ones(growing.size, dtype=np.int32),
            appended_block_ids=appended,
            chunk_rows=np.array(sorted(chunks), dtype=np.int32),
            chunk_num_tokens=np.array([chunks[row] for row in sorted(chunks)], dtype=np.int32),
            sampled_rows=step.rows,
            num_tokens=rows.size + sum(chunks.values()),
        )

    def _make_room(self, growing: NDArray[np.int32]) -> bool:
        """Take blocks from the youngest of the lowest priority until the others can grow.

        Returns:
            Whether anybody who still has work was preempted.
        """
        batch, pool = self._batch, self.kv_cache_manager.pool
        for sequence in batch.sequences:
            row = batch.row_of(sequence)
            if row is not None and batch.num_computed[row] == batch.limit[row]:
                # All its steps are ordered: later plans may have its blocks, at no cost.
                self._release(sequence)
        num_growing: dict[Request, int] = {}
        for sequence in batch.sequences_at(growing):
            num_growing[sequence.request] = num_growing.get(sequence.request, 0) + 1
        order = sorted({s.request: None for s in batch.sequences}, key=rank)
        num_before = len(order)
        reserved = num_served = 0
        while num_served < len(order):
            reserved += num_growing.get(order[num_served], 0)
            # Who was served in this step stays: victims come from behind, or it is this one itself.
            while reserved > pool.num_free_blocks and num_served < len(order):
                if len(order) == 1:
                    raise InvariantError(
                        f"{order[0]} alone needs {reserved} blocks more, "
                        f"{pool.num_free_blocks} of {pool.num_usable_blocks} are free"
                    )
                self._preempt(order.pop())
            num_served += 1
        return len(order) < num_before

    def _schedule_chunk(
        self, sequence: Sequence, budget: int, version: Version, chunks: dict[int, int]
    ) -> int:
        """Order the next chunk of a prefill, if the budget allows any. Returns its tokens."""
        batch = self._batch
        row = batch.row_of(sequence)
        if row is None:
            raise InvariantError(f"{sequence} is in prefill without a row")
        num_computed, num_known = int(batch.num_computed[row]), int(batch.num_known[row])
        num_tokens = min(budget, num_known - num_computed)
        if num_tokens <= 0:
            return 0
        chunks[row] = num_tokens
        batch.num_computed[row] = num_computed + num_tokens
        self.kv_cache_manager.register_chunk(row, sequence, num_computed + num_tokens, version)
        return num_tokens

    def _record(
        self,
        version: Version,
        rows: NDArray[np.int32],
        sequences: list[Sequence],
        chunks: dict[int, int],
        ending: list[int],
    ) -> InFlightStep:
        """Remember the step; rows whose prefill it ends sample now and decode from the next."""
        batch = self._batch
        chunked = [batch.sequence_at(row) for row in chunks]
        completed = [row for row in chunks if batch.num_computed[row] == batch.num_known[row]]
        for row in completed:
            del self._prefilling[batch.sequence_at(row)]
            if batch.num_computed[row] < batch.limit[row]:
                batch.start_decoding(row)
            else:
                ending.append(row)
        if completed:
            rows = np.sort(np.concatenate((rows, np.array(completed, dtype=np.int32))))
            sequences = batch.sequences_at(rows)
        step = InFlightStep(
            version=version,
            rows=rows,
            sequences=sequences,
            incarnations=batch.incarnation[rows],
            num_releases=batch.num_releases,
            ending=ending,
            chunked=chunked,
        )
        self._in_flight.append(step)
        return step

    # Resolving a result.

    def update(
        self,
        version: Version,
        step: int,
        counts: NDArray[np.uint8],
        token_ids: NDArray[np.int32],
        finished_rows: NDArray[np.int32],
        finish_reasons: NDArray[np.uint8],
    ) -> StepUpdate:
        """Apply the result of the oldest step in flight.

        Args:
            version: The step's plan.
            step: Which of the plan's steps: 0.
            counts: Tokens per row of `ScheduledStep.sampled_rows`.
            token_ids: Those tokens, in row order.
            finished_rows: Rows that stopped in this step, ascending.
            finish_reasons: Parallel to finished_rows.

        Raises:
            ResultMismatchError: it is not the oldest, or contradicts what was ordered.
        """
        if not self._in_flight or (version, step) != (self._in_flight[0].version, 0):
            awaited = self._in_flight[0].version if self._in_flight else None
            raise ResultMismatchError(
                f"result of plan {version}, step {step}; awaited is plan {awaited}, step 0"
            )
        ordered = self._in_flight[0]
        finished = check_result(
            ordered,
            counts,
            token_ids,
            finished_rows,
            finish_reasons,
            vocab_size=self.config.vocab_size,
        )
        self._in_flight.popleft()
        batch, kv = self._batch, self.kv_cache_manager
        kv.pool.confirm(version)
        live_rows, update = resolve_tokens(ordered, batch, counts, token_ids)
        for sequence, token_id in zip(update.sequences, update.token_ids, strict=True):
            sequence.output_token_ids.append(token_id)
        batch.num_confirmed[live_rows] += 1
        # Before rows are released: what a sequence computed to its end stays cached.
        filled = kv.rows_to_register(live_rows, batch.num_confirmed)
        if filled.size:
            kv.register_decoded(filled, batch.sequences_at(filled))
        for index, reason in finished.items():
            sequence = ordered.sequences[index]
            if sequence.finish_reason is None:
                row = batch.row_of(sequence)
                if reason is FinishReason.ERROR and row is not None:
                    kv.forget(row)
                self._end(sequence, reason)
                update.finished.append(sequence)
        for request in [r for r, last in self._draining.items() if last <= version]:
            del self._draining[request]
            self._waiting.push(request)
        return update
