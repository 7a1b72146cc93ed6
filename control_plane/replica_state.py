"""Where every live request of one replica is, and what it holds.

A request is in one of three places until it ends:

    waiting ──start──► running ──preempt──► draining ──last in-flight result──► waiting

Owns: those places, the rows and blocks of whoever has them, the steps in flight.
Does not know: what to compute next, what a result says, text, streams, time.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from control_plane.admission import Admission
from control_plane.errors import InvariantError, RequestTooLongError
from control_plane.request import FinishReason, Request, Sequence, Version
from control_plane.running_batch import InFlightStep, RunningBatch

if TYPE_CHECKING:
    from control_plane.kv_cache_manager import KVCacheManager
    from control_plane.scheduler_config import SchedulerConfig


def rank(request: Request) -> tuple[int, int]:
    """Sorts who is served first to the front; victims are taken from the back."""
    return -request.priority, request.arrival


class ReplicaState:
    """The live requests of one replica. Base of `Scheduler`, which decides what they compute.

    Attributes:
        num_preemptions: Sequences that lost their blocks to others.
    """

    def __init__(self, config: SchedulerConfig, kv_cache_manager: KVCacheManager) -> None:
        self.config = config
        self.kv_cache_manager = kv_cache_manager
        self.num_preemptions = 0
        self._batch = RunningBatch(config.max_num_seqs)
        self._waiting = Admission(self._batch, kv_cache_manager, config)
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
        return (
            num_total_tokens <= self.config.max_model_len
            and num_sequences <= self.config.max_num_seqs
            and self.kv_cache_manager.fits(num_total_tokens, num_sequences)
        )

    def count_cached_tokens(self, request: Request) -> int:
        """About how many tokens of the request's first live sequence are cached or being computed.

        A bisection, not a walk: a router asks every replica.
        """
        for sequence in request.live_sequences:
            manager = self.kv_cache_manager
            return manager.count_hits(sequence) * manager.block_size
        return 0

    def count_ahead(self, request: Request) -> int:
        """Requests that would get a row before this one, if it came now."""
        return self._waiting.count_ahead(request) + len(self._draining)

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
        for sequence in sorted(batch.sequences, key=lambda s: rank(s.request), reverse=True):
            kv.free_row(batch.release(sequence))
        batch.clear()
        self._prefilling.clear()
        replayed = [*self._running, *self._draining]
        self._running.clear()
        self._draining.clear()
        for request in replayed:
            self._waiting.push(request)

    def withdraw_waiting(self) -> list[Request]:
        """Hand back the requests that wait for a row, oldest first; the others go on."""
        return self._waiting.drain()

    def evacuate(self) -> list[Request]:
        """The worker is lost: hand all live requests back, oldest first, and keep none.

        The permanent part of the prefix index stays: it is true for as long as the replica's
        epoch is, and a new epoch gets a new scheduler.
        """
        self.reset()
        return self._waiting.drain()

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
