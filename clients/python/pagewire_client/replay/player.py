"""Plays a recording on a worker, event by event, and stops at the first difference.

Plans go out exactly as far ahead of results as they did when they were recorded. Versions are
shifted to where the worker is; nothing else of a plan changes.

Owns: the order of a replay. Does not know: files, processes, how a difference is said.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from google.protobuf import duration_pb2
from google.rpc import code_pb2

from pagewire_client.replay.comparison import (
    Difference,
    describe_failure,
    describe_sequence,
    first_difference,
    refusal,
)
from pagewire_client.replay.restore import ERROR, blocks_plans, rows_plans
from pagewire_client.replay.survey import Life, LifeTracker, Survey, survey_run
from pagewire_client.replay.worker_port import LEASE_S, WorkerGoneError, status
from protos.pagewire.v1 import worker_pb2
from protos.recorded_rows import RecordedRows
from protos.recording_file import RecordingError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagewire_client.replay.recording import Recording, Run
    from pagewire_client.replay.worker_port import Link, WorkerPort
    from protos.pagewire.v1 import recording_pb2

_MAX_LOOKAHEAD = 1 << 16


@dataclass(slots=True)
class Summary:
    """What a replay did.

    Attributes:
        difference: The first; None: there was none.
        num_plans: Sent to the worker as recorded.
        num_results: Compared.
        num_tokens: In them.
        num_streams: Times that the recorded worker attached, or was attached at a beginning.
        num_restored_blocks: Cached blocks from before the recording that were computed again.
        num_restored_rows: Sequences likewise.
        seconds: That all of it took.
        notes: What else people should know.
    """

    difference: Difference | None = None
    num_plans: int = 0
    num_results: int = 0
    num_tokens: int = 0
    num_streams: int = 0
    num_restored_blocks: int = 0
    num_restored_rows: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list[str])


class _DifferenceFoundError(Exception):
    def __init__(self, difference: Difference) -> None:
        super().__init__()
        self.difference = difference


class Player:
    """One replay of one recording."""

    def __init__(
        self,
        recording: Recording,
        port: WorkerPort,
        *,
        step_timeout_s: float,
        progress: Callable[[Summary, int], None],
    ) -> None:
        """Nothing happens before `play`.

        Args:
            recording: Opened.
            port: Entered; a worker attaches to it.
            step_timeout_s: How long a step may take.
            progress: Called now and then with what was done and how many plans there are.
        """
        self.summary = Summary()
        self._recording = recording
        self._port = port
        self._step_timeout_s = step_timeout_s
        self._progress = progress
        self._num_plans = 0
        self._link: Link | None = None
        self.last_link: Link | None = None
        self._epoch = b""
        self._version = 0  # last one sent to the worker
        self._offset = 0  # from recorded versions to those
        self._lives: list[Life] = []
        self._life: Life | None = None  # to be restored before the next Reset
        self._hello = worker_pb2.Hello()  # the recorded one
        self._welcome = worker_pb2.Welcome()
        self._recorded = RecordedRows()
        self._replayed = RecordedRows()
        self._reset_version = 0  # recorded

    async def play(self) -> Summary:
        """Play all of it, or up to the first difference.

        Raises:
            RecordingError: The recording cannot be played.
            WorkerGoneError: The worker cannot.
        """
        started_s = time.monotonic()
        runs = self._recording.runs
        surveys = [survey_run(run) for run in runs]
        self._num_plans = sum(survey.num_plans for survey in surveys)
        try:
            for run, survey in zip(runs, surveys, strict=True):
                await self._play_run(run, survey)
        except _DifferenceFoundError as found:
            self.summary.difference = found.difference
        self.summary.seconds = time.monotonic() - started_s
        return self.summary

    async def _play_run(self, run: Run, survey: Survey) -> None:
        header = run.header
        self._lives = survey.lives
        tracker = LifeTracker(header)
        if header.HasField("welcome"):
            self._hello = header.hello
            self._life = self._lives.pop(0)
            await self._attach(header.welcome)
            await self._restore_blocks()
            await self._restore_rows(header.version, run.rows())
        for record in run.events():
            if tracker.begins(record):
                self._life = self._lives.pop(0)
            event = record.WhichOneof("event")
            if event == "sent":
                await self._send(record.sent)
            elif event == "received":
                await self._receive(record.received)
            elif event == "stream_ended":
                self._detach()
            self._progress(self.summary, self._num_plans)
        self._detach()
        torn = run.segments[-1].torn_bytes
        if torn:
            self.summary.notes.append(
                f"{run.segments[-1].path} ends with {torn} bytes of an unfinished record, as a "
                "crash leaves them; they were left out"
            )

    # What was sent.

    async def _send(self, message: worker_pb2.ControlMessage) -> None:
        kind = message.WhichOneof("message")
        if kind == "welcome":
            await self._attach(message.welcome)
        elif kind == "reset":
            await self._restore_blocks()
            version = message.reset.version
            self._offset = max(0, self._version + 1 - version)
            await self._send_reset(version + self._offset)
            self._reset_version = version
            self._recorded.reset(version)
        elif kind == "plan":
            self._recorded.order(message.plan)
            if len(self._recorded.unconfirmed) > self._welcome.lookahead + 1:
                raise RecordingError(
                    f"plan {message.plan.version} is one too many: with a lookahead of "
                    f"{self._welcome.lookahead}, {len(self._recorded.unconfirmed)} are unconfirmed"
                )
            await self._send_plan(message.plan, self._offset)
            self.summary.num_plans += 1

    async def _attach(self, welcome: worker_pb2.Welcome) -> None:
        if not (
            2 <= welcome.num_blocks <= self._hello.num_blocks
            and 0 <= welcome.lookahead <= _MAX_LOOKAHEAD
        ):
            raise RecordingError("a Welcome that no control plane can have sent")
        self._welcome = welcome
        self._detach()
        self._link = self.last_link = link = await self._port.next_link()
        self._check(link)
        self._version = max(self._version, link.hello.applied_version)
        message = worker_pb2.Welcome(
            term=max(1, link.hello.highest_term),
            stream_id=f"replay-{self.summary.num_streams + 1}",
            num_blocks=welcome.num_blocks,
            lookahead=welcome.lookahead,
            lease=duration_pb2.Duration(seconds=int(LEASE_S)),
        )
        await link.send(worker_pb2.ControlMessage(welcome=message))
        self.summary.num_streams += 1

    def _check(self, link: Link) -> None:
        header = self._recording.header
        problem = refusal(
            link.hello, self._hello, model=header.model, version=header.pagewire_version
        )
        if problem is None and self._epoch not in (b"", link.hello.epoch):
            problem = (
                "the worker was started anew in the midst of the replay, so its KV cache is not "
                "what was replayed so far; start the replay again"
            )
        if problem is not None:
            link.end(status("CANNOT_REPLAY", problem, code=code_pb2.FAILED_PRECONDITION))
            raise WorkerGoneError(problem)
        self._epoch = link.hello.epoch

    def _detach(self) -> None:
        """End the worker's stream, as the recorded one ended; it dials again by itself."""
        if self._link is not None:
            text = "The recorded stream ended here."
            self._link.end(status("RECORDED_END", text, code=code_pb2.UNAVAILABLE))
            self._link = None

    async def _send_reset(self, version: int) -> None:
        assert self._link is not None
        self._version = version
        self._replayed.reset(version)
        await self._link.send(worker_pb2.ControlMessage(reset=worker_pb2.Reset(version=version)))

    async def _send_plan(self, plan: worker_pb2.Plan, offset: int) -> None:
        assert self._link is not None
        message = worker_pb2.ControlMessage(plan=plan)
        message.plan.base_version = plan.base_version + offset
        message.plan.version = self._version = plan.version + offset
        self._replayed.order(message.plan)
        await self._link.send(message)

    # What was received.

    async def _receive(self, message: worker_pb2.WorkerMessage) -> None:
        kind = message.WhichOneof("message")
        if kind == "hello":
            self._hello = message.hello
        elif kind == "step_result":
            await self._compare(message.step_result)
        elif kind == "nack" and message.nack.version > self._reset_version:
            await self._expect_refusal(message.nack)
        elif kind == "step_failed" and message.step_failed.version > self._reset_version:
            self.summary.notes.append(
                f"the step of plan {message.step_failed.version} failed when it was recorded: "
                f"{message.step_failed.status.message[:200]}; what followed it on the device was "
                "not compared until the Reset"
            )

    async def _compare(self, result: worker_pb2.StepResult) -> None:
        version, step = result.version, result.step
        if version <= self._reset_version:
            return  # left over from before a Reset
        where = f"plan {version}, step {step}"
        try:
            recorded = self._recorded.take(result)
        except RecordingError as error:
            raise _DifferenceFoundError(
                Difference(
                    where=where,
                    sequence="",
                    expected=f"a result that cannot be right: {error}",
                    got="not asked for",
                    hint="the worker that was recorded was at fault here",
                )
            ) from None
        replayed = await self._outcome(version, step)
        if not isinstance(replayed, worker_pb2.StepResult):
            raise _DifferenceFoundError(
                Difference(
                    where=where, sequence="", expected="a result", got=describe_failure(replayed)
                )
            )
        try:
            outcomes = self._replayed.take(replayed)
        except RecordingError as error:
            raise _DifferenceFoundError(
                Difference(where=where, sequence="", expected="a result", got=str(error))
            ) from None
        difference = first_difference(version, step, recorded, outcomes)
        if difference is not None:
            raise _DifferenceFoundError(self._with_hint(difference))
        self.summary.num_results += 1
        self.summary.num_tokens += sum(len(outcome.tokens) for outcome in recorded)

    async def _outcome(
        self, version: int, step: int
    ) -> worker_pb2.StepResult | worker_pb2.Nack | worker_pb2.StepFailed:
        assert self._link is not None
        try:
            async with asyncio.timeout(self._step_timeout_s):
                outcome = await self._link.outcome(version + self._offset, step)
        except TimeoutError:
            raise WorkerGoneError(
                f"no result of plan {version} within {self._step_timeout_s:g} s; give it more with "
                "--step-timeout-s"
            ) from None
        if outcome is None:
            raise WorkerGoneError(f"the worker's stream broke while it ran plan {version}")
        return outcome

    async def _expect_refusal(self, nack: worker_pb2.Nack) -> None:
        outcome = await self._outcome(nack.version, 0)
        if isinstance(outcome, worker_pb2.Nack):
            outcome.version -= self._offset
            if outcome.version == nack.version:
                return
        raise _DifferenceFoundError(
            Difference(
                where=f"plan {nack.version}",
                sequence="",
                expected=describe_failure(nack),
                got=describe_failure(outcome),
            )
        )

    # Before a run begins.

    async def _restore_blocks(self) -> None:
        """Compute the cached blocks that the next life will hit, then leave no row behind."""
        life, self._life = self._life, None
        if life is None or not life.content_of:
            return
        await self._send_reset(self._version + 1)
        for plan in blocks_plans(life, self._hello, self._welcome.num_blocks):
            await self._run_own(plan)
        self.summary.num_restored_blocks += len(life.content_of)

    async def _restore_rows(self, version: int, rows: list[recording_pb2.RecordedRow]) -> None:
        await self._send_reset(self._version + 1)
        for plan in rows_plans(rows, self._hello):
            await self._run_own(plan)
        self._offset = self._version - version
        self._reset_version = version
        self._recorded.restore(version, rows)
        for sequence in self._recorded:
            restored = self._replayed.get(sequence.row)
            is_same = restored is not None and (
                restored.tokens == sequence.tokens
                and restored.finish_reason == sequence.finish_reason
            )
            if not is_same:
                got = restored.tokens[-1] if restored is not None else None
                what = "nothing" if sequence.finish_reason == ERROR else sequence.tokens[-1]
                raise _DifferenceFoundError(
                    self._with_hint(
                        Difference(
                            where=f"plan {version}, row {sequence.row}",
                            sequence=describe_sequence(sequence, 1),
                            expected=f"token {what}",
                            got=f"token {got} when its last step was repeated at the beginning",
                        )
                    )
                )
        self.summary.num_restored_rows += len(rows)

    async def _run_own(self, plan: worker_pb2.Plan) -> None:
        plan.base_version, plan.version = 0, 1
        self._offset, version = self._version, 1
        await self._send_plan(plan, self._offset)
        outcome = await self._outcome(version, 0)
        if not isinstance(outcome, worker_pb2.StepResult):
            raise RecordingError(
                f"the state in which it begins cannot be: the worker {describe_failure(outcome)}"
            )
        self._replayed.take(outcome)

    def _with_hint(self, difference: Difference) -> Difference:
        hints: list[str] = []
        link = self._link
        recorded = (self._hello.backend, self._hello.device)
        if link is not None and (link.hello.backend, link.hello.device) != recorded:
            hints.append(
                f"recorded with {' on '.join(recorded)}, replayed with {link.hello.backend} on "
                f"{link.hello.device}: rounding differs, and decides where two tokens are close"
            )
        if self.summary.num_restored_blocks or self.summary.num_restored_rows:
            hints.append(
                "what was cached or running before the recording begins was computed anew, in "
                "other chunks than then"
            )
        return Difference(
            where=difference.where,
            sequence=difference.sequence,
            expected=difference.expected,
            got=difference.got,
            hint="; ".join(hints),
        )
