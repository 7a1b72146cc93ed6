"""Whether a worker's report on a step can be true, given what was ordered.

Owns: that check. Does not know: what follows from a result; it changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from control_plane.request import FinishReason
from control_plane.scheduled_step import ResultMismatchError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from control_plane.running_batch import InFlightStep

_DEVICE_REASONS = {
    int(reason): reason for reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR)
}


def check_result(
    step: InFlightStep,
    counts: NDArray[np.uint8],
    token_ids: NDArray[np.int32],
    finished_rows: NDArray[np.int32],
    finish_reasons: NDArray[np.uint8],
) -> dict[int, FinishReason]:
    """Check the columns of a result against the step they report on.

    Returns:
        Which rows stopped in this step, by their index in `step.rows`.

    Raises:
        ResultMismatchError: they contradict it; the message says where.
    """
    num_rows = step.rows.size
    num_tokens = int(np.count_nonzero(counts))
    if counts.size != num_rows:
        raise ResultMismatchError(
            f"plan {step.version}: {num_rows} rows ran, the result has {counts.size} counts"
        )
    if num_rows and int(counts.max()) > 1:
        raise ResultMismatchError(f"plan {step.version}: a count is {int(counts.max())}, above 1")
    if token_ids.size != num_tokens:
        raise ResultMismatchError(
            f"plan {step.version}: counts say {num_tokens} tokens, there are {token_ids.size}"
        )
    if num_tokens and int(token_ids.min()) < 0:
        raise ResultMismatchError(f"plan {step.version}: token id {int(token_ids.min())}")
    finished = _finished(step, finished_rows, finish_reasons)
    for index, reason in finished.items():
        if (reason is FinishReason.ERROR) == bool(counts[index]):
            raise ResultMismatchError(
                f"plan {step.version}: row {step.rows[index]} ended with {reason.name} and "
                f"{counts[index]} tokens"
            )
    if num_tokens < num_rows:
        for index in np.flatnonzero(counts == 0).tolist():
            if step.sequences[index].finish_reason is None and index not in finished:
                raise ResultMismatchError(
                    f"plan {step.version}: no token for row {step.rows[index]}, which is running"
                )
    for row in step.ending:
        index = int(np.searchsorted(step.rows, row))
        if counts[index] and index not in finished:
            raise ResultMismatchError(
                f"plan {step.version}: row {row} reached its length limit and goes on"
            )
    return finished


def _finished(
    step: InFlightStep, finished_rows: NDArray[np.int32], finish_reasons: NDArray[np.uint8]
) -> dict[int, FinishReason]:
    if finished_rows.size != finish_reasons.size:
        raise ResultMismatchError(
            f"plan {step.version}: {finished_rows.size} finished rows, {finish_reasons.size} "
            "finish reasons"
        )
    finished: dict[int, FinishReason] = {}
    last_row = -1
    for row, number in zip(finished_rows.tolist(), finish_reasons.tolist(), strict=True):
        index = int(np.searchsorted(step.rows, row))
        if index == step.rows.size or step.rows[index] != row or row <= last_row:
            raise ResultMismatchError(
                f"plan {step.version}: finished rows {finished_rows.tolist()[:16]} are not "
                f"ascending among the rows that ran, at {row}"
            )
        reason = _DEVICE_REASONS.get(number)
        if reason is None or (reason is FinishReason.LENGTH and row not in step.ending):
            raise ResultMismatchError(
                f"plan {step.version}: row {row} cannot end with finish reason {number}"
            )
        finished[index] = reason
        last_row = row
    return finished
