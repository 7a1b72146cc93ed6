"""Which waiting request starts next, and its start.

All-or-nothing: a request starts when all its live sequences get a row and blocks for all their
known tokens. One that does not fit lets a bounded number of later ones pass.

Owns: the waiting queue, who was passed by how often, whether somebody has the replica for itself.
Does not know: tokens per step, what is computed when, results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from control_plane.losses import RETRY_ALONE_AT
from control_plane.scheduled_step import AddedSequence
from control_plane.waiting_queue import WaitingQueue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from control_plane.kv_cache_manager import KVCacheManager
    from control_plane.request import Request, Version
    from control_plane.running_batch import RunningBatch
    from control_plane.scheduler_config import SchedulerConfig


class Admission:
    """The waiting requests of one replica and the rules by which they start.

    Attributes:
        num_prefix_queries: Tokens looked up in the prefix index by those that started.
        num_prefix_hits: Tokens found there.
    """

    def __init__(self, batch: RunningBatch, kv: KVCacheManager, config: SchedulerConfig) -> None:
        self._batch = batch
        self._kv = kv
        self._max_bypass = config.max_bypass
        self._probation_tokens = config.probation_tokens
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self._queue = WaitingQueue()
        self._num_bypassed: dict[Request, int] = {}
        # Who is retried alone, and its output tokens when it started.
        self._alone: Request | None = None
        self._alone_since = 0

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, request: object) -> bool:
        return request in self._queue

    def requests(self) -> list[Request]:
        """Who waits, in order."""
        return list(self._queue)

    def count_ahead(self, request: Request) -> int:
        """Requests that a new one would wait for."""
        return self._queue.count_ahead(request)

    def push(self, request: Request) -> None:
        """Let a request wait, or wait again, in its place."""
        has_started = any(s.num_admissions for s in request.live_sequences)
        if request is self._alone:
            self._alone = None
        self._queue.push(request, has_started=has_started)

    def forget(self, request: Request) -> None:
        """The request ended, wherever it was."""
        if request in self._queue:
            self._queue.remove(request)
        self._num_bypassed.pop(request, None)
        if request is self._alone:
            self._alone = None

    def drain(self) -> list[Request]:
        """Take all requests out, oldest first."""
        requests = sorted(self._queue, key=lambda request: request.arrival)
        for request in requests:
            self._queue.remove(request)
            self._num_bypassed.pop(request, None)
        return requests

    def start(self, version: Version, *, has_in_flight: bool) -> Iterator[list[AddedSequence]]:
        """Start requests with plan `version`, one after the other, in order, while they fit.

        What is yielded has left the queue and has rows and blocks. The caller orders its first
        tokens before it asks for the next, which may share them only in a later plan.

        Args:
            version: The plan being made.
            has_in_flight: Whether earlier steps are unconfirmed.
        """
        max_bypass = self._max_bypass
        blocked: list[Request] = []
        for request in self._queue:
            if not self._batch.num_free_rows or self._is_reserved_for_one():
                return
            hits = self._find_room(request, version, has_in_flight=has_in_flight)
            if hits is None:
                blocked.append(request)
                if len(blocked) > max_bypass:
                    return
            else:
                for passed in blocked:
                    self._num_bypassed[passed] = self._num_bypassed.get(passed, 0) + 1
                yield self._admit(request, hits, version)
            if any(self._num_bypassed.get(passed, 0) >= max_bypass for passed in blocked):
                return

    def _is_reserved_for_one(self) -> bool:
        request = self._alone
        if request is None:
            return False
        num_output = sum(len(s.output_token_ids) for s in request.sequences)
        if num_output < self._alone_since + self._probation_tokens:
            return True
        self._alone = None
        return False

    def _find_room(
        self, request: Request, version: Version, *, has_in_flight: bool
    ) -> list[list[int]] | None:
        """The hits of every live sequence if all of them can start now, else None."""
        batch, kv = self._batch, self._kv
        others_run = len(batch) > 0
        if request.num_losses >= RETRY_ALONE_AT and (others_run or has_in_flight):
            return None
        live = request.live_sequences
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
        # Whoever runs must be able to grow; a request alone may have everything.
        return hits if kv.can_admit(hits, num_blocks, leave_room=others_run) else None

    def _admit(
        self, request: Request, hits: list[list[int]], version: Version
    ) -> list[AddedSequence]:
        """Give rows and blocks to all live sequences of a request."""
        kv = self._kv
        self._queue.admit(request)
        self._num_bypassed.pop(request, None)
        if request.num_losses >= RETRY_ALONE_AT:
            self._alone = request
            self._alone_since = sum(len(s.output_token_ids) for s in request.sequences)
        for found in hits:
            kv.touch(found)
        group: list[AddedSequence] = []
        for sequence, found in zip(request.live_sequences, hits, strict=True):
            num_known, num_computed = sequence.num_tokens, len(found) * kv.block_size
            row = self._batch.add(sequence, num_computed=num_computed, num_known=num_known)
            table = kv.allocate_row(row, sequence, found, version)
            self.num_prefix_queries += num_known
            self.num_prefix_hits += num_computed
            if sequence.num_admissions == 0:
                sequence.num_cached_tokens = num_computed
            sequence.num_admissions += 1
            group.append(
                AddedSequence(
                    row=row,
                    sequence=sequence,
                    token_ids=sequence.token_ids(),
                    num_computed_tokens=num_computed,
                    block_ids=table,
                    num_hit_blocks=len(found),
                )
            )
        return group
