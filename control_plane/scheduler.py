"""Which sequences compute what in the next step of one replica, and what a step's result means.

Continuous batching with chunked prefill: decoding rows first, then rows in prefill, then requests
that wait. Steps are ordered ahead of results, since a decode step needs no token values; results
are resolved through the rows as they were when their step was ordered.

A request is in one of four places:

    waiting ──admit──► running ──preempt──► draining ──last in-flight result──► waiting
       └───────────────── any ──finish, abort──► forgotten

Owns: those places, the order of everything, the steps in flight.
Does not know: tokens' meaning, text, streams, time, the worker beyond its rows and blocks.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from control_plane.admission import Admission
from control_plane.errors import InvariantError, RequestTooLongError
from control_plane.request import FinishReason, Request, Sequence, Version
from control_plane.running_batch import InFlightStep, RunningBatch
from control_plane.scheduled_step import (
    AddedSequence,
    ResultMismatchError,
    ScheduledStep,
    StepUpdate,
)
from control_plane.scheduler_config import SchedulerConfig
from control_plane.step_result import check_result, resolve_tokens

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from control_plane.kv_cache_manager import KVCacheManager

__all__ = [
    "AddedSequence",
    "ResultMismatchError",
    "ScheduledStep",
    "Scheduler",
    "SchedulerConfig",
    "StepUpdate",
]

_NO_ROWS: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
_NO_ROWS.setflags(write=False)


def _rank(request: Request) -> tuple[int, int]:
    """Sorts who is served first to the front; victims are taken from the back."""
    return -request.priority, request.arrival


class Scheduler:
    """Schedules one replica. Every method is atomic: it raises before it changes anything, or not.

    Attributes:
        num_preemptions: Sequences that lost their blocks to others.
    """

    def __init__(self, config: SchedulerConfig, kv_cache_manager: KVCacheManager) -> None:
        self.config = config
        self.kv_cache_manager = kv_cache_manager
        self.num_preemptions = 0
        self._batch = RunningBatch(config.max_num_seqs)
        self._waiting = Admission(self._batch, kv_cache_manager, max_bypass=config.max_bypass)
        # From admission to preemption or end, even while no sequence of it has a row any more.
        self._running: dict[Request, None] = {}
        self._draining: dict[Request, Version] = {}  # the last plan in flight that computes for it
        self._prefilling: dict[Sequence, None] = {}
        self._in_flight: deque[InFlightStep] = deque()
        self._last_version = 0

    # What others ask.

    @property
    def num_running(self) -> int:
        """Sequences that hold a row."""
        return len(self._batch)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a row, those whose in-flight steps are awaited included."""
        return len(self._waiting) + len(self._draining)

    @property
    def num_in_flight_steps(self) -> int:
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        """Whether any live request is here."""
        return bool(self._running or self._draining or len(self._waiting))

    @property
    def num_usable_blocks(self) -> int:
        return self.kv_cache_manager.pool.num_usable_blocks

    @property
    def num_free_blocks(self) -> int:
        return self.kv_cache_manager.pool.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        return self.kv_cache_manager.pool.num_cached_blocks

    @property
    def num_prefix_queries(self) -> int:
        """Tokens looked up in the prefix index at admissions."""
        return self._waiting.num_prefix_queries

    @property
    def num_prefix_hits(self) -> int:
        """Tokens found there."""
        return self._waiting.num_prefix_hits

    def fits(self, num_total_tokens: int, num_sequences: int = 1) -> bool:
        """Whether a request of so many tokens per sequence, prompt and output, can ever run."""
        kv = self.kv_cache_manager
        if num_total_tokens > self.config.max_model_len or num_sequences > self.config.max_num_seqs:
            return False
        blocks = kv.blocks_for(max(num_total_tokens - 1, 1))
        return blocks * num_sequences <= kv.pool.num_usable_blocks

    def count_cached_tokens(self, request: Request) -> int:
        """Tokens of the request's first live sequence that a plan sent now would hit."""
        for sequence in request.live_sequences:
            hits, _ = self.kv_cache_manager.find_hits(sequence, self._last_version + 1)
            return len(hits) * self.kv_cache_manager.block_size
        return 0

    def requests_in_flight(self) -> list[Request]:
        """Live requests for which an unconfirmed step computes something, oldest first."""
        found = {
            sequence.request
            for step in self._in_flight
            for sequence in (*step.sequences, *step.chunked)
            if sequence.finish_reason is None
        }
        return sorted(found, key=lambda request: request.arrival)

    # What happens to requests.

    def add(self, request: Request) -> None:
        """Let a new or replayed request wait for its turn.

        Sequences that have all their tokens already end with LENGTH; a request without a live
        sequence is not kept.

        Raises:
            RequestTooLongError: it can never run here; `fits` would have said so.
        """
        if self._is_here(request):
            raise InvariantError(f"{request} was added twice")
        live = request.live_sequences
        if not self.fits(request.max_total_tokens, len(live)):
            raise RequestTooLongError(
                f"Request of up to {request.max_total_tokens} tokens in {len(live)} sequence(s) "
                f"does not fit: max_model_len={self.config.max_model_len}, "
                f"{self.num_usable_blocks} blocks of {self.kv_cache_manager.block_size} tokens. "
                "Shorten the prompt or lower max_tokens.",
                max_total_tokens=request.max_total_tokens,
                max_model_len=self.config.max_model_len,
                num_usable_blocks=self.num_usable_blocks,
            )
        for sequence in live:
            if sequence.num_tokens >= request.max_total_tokens:
                sequence.finish_reason = FinishReason.LENGTH
        if not request.is_finished:
            self._waiting.push(request)

    def abort(self, request: Request) -> None:
        """End all live sequences; their blocks are reusable from the next plan. Idempotent."""
        if self._is_here(request):
            for sequence in request.live_sequences:
                self._end(sequence, FinishReason.ABORT)

    def finish(self, sequence: Sequence, *, num_output_tokens: int, reason: FinishReason) -> None:
        """End a sequence at a token of its log, e.g. because a stop string was found there.

        Raises:
            ValueError: the log is shorter than that.
        """
        if not 0 <= num_output_tokens <= len(sequence.output_token_ids):
            raise ValueError(f"{sequence} cannot end at output token {num_output_tokens}")
        del sequence.output_token_ids[num_output_tokens:]
        del sequence.block_hashes[sequence.num_tokens // self.kv_cache_manager.block_size :]
        if sequence.finish_reason is None and self._is_here(sequence.request):
            self._end(sequence, reason)
        sequence.finish_reason = reason

    def reset(self) -> None:
        """The worker dropped all rows: steps in flight never ran, live sequences wait again."""
        batch, kv = self._batch, self.kv_cache_manager
        self._in_flight.clear()
        kv.pool.drop_pending()
        # Youngest first: what the oldest need again is evicted last.
        for sequence in sorted(batch.sequences, key=lambda s: _rank(s.request), reverse=True):
            kv.free_row(batch.release(sequence))
        batch.clear()
        self._prefilling.clear()
        replayed = [*self._running, *self._draining]
        self._running.clear()
        self._draining.clear()
        for request in replayed:
            self._waiting.push(request)

    def evacuate(self) -> list[Request]:
        """The worker is lost: hand all live requests back, oldest first, and keep none.

        The permanent part of the prefix index stays: it is true for as long as the replica's
        epoch is, and a new epoch gets a new scheduler.
        """
        self.reset()
        return self._waiting.drain()

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
        for sequence in sorted(self._prefilling, key=lambda s: (_rank(s.request), s.index)):
            budget -= self._schedule_chunk(sequence, budget, version, chunks)
        added: list[AddedSequence] = []
        if len(self._waiting) and budget > 0 and not has_preempted:
            for group in self._waiting.start(version, has_in_flight=bool(self._in_flight)):
                self._running[group[0].sequence.request] = None
                for one in group:
                    self._prefilling[one.sequence] = None
                    budget -= self._schedule_chunk(one.sequence, budget, version, chunks)
                added += group
                if budget <= 0:
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
            paused_rows=_NO_ROWS,
            resumed_rows=_NO_ROWS,
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
        order = sorted({s.request: None for s in batch.sequences}, key=_rank)
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
        finished = check_result(ordered, counts, token_ids, finished_rows, finish_reasons)
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

    # Moving between places.

    def _is_here(self, request: Request) -> bool:
        return request in self._running or request in self._draining or request in self._waiting

    def _release(self, sequence: Sequence) -> None:
        """Take row and blocks of a sequence, if it has any."""
        self._prefilling.pop(sequence, None)
        if self._batch.row_of(sequence) is not None:
            self.kv_cache_manager.free_row(self._batch.release(sequence))

    def _preempt(self, request: Request) -> None:
        """Take rows and blocks of a running request; it waits again once its steps came back."""
        live = request.live_sequences
        for sequence in live:
            self.num_preemptions += self._batch.row_of(sequence) is not None
            self._release(sequence)
        del self._running[request]
        for step in reversed(self._in_flight):
            if any(step.involves(sequence) for sequence in live):
                self._draining[request] = step.version
                return
        self._waiting.push(request)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        """Finish a sequence wherever its request is; the last one takes the request with it."""
        self._release(sequence)
        sequence.finish_reason = reason
        request = sequence.request
        if request.is_finished:
            self._running.pop(request, None)
            self._draining.pop(request, None)
            self._waiting.forget(request)

    def audit(self) -> None:
        """Check blocks, rows and places against each other.

        Raises:
            InvariantError: they contradict.
        """
        self.kv_cache_manager.audit()
        self._batch.audit()
        for request in (*self._running, *self._draining, *self._waiting.requests()):
            places = (self._running, self._draining, self._waiting)
            if sum(request in place for place in places) != 1 or request.is_finished:
                raise InvariantError(f"{request} is finished or in several places")
        for sequence in self._batch.sequences:
            if sequence.request not in self._running or sequence.finish_reason is not None:
                raise InvariantError(f"{sequence} holds a row and is not running")
        if any(self._batch.row_of(sequence) is None for sequence in self._prefilling):
            raise InvariantError("a sequence in prefill has no row")
        if self._draining and not self._in_flight:
            raise InvariantError(f"{list(self._draining)} await steps, none is in flight")
        awaited = self.kv_cache_manager.pool.pending_versions()
        if not awaited <= {step.version for step in self._in_flight}:
            raise InvariantError(f"blocks await plans {awaited}, which are not all in flight")
        if not len(self._batch) and self.num_free_blocks != self.num_usable_blocks:
            raise InvariantError(f"{self.num_free_blocks} of {self.num_usable_blocks} free on idle")
