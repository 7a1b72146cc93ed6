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
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from control_plane.errors import InvariantError, RequestTooLongError
from control_plane.request import FinishReason, Request, Sequence, Version
from control_plane.running_batch import InFlightStep, RunningBatch
from control_plane.scheduled_step import (
    AddedSequence,
    ResultMismatchError,
    ScheduledStep,
    StepUpdate,
)
from control_plane.step_result import check_result
from control_plane.waiting_queue import WaitingQueue

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

# A request that was in flight at so many losses is retried alone: it may be their cause.
_RETRY_ALONE_AT = 2
# Tokens after which it is believed not to be: more than any lookahead window holds steps.
_PROBATION_TOKENS = 8

_NO_ROWS: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
_NO_ROWS.setflags(write=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one replica's steps.

    Attributes:
        max_num_seqs: Rows of the worker's persistent batch.
        max_num_batched_tokens: Most tokens in one step; at least max_num_seqs, so that every
            decoding row always fits.
        max_model_len: Longest sequence, prompt and output.
        max_bypass: How many requests may be admitted past one that does not fit, and how many
            of those that do not fit are looked at in one step.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_bypass: int = 16

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, got {self.max_num_seqs}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens must be at least max_num_seqs={self.max_num_seqs}, "
                f"got {self.max_num_batched_tokens}"
            )
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2, got {self.max_model_len}")
        if self.max_bypass < 0:
            raise ValueError(f"max_bypass must not be negative, got {self.max_bypass}")


def _rank(request: Request) -> tuple[int, int]:
    """Sorts who is served first to the front; victims are taken from the back."""
    return -request.priority, request.arrival


class Scheduler:
    """Schedules one replica. Every method is atomic: it raises before it changes anything, or not.

    Attributes:
        num_preemptions: Sequences that lost their blocks to others.
        num_prefix_queries: Tokens looked up in the prefix index at admissions.
        num_prefix_hits: Tokens found there.
    """

    def __init__(self, config: SchedulerConfig, kv_cache_manager: KVCacheManager) -> None:
        self.config = config
        self.kv_cache_manager = kv_cache_manager
        self.num_preemptions = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self._batch = RunningBatch(config.max_num_seqs)
        self._waiting = WaitingQueue()
        # Output tokens at admission. A request is here from its admission to its preemption or end,
        # even while none of its sequences has a row any more.
        self._running: dict[Request, int] = {}
        self._draining: dict[Request, Version] = {}  # the last plan in flight that computes for it
        self._prefilling: dict[Sequence, None] = {}
        self._num_bypassed: dict[Request, int] = {}
        self._alone: Request | None = None
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
        return bool(self._running or self._draining or self._waiting)

    @property
    def num_usable_blocks(self) -> int:
        return self.kv_cache_manager.pool.num_usable_blocks

    @property
    def num_free_blocks(self) -> int:
        return self.kv_cache_manager.pool.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        return self.kv_cache_manager.pool.num_cached_blocks

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
            self._wait(request)

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
        self._alone = None
        replayed = [*self._running, *self._draining]
        self._running.clear()
        self._draining.clear()
        for request in replayed:
            self._wait(request)

    def evacuate(self) -> list[Request]:
        """The worker is lost: hand all live requests back, oldest first, and keep none.

        The permanent part of the prefix index stays: it is true for as long as the replica's
        epoch is, and a new epoch gets a new scheduler.
        """
        self.reset()
        requests = sorted(self._waiting, key=lambda request: request.arrival)
        self._waiting = WaitingQueue()
        self._num_bypassed.clear()
        return requests

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
        if self._waiting and not has_preempted:
            self._admit(version, budget, added, chunks)
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
        self.kv_cache_manager.register(row, sequence, num_computed + num_tokens, version)
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

    # Admission.

    def _admit(
        self,
        version: Version,
        budget: int,
        added: list[AddedSequence],
        chunks: dict[int, int],
    ) -> None:
        """Start waiting requests in their order while tokens, rows and blocks last."""
        max_bypass = self.config.max_bypass
        blocked: list[Request] = []
        for request in self._waiting:
            if budget <= 0 or not self._batch.num_free_rows or self._is_reserved_for_one():
                break
            hits = self._find_room(request, version)
            if hits is None:
                blocked.append(request)
                if len(blocked) > max_bypass:
                    break
            else:
                started = self._start(request, hits, version)
                for one in started:
                    budget -= self._schedule_chunk(one.sequence, budget, version, chunks)
                added += started
                for passed in blocked:
                    self._num_bypassed[passed] = self._num_bypassed.get(passed, 0) + 1
            if any(self._num_bypassed.get(passed, 0) >= max_bypass for passed in blocked):
                break

    def _is_reserved_for_one(self) -> bool:
        """Whether a request is being retried alone."""
        request = self._alone
        if request is None:
            return False
        at_admission = self._running.get(request)
        if at_admission is not None:
            num_output = sum(len(s.output_token_ids) for s in request.sequences)
            if num_output < at_admission + _PROBATION_TOKENS:
                return True
        self._alone = None
        return False

    def _find_room(self, request: Request, version: Version) -> list[list[int]] | None:
        """The hits of every live sequence if all of them can start now, else None."""
        batch, kv = self._batch, self.kv_cache_manager
        if request.num_losses >= _RETRY_ALONE_AT and (len(batch) or self._in_flight):
            return None
        live = request.live_sequences
        others_run = len(batch) > 0
        if len(live) > batch.num_free_rows or (
            others_run and kv.pool.num_free_blocks <= kv.watermark_blocks
        ):
            return None
        hits: list[list[int]] = []
        for sequence in live:
            found, is_next_being_computed = kv.find_hits(sequence, version)
            if is_next_being_computed:
                # The next plan can share what this one computes.
                return None
            hits.append(found)
        num_blocks = sum(kv.blocks_for(sequence.num_tokens) for sequence in live)
        return hits if kv.can_admit(hits, num_blocks, leave_room=others_run) else None

    def _start(
        self, request: Request, hits: list[list[int]], version: Version
    ) -> list[AddedSequence]:
        """Give rows and blocks to all live sequences of a request."""
        kv = self.kv_cache_manager
        self._waiting.admit(request)
        self._num_bypassed.pop(request, None)
        self._running[request] = sum(len(s.output_token_ids) for s in request.sequences)
        if request.num_losses >= _RETRY_ALONE_AT:
            self._alone = request
        for found in hits:
            kv.touch(found)
        started: list[AddedSequence] = []
        for sequence, found in zip(request.live_sequences, hits, strict=True):
            num_known, num_computed = sequence.num_tokens, len(found) * kv.block_size
            row = self._batch.add(sequence, num_computed=num_computed, num_known=num_known)
            table = kv.allocate_row(row, sequence, found, version)
            self._prefilling[sequence] = None
            self.num_prefix_queries += num_known
            self.num_prefix_hits += num_computed
            if sequence.num_admissions == 0:
                sequence.num_cached_tokens = num_computed
            else:
                sequence.num_replays += 1
                sequence.num_replayed_tokens += num_known - num_computed
            sequence.num_admissions += 1
            started.append(
                AddedSequence(
                    row=row,
                    sequence=sequence,
                    token_ids=sequence.token_ids(),
                    num_computed_tokens=num_computed,
                    block_ids=table,
                    num_hit_blocks=len(found),
                )
            )
        return started

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
        live_rows, update = self._resolve(ordered, counts, token_ids)
        for sequence, token_id in zip(update.sequences, update.token_ids, strict=True):
            sequence.output_token_ids.append(token_id)
        batch.num_confirmed[live_rows] += 1
        # Before rows are released: what a sequence computed to its end stays cached.
        for row in kv.rows_to_register(live_rows, batch.num_confirmed).tolist():
            kv.register(row, batch.sequence_at(row), int(batch.num_confirmed[row]))
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
            self._wait(request)
        return update

    def _resolve(
        self, step: InFlightStep, counts: NDArray[np.uint8], token_ids: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], StepUpdate]:
        """Match tokens with live sequences; also the rows that still are what they were."""
        rows, tokens = step.rows, token_ids.tolist()
        has_all = len(tokens) == rows.size
        if has_all and step.num_releases == self._batch.num_releases:
            return rows, StepUpdate(sequences=step.sequences, token_ids=tokens)
        is_stale = self._batch.incarnation[rows] != step.incarnations
        left_out: set[int] = set()
        num_dropped = 0
        for index in np.flatnonzero(is_stale).tolist():
            # A preempted sequence is stale but live: it gets its tokens.
            if step.sequences[index].finish_reason is not None:
                left_out.add(index)
                num_dropped += int(counts[index])
        if not has_all:
            column = np.zeros(rows.size, dtype=np.int32)
            column[counts != 0] = token_ids
            tokens = column.tolist()
            left_out.update(np.flatnonzero(counts == 0).tolist())
        sequences = list(step.sequences)
        for index in sorted(left_out, reverse=True):
            del sequences[index], tokens[index]
        update = StepUpdate(sequences=sequences, token_ids=tokens, num_dropped=num_dropped)
        return rows[~is_stale & (counts != 0)], update

    # Moving between places.

    def _is_here(self, request: Request) -> bool:
        return request in self._running or request in self._draining or request in self._waiting

    def _wait(self, request: Request) -> None:
        has_started = any(s.num_admissions for s in request.live_sequences)
        self._waiting.push(request, has_started=has_started)

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
        self._wait(request)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        """Finish a sequence wherever its request is; the last one takes the request with it."""
        self._release(sequence)
        sequence.finish_reason = reason
        request = sequence.request
        if request.is_finished:
            self._running.pop(request, None)
            self._draining.pop(request, None)
            self._num_bypassed.pop(request, None)
            if request in self._waiting:
                self._waiting.remove(request)

    def audit(self) -> None:
        """Check blocks, rows and places against each other.

        Raises:
            InvariantError: they contradict.
        """
        self.kv_cache_manager.audit()
        self._batch.audit()
        for request in (*self._running, *self._draining, *self._waiting):
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
        if not len(self._batch) and self.num_free_blocks != self.num_usable_blocks:
            raise InvariantError(f"{self.num_free_blocks} of {self.num_usable_blocks} free on idle")
