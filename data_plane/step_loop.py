"""Executes ordered steps: a launch thread that never waits for a result, and a result thread.

Owns: the queue between the control stream and the runner, and the order of outcomes. Does not
know: messages, versions' rules, tensors.
"""

from __future__ import annotations

import logging
import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from data_plane.step_work import StepError, StepOutput, StepRunner, StepWork

if TYPE_CHECKING:
    from collections.abc import Callable

    from data_plane.step_work import PendingStep

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Ordered:
    session: int
    work: StepWork


@dataclass(frozen=True, slots=True)
class _Barrier:
    """Completed once everything launched before it has ended."""

    done: Future[None]
    resets_runner: bool


@dataclass(frozen=True, slots=True)
class _Launched:
    session: int
    work: StepWork
    pending: PendingStep


Outcome = StepOutput | StepError


class StepLoop:
    """Feeds a StepRunner.

    A session is what lies between two calls of `reset` or `drop_unexecuted`: ordered steps of an
    older session that have not been launched are skipped, and so is everything behind a failure.

    Args:
        runner: Its `launch` and `reset` are called on the launch thread only.
        on_outcome: Called on either of the two threads, in the order of the steps, once per
            launched step up to and including the first failure of a session.
    """

    def __init__(self, runner: StepRunner, on_outcome: Callable[[StepWork, Outcome], None]) -> None:
        self._runner = runner
        self._on_outcome = on_outcome
        self._orders: queue.SimpleQueue[_Ordered | _Barrier | None] = queue.SimpleQueue()
        self._launched: queue.SimpleQueue[_Launched | _Barrier | None] = queue.SimpleQueue()
        self._session = 0
        # Written by either thread, read by both: a session number, never decremented.
        self._failed_session = -1
        # Daemons: a device call that never returns must not keep the process from exiting.
        self._threads = [
            threading.Thread(target=self._launch_forever, name="launch", daemon=True),
            threading.Thread(target=self._report_forever, name="results", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def submit(self, work: StepWork) -> None:
        """Order a step behind all others. The caller bounds how many are unconfirmed."""
        self._orders.put(_Ordered(self._session, work))

    def reset(self) -> Future[None]:
        """Drop unexecuted steps; once the launched ones have ended, reset the runner.

        Steps submitted from now on run behind the reset. Waiting for the future is optional.
        """
        return self._barrier(resets_runner=True)

    def drop_unexecuted(self) -> Future[None]:
        """Drop unexecuted steps; the future completes when the launched ones have ended."""
        return self._barrier(resets_runner=False)

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Drop unexecuted steps and end the threads, waiting for a running step that long.

        Returns:
            Whether both threads have ended.
        """
        self._session += 1
        self._orders.put(None)
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _barrier(self, *, resets_runner: bool) -> Future[None]:
        self._session += 1
        done: Future[None] = Future()
        self._orders.put(_Barrier(done, resets_runner))
        return done

    def _is_current(self, session: int) -> bool:
        return session == self._session and session != self._failed_session

    def _launch_forever(self) -> None:
        while (order := self._orders.get()) is not None:
            if isinstance(order, _Barrier):
                self._pass_barrier(order)
            elif self._is_current(order.session):
                try:
                    pending = self._runner.launch(order.work)
                except Exception as error:
                    # Behind the results of its predecessors, which the result thread holds.
                    self._launched.put(
                        _Launched(order.session, order.work, _FailedLaunch(as_step_error(error)))
                    )
                    self._failed_session = max(self._failed_session, order.session)
                else:
                    self._launched.put(_Launched(order.session, order.work, pending))
        self._launched.put(None)

    def _pass_barrier(self, barrier: _Barrier) -> None:
        drained: Future[None] = Future()
        self._launched.put(_Barrier(drained, resets_runner=False))
        drained.result()
        try:
            if barrier.resets_runner:
                self._runner.reset()
        except BaseException as error:
            barrier.done.set_exception(error)
            raise
        barrier.done.set_result(None)

    def _report_forever(self) -> None:
        reported_failure = -1
        while (launched := self._launched.get()) is not None:
            if isinstance(launched, _Barrier):
                launched.done.set_result(None)
                continue
            # Waited for even if nobody asks any more: behind a barrier the device is idle.
            try:
                outcome: Outcome = launched.pending.wait()
            except Exception as error:
                outcome = as_step_error(error)
            if launched.session == reported_failure:
                continue
            if isinstance(outcome, StepError):
                reported_failure = launched.session
                self._failed_session = max(self._failed_session, launched.session)
            self._on_outcome(launched.work, outcome)


class _FailedLaunch:
    """Stands in the order of results for a step that could not be launched."""

    def __init__(self, error: StepError) -> None:
        self._error = error

    def wait(self) -> StepOutput:
        raise self._error


def as_step_error(error: Exception) -> StepError:
    """Return `error` if it is a StepError; otherwise log it and return one that names its type.

    What an unplanned exception says may quote a prompt: it belongs in the log, not on the wire.
    """
    if isinstance(error, StepError):
        return error
    logger.error("step raised: error=%s", type(error).__name__, exc_info=error)
    return StepError(f"the step raised {type(error).__name__}; see the worker's log")
