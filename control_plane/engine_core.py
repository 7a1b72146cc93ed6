"""One replica's control stream as a state machine: messages in, messages and tokens out.

Owns: versions, Resets and their count, lease and step timeout, and that replica's Scheduler. Does
not know grpc, asyncio, clocks (time is an argument), other replicas, or clients.

A ProtocolError out of any method means: end this worker's stream with it, then `detach`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from control_plane.engine_config import EngineCounters
from control_plane.errors import Code, ProtocolError
from control_plane.index_upkeep import IndexUpkeep
from control_plane.losses import mark_lost
from control_plane.plan import count_prompt_tokens, decode_step_result, encode_plan, malformed
from control_plane.request import Version
from control_plane.scheduled_step import ResultMismatchError
from control_plane.step_window import StepWindow
from protos.pagewire.v1 import worker_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from control_plane.engine_config import EngineConfig
    from control_plane.engine_output import EngineOutput
    from control_plane.request import BlockHash, BlockId, FinishReason, Request
    from control_plane.request import Sequence as RequestSequence
    from control_plane.scheduled_step import ScheduledStep, StepUpdate
    from control_plane.scheduler import Scheduler

logger = logging.getLogger(__name__)

# Resets that answer the worker, without a confirmed step between them, that end its stream.
MAX_RESETS_IN_A_ROW = 3


class EngineCore:
    """Orders steps of one replica. Outlives a stream as long as the replica's epoch lasts.

    Life: `attach` → any of `add`, `abort`, `finish`, `receive`, `order_steps`, `check` → `detach`
    → `attach` again, or nothing. Between `detach` and `attach` it holds no request.
    """

    def __init__(self, config: EngineConfig, scheduler: Scheduler, output: EngineOutput) -> None:
        """Take over a scheduler that holds no request."""
        self.config = config
        self.scheduler = scheduler
        self.counters = EngineCounters()
        self.index = IndexUpkeep(scheduler, config, self.counters)
        self.attached = False
        self.draining = False
        self.last_heard = 0.0
        self.sent_version = 0
        self.confirmed_version = 0
        self._output = output
        self._reset_version = 0
        self.window = StepWindow(config.lookahead, config.max_lookahead)
        self._resets_in_a_row = 0
        # Tokens of requests that have not produced any yet: all, and what was not cached when they
        # came. A long cached prompt is little work, and must not drive its like away.
        self._unstarted: dict[Request, tuple[int, int]] = {}
        self._unstarted_sequences: set[RequestSequence] = set()
        self.unstarted_tokens = self.uncached_tokens = 0

    # The stream.

    def attach(self, applied_version: int, now: float, *, hold_s: float | None = None) -> None:
        """Begin on a new stream: the Reset behind its Welcome.

        Args:
            applied_version: The highest of any rank's.
            now: Monotonic seconds, as everywhere.
            hold_s: How long plans may wait until the prefix index is checked against the
                Generations that Welcome asked for; None: it did not ask.
        """
        self.index.end()
        if hold_s is not None:
            self.index.begin(applied_version, hold_until=now + hold_s)
        self.attached = True
        self.draining = False
        self.last_heard = now
        self._resets_in_a_row = 0
        self.sent_version = max(self.sent_version, applied_version)
        self._send_reset()

    def detach(self, *, lost: bool) -> list[Request]:
        """The stream has ended: give up every request.

        Args:
            lost: Whether requests in flight carry a mark for it; not on an orderly departure.

        Returns:
            The live requests for another replica, in arrival order. Those at their last loss
            are not among them: they have failed.
        """
        self.attached = False
        self.index.end()
        if lost:
            self._mark_lost(self.scheduler.requests_in_flight())
        self.window.clear()
        requests = self.scheduler.evacuate()
        self._unstarted.clear()
        self._unstarted_sequences.clear()
        self.unstarted_tokens = self.uncached_tokens = 0
        return requests

    def receive(self, message: worker_pb2.WorkerMessage, now: float) -> None:
        """Take one message of the worker.

        Raises:
            ProtocolError: It cannot be read, has no place here, or was one Reset too many.
        """
        self.last_heard = now
        kind = message.WhichOneof("message")
        if self.is_recovering and kind in ("step_result", "nack", "step_failed"):
            raise ProtocolError(
                "UNEXPECTED_MESSAGE",
                f"A message of kind {kind} came before the last of the Generations that Welcome "
                "asked for.",
                code=Code.INVALID_ARGUMENT,
                kind=kind,
            )
        if kind == "step_result":
            self._on_step_result(message.step_result, now)
        elif kind == "nack":
            self._on_nack(message.nack)
        elif kind == "step_failed":
            self._on_step_failed(message.step_failed)
        elif kind == "heartbeat":
            pass
        elif kind == "drain":
            self.draining = True
        elif kind == "generations" and self.is_recovering:
            self.index.take(message.generations)
        elif kind is None:
            raise malformed("message", "no known kind of message is set")
        else:
            raise ProtocolError(
                "UNEXPECTED_MESSAGE",
                f"A message of kind {kind} has no place at this point of the stream.",
                code=Code.INVALID_ARGUMENT,
                kind=kind,
            )

    def order_steps(self, now: float) -> None:
        """Send plans until the window is full or there is nothing to compute."""
        while self.order_step(now):
            pass

    def order_step(self, now: float) -> bool:
        """Send the next plan, if the window has room and there is something to compute.

        Returns:
            Whether one was sent and the window has room for another.
        """
        if not self.attached or now < self.held_until:
            return False
        self.index.end_hold()
        if self.window.has_room:
            step = self.scheduler.schedule(Version(self.sent_version + 1))
            if step is not None:
                self._send_plan(step, now)
                return self.window.has_room
        if self.is_idle:
            self.index.audit_idle(now)
        return False

    def check(self, now: float) -> None:
        """Look at the clock.

        Raises:
            ProtocolError: LEASE_EXPIRED or STEP_TIMEOUT.
        """
        if now - self.last_heard >= self.config.lease_s:
            raise ProtocolError(
                "LEASE_EXPIRED",
                f"No message for {now - self.last_heard:.1f} s; the lease is "
                f"{self.config.lease_s:g} s.",
                code=Code.DEADLINE_EXCEEDED,
                lease_s=self.config.lease_s,
            )
        since = self.window.since
        if since is not None and now - since >= self.config.step_timeout_s:
            raise ProtocolError(
                "STEP_TIMEOUT",
                f"Plan {self.window.oldest} is unconfirmed after {now - since:.1f} s; "
                f"the limit is {self.config.step_timeout_s:g} s.",
                code=Code.DEADLINE_EXCEEDED,
                version=self.window.oldest,
                step_timeout_s=self.config.step_timeout_s,
            )

    def next_check(self) -> float:
        """When `check` may have something to say, if nothing happens before."""
        lease, since = self.last_heard + self.config.lease_s, self.window.since
        return lease if since is None else min(lease, since + self.config.step_timeout_s)

    # The prefix index of an earlier process.

    @property
    def is_recovering(self) -> bool:
        """Generations were asked for and have not all arrived."""
        return self.index.is_recovering

    @property
    def held_until(self) -> float:
        """Until when no plan is sent, because the prefix index is not checked yet."""
        return self.index.held_until

    def expect_entries(self) -> None:
        """The store is being asked: `offer_entries` follows, late or empty-handed."""
        self.index.expect_entries()

    def offer_entries(self, stored: Mapping[BlockId, tuple[BlockHash, Version]]) -> None:
        """What the store had. Taken over where the worker's generations agree."""
        self.index.offer_entries(stored)

    # Requests.

    def add(self, request: Request) -> None:
        """Take a request, new or to be replayed."""
        num_tokens = request.prompt_token_ids.size + sum(
            len(sequence.output_token_ids) for sequence in request.sequences
        )
        num_uncached = num_tokens - self.scheduler.count_cached_tokens(request)
        self._unstarted[request] = num_tokens, num_uncached
        self._unstarted_sequences.update(request.sequences)
        self.unstarted_tokens += num_tokens
        self.uncached_tokens += num_uncached
        self.scheduler.add(request)

    def abort(self, request: Request) -> None:
        """Forget a request in any state; its blocks are free for the next plan."""
        self._started(request)
        self.scheduler.abort(request)

    def withdraw_waiting(self) -> list[Request]:
        """Give up the requests that wait for a row, because the worker takes nothing new."""
        requests = self.scheduler.withdraw_waiting()
        for request in requests:
            self._started(request)
        return requests

    def live_entries(self) -> dict[BlockId, tuple[BlockHash, Version]]:
        """All permanent entries of the prefix index."""
        return self.scheduler.kv_cache_manager.pool.permanent_entries()

    def finish(
        self, sequence: RequestSequence, *, num_output_tokens: int, reason: FinishReason
    ) -> None:
        """End a sequence where its client's stop string begins; later tokens are dropped."""
        self.scheduler.finish(sequence, num_output_tokens=num_output_tokens, reason=reason)
        if sequence.request.is_finished:
            self._started(sequence.request)

    @property
    def num_running(self) -> int:
        return self.scheduler.num_running

    @property
    def num_waiting(self) -> int:
        return self.scheduler.num_waiting

    @property
    def num_in_flight(self) -> int:
        """Plans sent and not confirmed."""
        return len(self.window)

    def is_stuck(self, now: float) -> bool:
        """Whether a step takes suspiciously long: the worker has proven none lately."""
        since = self.window.since
        return since is not None and now - since >= self.config.readiness_s

    def count_ahead(self, request: Request) -> int:
        """Requests that would get a row before this one, if it came now."""
        return self.scheduler.count_ahead(request)

    @property
    def is_idle(self) -> bool:
        """Nothing to compute and nothing awaited."""
        return not (len(self.window) or self.scheduler.has_work)

    # Messages of the worker.

    def _on_step_result(self, message: worker_pb2.StepResult, now: float) -> None:
        columns = decode_step_result(message)
        if columns.version <= self._reset_version:
            return
        oldest = self.window.oldest
        if columns.version != oldest or columns.step != 0:
            self._answer_with_reset(
                f"result of plan {columns.version} step {columns.step}, expected {oldest} step 0"
            )
            return
        try:
            update = self.scheduler.update(
                Version(columns.version),
                columns.step,
                columns.counts,
                columns.token_ids,
                columns.finished_rows,
                columns.finish_reasons,
            )
        except ResultMismatchError as error:
            self._answer_with_reset(str(error))
            return
        waited_us = columns.waited_us
        self.window.confirm(
            now,
            device_s=columns.device_time_us / 1e6,
            waited_s=None if waited_us is None else waited_us / 1e6,
        )
        self.confirmed_version = columns.version
        self._resets_in_a_row = 0
        self.counters.steps += 1
        self.counters.wasted_steps += update.is_wasted
        self.counters.wasted_rows += update.num_wasted
        self.counters.generation_tokens += len(update.token_ids)
        self.counters.device_time_us += columns.device_time_us
        self._count_started(update)
        changes = self.scheduler.kv_cache_manager.pool.take_changes()
        if changes:
            self._output.index_changed(changes)
        self._output.advance(update)

    def _on_nack(self, nack: worker_pb2.Nack) -> None:
        if nack.version <= self._reset_version:
            return
        self.counters.num_nacks += 1
        self._answer_with_reset(f"plan {nack.version} refused: {nack.status.message[:500]}")

    def _on_step_failed(self, failed: worker_pb2.StepFailed) -> None:
        if failed.version <= self._reset_version:
            return
        if failed.version > self.sent_version:
            # A contradiction, like any other: nobody is to blame for a step that was not ordered.
            self._answer_with_reset(f"failure of plan {failed.version}, which was never sent")
            return
        self.counters.num_step_failures += 1
        blamed = self.scheduler.requests_in_flight()
        # Closed before anything else, so that losing the replica over it marks nobody twice.
        self.scheduler.reset()
        self.window.clear()
        self._mark_lost(blamed)
        self._answer_with_reset(
            f"step of plan {failed.version} failed: {failed.status.message[:500]}"
        )

    def _answer_with_reset(self, cause: str) -> None:
        """Close everything in flight as never run; the live sequences are replayed."""
        self._resets_in_a_row += 1
        logger.warning(
            "reset: sent_version=%d confirmed_version=%d in_a_row=%d cause=%s",
            self.sent_version,
            self.confirmed_version,
            self._resets_in_a_row,
            cause,
        )
        if self._resets_in_a_row >= MAX_RESETS_IN_A_ROW:
            raise ProtocolError(
                "TOO_MANY_RESETS",
                f"{self._resets_in_a_row} times in a row the answer had to be a Reset, with no "
                f"confirmed step between. The last cause: {cause}",
                # Not for good: the worker may come back, and its requests carry their marks.
                code=Code.ABORTED,
                limit=MAX_RESETS_IN_A_ROW,
            )
        self.scheduler.reset()
        self._send_reset()

    # Messages to the worker.

    def _send_reset(self) -> None:
        self.sent_version += 1
        self._reset_version = self.sent_version
        self.confirmed_version = self.sent_version
        self.window.clear()
        self.counters.num_resets += 1
        self._output.send(
            worker_pb2.ControlMessage(reset=worker_pb2.Reset(version=self.sent_version))
        )

    def _send_plan(self, step: ScheduledStep, now: float) -> None:
        message = worker_pb2.ControlMessage(plan=encode_plan(step))
        self.sent_version = int(step.version)
        self.window.sent(self.sent_version, now, num_chunk_tokens=int(step.chunk_num_tokens.sum()))
        self.counters.sequences_started += len(step.added)
        self.counters.plans_sent += 1
        self.counters.plan_bytes += message.ByteSize()
        self.counters.prompt_tokens_sent += count_prompt_tokens(step)
        self.counters.replayed_tokens += _count_replayed(step)
        self._output.send(message)
        for added in step.added:
            sequence, request = added.sequence, added.sequence.request
            if sequence.num_admissions == 1 and sequence is request.live_sequences[0]:
                self._output.started(request)

    # Losses.

    def _mark_lost(self, requests: Iterable[Request]) -> None:
        """Count a loss for each; fail those at their last one."""
        for request, error in mark_lost(requests):
            self.abort(request)
            self._output.fail(request, error)

    def _count_started(self, update: StepUpdate) -> None:
        if self._unstarted_sequences:
            # Sets, because among hundreds of sequences that go on few begin.
            for sequence in self._unstarted_sequences.intersection(update.sequences):
                self._started(sequence.request)
            for sequence in update.finished:
                self._started(sequence.request)

    def _started(self, request: Request) -> None:
        num_tokens, num_uncached = self._unstarted.pop(request, (0, 0))
        self.unstarted_tokens -= num_tokens
        self.uncached_tokens -= num_uncached
        self._unstarted_sequences.difference_update(request.sequences)


def _count_replayed(step: ScheduledStep) -> int:
    return sum(
        added.token_ids.size - added.num_computed_tokens
        for added in step.added
        if added.sequence.num_admissions > 1
    )
