from __future__ import annotations

import numpy as np
import pytest

from control_plane.request import FinishReason, Request, SamplingParams, Sequence, Version
from control_plane.running_batch import InFlightStep, RunningBatch
from control_plane.scheduled_step import ResultMismatchError
from control_plane.step_result import check_result, resolve_tokens


def new_sequence(name: str) -> Sequence:
    return Request(
        req_id=name,
        prompt_token_ids=[1],
        sampling=SamplingParams(),
        seed=0,
        max_total_tokens=9,
        arrival=0,
    ).sequences[0]


@pytest.fixture
def batch() -> RunningBatch:
    batch = RunningBatch(6)
    for name in "abcdef":
        batch.add(new_sequence(name), num_computed=0, num_known=1)
    return batch


@pytest.fixture
def step(batch: RunningBatch) -> InFlightStep:
    """Rows 1, 3 and 4 sample; row 4 for the last time."""
    rows = np.array([1, 3, 4], dtype=np.int32)
    return InFlightStep(
        version=Version(5),
        rows=rows,
        sequences=batch.sequences_at(rows),
        incarnations=batch.incarnation[rows],
        num_releases=batch.num_releases,
        ending=[4],
        chunked=[],
    )


def columns(
    counts: list[int], tokens: list[int], finished: dict[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    return (
        np.array(counts, dtype=np.uint8),
        np.array(tokens, dtype=np.int32),
        np.array(list(finished), dtype=np.int32),
        np.array(list(finished.values()), dtype=np.uint8),
    )


@pytest.mark.parametrize(
    ("counts", "tokens", "finished", "message"),
    [
        ([1, 1], [5, 5], {4: 2}, "3 rows ran, the result has 2 counts"),
        ([1, 2, 1], [5, 5, 5, 5], {4: 2}, "a count is 2"),
        ([1, 1, 1], [5, 5], {4: 2}, "counts say 3 tokens, there are 2"),
        ([1, 1, 1], [5, -1, 5], {4: 2}, r"token ids -1..5, limit \[0, 10"),
        ([1, 1, 1], [5, 10, 5], {4: 2}, r"token ids 5..10, limit \[0, 10"),
        ([1, 0, 1], [5, 5], {4: 2}, "no token for row 3"),
        ([1, 0, 1], [5, 5], {3: 1, 4: 2}, "row 3 ended with STOP and 0 tokens"),
        ([1, 1, 1], [5, 5, 5], {3: 4, 4: 2}, "row 3 ended with ERROR and 1 tokens"),
        ([1, 1, 1], [5, 5, 5], {}, "row 4 reached its length limit and goes on"),
        ([1, 1, 1], [5, 5, 5], {3: 2, 4: 2}, "row 3 cannot end with finish reason 2"),
        ([1, 1, 1], [5, 5, 5], {4: 3}, "row 4 cannot end with finish reason 3"),
        ([1, 1, 1], [5, 5, 5], {2: 1, 4: 2}, "not ascending among the rows that ran, at 2"),
        ([1, 1, 1], [5, 5, 5], {4: 2, 5: 1}, "not ascending among the rows that ran, at 5"),
        ([1, 1, 1], [5, 5, 5], {4: 2, 1: 1}, "not ascending among the rows that ran, at 1"),
    ],
)
def test_result_that_cannot_be_true_is_refused(
    step: InFlightStep,
    counts: list[int],
    tokens: list[int],
    finished: dict[int, int],
    message: str,
):
    with pytest.raises(ResultMismatchError, match=f"plan 5: .*{message}"):
        check_result(step, *columns(counts, tokens, finished), vocab_size=10)


def test_finished_rows_and_reasons_are_parallel(step: InFlightStep):
    counts, tokens, rows, _ = columns([1, 1, 1], [5, 5, 5], {4: 2})
    with pytest.raises(ResultMismatchError, match="1 finished rows, 0 finish reasons"):
        check_result(step, counts, tokens, rows, np.zeros(0, dtype=np.uint8), vocab_size=10)


def test_finished_rows_are_named_by_their_place(step: InFlightStep):
    assert check_result(step, *columns([0, 1, 1], [5, 6], {1: 4, 4: 2}), vocab_size=10) == {
        0: FinishReason.ERROR,
        2: FinishReason.LENGTH,
    }


def test_sequence_that_ended_may_be_silent_or_not(step: InFlightStep):
    step.sequences[0].finish_reason = FinishReason.STOP
    assert check_result(step, *columns([0, 1, 1], [5, 6], {4: 2}), vocab_size=10)
    assert check_result(step, *columns([1, 1, 1], [5, 5, 6], {4: 2}), vocab_size=10)


def test_tokens_go_to_whom_the_step_was_ordered_for(batch: RunningBatch, step: InFlightStep):
    ended, preempted, running = step.sequences
    batch.release(ended)
    ended.finish_reason = FinishReason.ABORT
    batch.release(preempted)
    newcomer = new_sequence("g")
    assert batch.add(newcomer, num_computed=0, num_known=1) == 1
    counts, tokens, _, _ = columns([1, 1, 1], [5, 6, 7], {})
    rows, update = resolve_tokens(step, batch, counts, tokens)
    assert rows.tolist() == [4]
    assert update.sequences == [preempted, running]
    assert update.token_ids == [6, 7]
    assert (update.num_wasted, update.is_wasted) == (1, False)


def test_silent_rows_get_nothing(batch: RunningBatch, step: InFlightStep):
    counts, tokens, _, _ = columns([1, 0, 1], [5, 7], {})
    rows, update = resolve_tokens(step, batch, counts, tokens)
    assert rows.tolist() == [1, 4]
    assert update.sequences == [step.sequences[0], step.sequences[2]]
    assert update.token_ids == [5, 7]
    # It is running still: it must have ended with an error.
    assert update.num_wasted == 0
