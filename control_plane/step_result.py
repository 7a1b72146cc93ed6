"""What a worker's report on a step says, given what was ordered, and whether that can be true.

Owns: the check, and whose tokens they are. Does not know: what follows; it changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from control_plane.request import FinishReason
from control_plane.scheduled_step import ResultMismatchError, StepUpdate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from control_plane.running_batch import InFlightStep, RunningBatch

_DEVICE_REASONS = {
    int(reason): reason for reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR)
}


def check_result(
    step: InFlightStep,
    counts: NDArray[np.uint8],
    token_ids: NDArray[np.int32],
    finished_rows: NDArray[np.int32],
    finish_reasons: NDArray[np.uint8],
    *,
    vocab_size: int,
) -> dict[int, FinishReason]:
    """Check the columns of a result against the step they report on.

    Args:
        step: As it was ordered.
        counts: Tokens per row that ran.
        token_ids: Those tokens, in row order.
        finished_rows: Rows that stopped in this step.
        finish_reasons: Why.
        vocab_size: Token ids are below it.

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
    if num_tokens and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size:
        raise ResultMismatchError(
            f"plan {step.version}: token ids {int(token_ids.min())}..{int(token_ids.max())}, limit "
            f"[0, {vocab_size})"
        )
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


def resolve_tokens(
    step: InFlightStep,
    batch: RunningBatch,
    counts: NDArray[np.uint8],
    token_ids: NDArray[np.int32],
) -> tuple[NDArray[np.int32], StepUpdate]:
    """Match the tokens of a checked result with the sequences they belong to.

    Returns:
        The rows that got a token and still are what they were when the step was ordered, and who
        got which token. Those of sequences that ended meanwhile are dropped and counted.
    """
    rows = step.rows
    tokens: list[int] = token_ids.tolist()
    has_all = len(tokens) == rows.size
    if has_all and step.num_releases == batch.num_releases:
        return rows, StepUpdate(sequences=step.sequences, token_ids=tokens)
    is_stale = batch.incarnation[rows] != step.incarnations
    left_out: set[int] = set()
    for index in np.flatnonzero(is_stale).tolist():
        # A preempted sequence is stale but live: it gets its tokens.
        if step.sequences[index].finish_reason is not None:
            left_out.add(index)
    if not has_all:
        column = np.zeros(rows.size, dtype=np.int32)
        column[counts != 0] = token_ids
        tokens = column.tolist()
        left_out.update(np.flatnonzero(counts == 0).tolist())
    sequences = list(step.sequences)
    # A row that ends with an error in this very step is silent, too, and was not in vain.
    num_wasted = sum(sequences[index].finish_reason is not None for index in left_out)
    for index in sorted(left_out, reverse=True):
        del sequences[index], tokens[index]
    update = StepUpdate(
        sequences=sequences,
        token_ids=tokens,
        num_wasted=num_wasted,
        is_wasted=num_wasted == rows.size and not step.chunked,
    )
    return rows[~is_stale & (counts != 0)], update


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
