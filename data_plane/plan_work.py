"""The work of a plan's steps, derived from its draft: which rows compute how many tokens where.

Owns: the rules both planes share. A row past its prefill computes one token per step while it has
fewer than max_total - 1 computed and is not paused; a listed chunk computes the next known tokens
of a row in prefill; a chunk that ends with the last known token samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from data_plane.plan_refused import PlanRefused, Refusal
from data_plane.step_work import BlockCopies, BoolArray, Forks, Int32Array, Int64Array, StepWork

if TYPE_CHECKING:
    import numpy.typing as npt

    from data_plane.plan_draft import Deltas, PlanDraft

_NO_FORKS = Forks()
_NO_COPIES = BlockCopies()
_NO_IDS = np.empty(0, np.int32)


def order_steps(draft: PlanDraft, deltas: Deltas, version: int) -> list[StepWork]:
    """Check the plan's work and move the draft's rows on.

    Returns:
        One StepWork per step; the first carries the deltas.

    Raises:
        PlanRefused: a row may not or cannot compute what it shall.
    """
    columns = draft.columns
    num_steps = columns.num_steps
    if num_steps > 1:
        _check_several_steps(draft, num_steps)
    works: list[StepWork] = []
    for step in range(num_steps):
        is_first = step == 0
        rows, num_new, starts, samples, is_decode = _advance(draft, is_first=is_first)
        works.append(
            StepWork(
                version=version,
                step=step,
                is_last_step=step == num_steps - 1,
                removed_rows=columns.removed_rows if is_first else _NO_IDS,
                added=columns.added if is_first else (),
                forks=deltas.forks if is_first else _NO_FORKS,
                copies=columns.copies if is_first else _NO_COPIES,
                appended_rows=columns.appended_rows if is_first else _NO_IDS,
                appended_counts=columns.appended_counts if is_first else _NO_IDS,
                appended_block_ids=columns.appended_block_ids if is_first else _NO_IDS,
                handed_out=deltas.handed_out if is_first else _NO_IDS,
                rows=rows,
                num_new_tokens=num_new,
                start_positions=starts,
                samples=samples,
                is_decode=is_decode,
                chunk_token_ids=_chunk_tokens(draft) if is_first else _NO_IDS,
            )
        )
    return works


def _check_several_steps(draft: PlanDraft, num_steps: int) -> None:
    rows = draft.rows
    occupied = rows.occupied
    in_prefill = bool((occupied & (rows.num_computed < rows.num_known)).any())
    running = occupied & ~rows.paused
    left = (rows.max_total - 1 - rows.num_computed)[running]
    most = int(left.max()) if left.size else 0
    if in_prefill or num_steps > most:
        raise PlanRefused(
            Refusal.BAD_NUM_STEPS,
            f"num_steps is {num_steps}, but "
            + ("a row is in prefill" if in_prefill else f"no row has more than {most} left"),
            field="num_steps",
            value=num_steps,
            limit=1 if in_prefill else most,
        )


def _advance(
    draft: PlanDraft, *, is_first: bool
) -> tuple[Int32Array, Int32Array, Int64Array, BoolArray, BoolArray]:
    """Order one step: check its rows, move them on, and return its columns."""
    state, columns = draft.rows, draft.columns
    decodes = state.num_computed >= state.num_known
    decodes &= state.occupied
    decodes &= ~state.paused
    decodes &= state.num_computed < state.max_total - 1
    num_new_by_row = decodes.astype(np.int32)
    takes_part = decodes
    if is_first and (columns.chunk_rows.size or draft.sampling_children):
        takes_part = decodes.copy()
        if columns.chunk_rows.size:
            _check_chunks(draft)
            num_new_by_row[columns.chunk_rows] = columns.chunk_num_tokens
            takes_part[columns.chunk_rows] = True
        if draft.sampling_children:
            takes_part[draft.sampling_children] = True
            state.num_computed[draft.sampling_children] = state.num_known[draft.sampling_children]
    rows = np.flatnonzero(takes_part)
    num_new = num_new_by_row[rows]
    starts = state.num_computed[rows]
    ends = starts + num_new
    num_tokens = int(num_new.sum(dtype=np.int64))
    if num_tokens > draft.limits.max_num_batched_tokens:
        raise PlanRefused(
            Refusal.TOO_MANY_TOKENS,
            f"a step would compute {num_tokens} tokens, the limit is "
            f"{draft.limits.max_num_batched_tokens}",
            field="chunk_num_tokens",
            value=num_tokens,
            limit=draft.limits.max_num_batched_tokens,
        )
    _check_tables(draft, rows, num_new, starts, ends)
    draft.share_after_step()
    state.num_computed[rows] = ends
    return (
        rows.astype(np.int32),
        num_new,
        starts,
        ends >= state.num_known[rows],
        decodes[rows],
    )


def _check_chunks(draft: PlanDraft) -> None:
    state = draft.rows
    rows, counts = draft.columns.chunk_rows, draft.columns.chunk_num_tokens
    draft.require_occupied("chunk_rows", rows)
    in_prefill = state.num_computed[rows] < state.num_known[rows]
    if draft.sampling_children:
        in_prefill &= ~np.isin(rows, draft.sampling_children)
    draft.require_state("chunk_rows", rows, in_prefill, "past its prefill")
    excess = state.num_computed[rows] + counts > state.num_known[rows]
    if excess.any():
        at = int(excess.argmax())
        row = int(rows[at])
        left = int(state.num_known[row] - state.num_computed[row])
        raise PlanRefused(
            Refusal.VALUE_OUT_OF_RANGE,
            f"row {row} shall compute {int(counts[at])} tokens of its prefill but has {left} left",
            field="chunk_num_tokens",
            row=row,
            value=int(counts[at]),
            limit=left,
        )


def _check_tables(
    draft: PlanDraft,
    rows: npt.NDArray[np.int64],
    num_new: Int32Array,
    starts: Int64Array,
    ends: Int64Array,
) -> None:
    """Check that tables cover the work, and that nothing shared or cached is written."""
    state, block_size = draft.rows, draft.limits.block_size
    short = ends > state.num_blocks[rows] * block_size
    if short.any():
        at = int(short.argmax())
        row = int(rows[at])
        raise PlanRefused(
            Refusal.TABLE_TOO_SHORT,
            f"row {row} has {int(state.num_blocks[row])} blocks of {block_size} tokens and "
            f"shall compute up to token {int(ends[at])}",
            field="block_ids",
            row=row,
            value=int(state.num_blocks[row]),
            limit=-(-int(ends[at]) // block_size),
        )
    first = starts // block_size
    bad = (first < state.first_writable[rows]) & (num_new > 0)
    # Ids appended by this plan are held once. They are not in the table yet, where the null
    # block stands in their place, which nobody holds.
    one_entry = num_new == 1
    if draft.new_tables:
        is_new = np.zeros(state.occupied.size, np.bool_)
        is_new[list(draft.new_tables)] = True
        one_entry &= ~is_new[rows]
    entries = draft.state.table[rows, np.where(one_entry, first, 0)]
    bad |= (draft.holders[entries] > 1) & one_entry
    for at in np.flatnonzero(~one_entry & (num_new > 0)).tolist():
        table = draft.table_of(int(rows[at]))
        written = table[int(first[at]) : (int(ends[at]) - 1) // block_size + 1]
        bad[at] |= bool((draft.holders[written] > 1).any())
    if bad.any():
        at = int(bad.argmax())
        raise PlanRefused(
            Refusal.BLOCK_NOT_WRITABLE,
            f"row {int(rows[at])} would write from position {int(starts[at])} on into a block "
            f"that is a prefix hit or held by another row",
            field="block_ids",
            row=int(rows[at]),
            value=int(starts[at]),
        )


def _chunk_tokens(draft: PlanDraft) -> Int32Array:
    """Return the known tokens of this plan's chunks, in row order."""
    columns, state = draft.columns, draft.rows
    if not columns.chunk_rows.size:
        return _NO_IDS
    parts: list[Int32Array] = []
    for row, count in zip(
        columns.chunk_rows.tolist(), columns.chunk_num_tokens.tolist(), strict=True
    ):
        tokens = draft.new_tokens.get(row)
        if tokens is None:
            tokens = draft.state.known_tokens[row]
        end = int(state.num_computed[row])
        parts.append(tokens[end - count : end])
    return np.concatenate(parts)
