"""The launch and result threads: order, failure, reset."""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING

import numpy as np
import pytest
from fake_worker import FakeModelRunner
from scripted_control_plane import added_row, plan

from data_plane.row_table import RowTable
from data_plane.step_loop import StepLoop
from data_plane.step_work import StepError, StepOutput, StepWork

if TYPE_CHECKING:
    from collections.abc import Iterator

    from data_plane.step_loop import Outcome

TIMEOUT_S = 20.0


class Harness:
    def __init__(self) -> None:
        self.runner = FakeModelRunner()
        self.outcomes: queue.Queue[tuple[StepWork, Outcome]] = queue.Queue()
        self.loop = StepLoop(self.runner, lambda work, outcome: self.outcomes.put((work, outcome)))
        self.loop.start()
        self.table = RowTable(
            max_num_seqs=8,
            num_blocks=64,
            max_model_len=128,
            block_size=4,
            max_num_batched_tokens=64,
            vocab_size=512,
        )

    def order(self, version: int) -> None:
        """Order a decode step; the first adds the row."""
        fields = {}
        if self.table.num_rows == 0:
            fields = {
                "added_rows": [added_row(0, [5, 6, 7], list(range(1, 7)))],
                "chunk_rows": [0],
                "chunk_num_tokens": [3],
            }
        [work] = self.table.apply(plan(version, **fields).plan)
        self.loop.submit(work)

    def outcome(self) -> tuple[int, Outcome]:
        work, outcome = self.outcomes.get(timeout=TIMEOUT_S)
        return work.version, outcome


@pytest.fixture
def harness() -> Iterator[Harness]:
    harness = Harness()
    yield harness
    harness.runner.gate.set()
    assert harness.loop.stop()


def test_outcomes_come_in_the_order_of_the_steps(harness: Harness) -> None:
    for version in range(1, 6):
        harness.order(version)
    outcomes = [harness.outcome() for _ in range(5)]
    assert [version for version, _ in outcomes] == [1, 2, 3, 4, 5]
    assert all(isinstance(outcome, StepOutput) for _, outcome in outcomes)


@pytest.mark.parametrize("where", ["fail_launch", "fail_wait"])
def test_nothing_is_reported_behind_a_failure_until_the_reset(harness: Harness, where: str) -> None:
    getattr(harness.runner, where).add(2)
    harness.runner.gate.clear()
    for version in range(1, 5):
        harness.order(version)
    harness.runner.gate.set()
    assert harness.outcome()[0] == 1
    version, outcome = harness.outcome()
    assert version == 2
    assert isinstance(outcome, StepError)
    harness.table.reset(10)
    harness.loop.reset().result(TIMEOUT_S)
    assert harness.outcomes.empty()
    assert harness.runner.num_resets == 1
    harness.order(11)
    assert harness.outcome()[0] == 11


def test_reset_skips_steps_that_were_not_launched(harness: Harness) -> None:
    harness.runner.gate.clear()
    harness.order(1)
    assert harness.runner.in_step.wait(TIMEOUT_S)
    harness.order(2)
    harness.order(3)
    done = harness.loop.reset()
    harness.table.reset(10)
    harness.order(11)
    assert not done.done()
    harness.runner.gate.set()
    done.result(TIMEOUT_S)
    assert [harness.outcome()[0], harness.outcome()[0]] == [1, 11]
    assert harness.runner.launched == [(1, 0), (11, 0)]


def test_dropping_unexecuted_steps_keeps_the_runners_rows(harness: Harness) -> None:
    harness.order(1)
    harness.outcome()
    harness.loop.drop_unexecuted().result(TIMEOUT_S)
    assert harness.runner.num_resets == 0


def test_unplanned_exception_becomes_a_step_error_that_quotes_nothing(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(work: StepWork) -> None:
        raise KeyError("a secret prompt")

    monkeypatch.setattr(harness.runner, "launch", explode)
    harness.order(1)
    _, outcome = harness.outcome()
    assert isinstance(outcome, StepError)
    assert outcome.message == "the step raised KeyError; see the worker's log"
    assert not outcome.is_fatal


def test_stop_does_not_wait_for_ever_for_a_step_that_hangs() -> None:
    harness = Harness()
    harness.runner.gate.clear()
    harness.order(1)
    assert harness.runner.in_step.wait(TIMEOUT_S)
    assert not harness.loop.stop(timeout_s=0.01)
    harness.runner.gate.set()
    assert harness.loop.stop()
    assert np.count_nonzero(harness.runner.generations) == 6
