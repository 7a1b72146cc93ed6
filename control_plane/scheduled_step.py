"""What goes into and comes out of the scheduler: one ordered step, and what its result changed.

Owns: the shapes of both. Does not know: protos, streams, how decisions are taken.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from control_plane.request import Sequence, Version


class ResultMismatchError(ValueError):
    """A step's result contradicts what was ordered. Nothing was changed; the worker is at fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedSequence:
    """A sequence that gets a row with this step.

    Attributes:
        row: Free once the step's removed rows are.
        sequence: Whose log `token_ids` is a copy of.
        token_ids: int32, prompt and output so far.
        num_computed_tokens: Tokens whose KV is in the hit blocks already.
        block_ids: int32, its whole table for `token_ids`; the first `num_hit_blocks` are hits, the
            others are handed out by this step.
        num_hit_blocks: Prefix hits; num_computed_tokens == num_hit_blocks * block_size.
    """

    row: int
    sequence: Sequence
    token_ids: NDArray[np.int32]
    num_computed_tokens: int
    block_ids: NDArray[np.int32]
    num_hit_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledStep:
    """One step to order: deltas, applied in field order, then work. Arrays are int32, not to write.

    Attributes:
        version: The plan's version.
        removed_rows: Ascending.
        added: By row, ascending.
        appended_rows: Ascending; row i gets the next appended_counts[i] of appended_block_ids.
        appended_counts: Parallel to appended_rows.
        appended_block_ids: Handed out by this step.
        chunk_rows: Ascending; rows in prefill that compute.
        chunk_num_tokens: Parallel to chunk_rows.
        sampled_rows: Ascending; the rows that the result reports on, in the order of its columns.
        num_tokens: Tokens computed in this step.
    """

    version: Version
    removed_rows: NDArray[np.int32]
    added: list[AddedSequence]
    appended_rows: NDArray[np.int32]
    appended_counts: NDArray[np.int32]
    appended_block_ids: NDArray[np.int32]
    chunk_rows: NDArray[np.int32]
    chunk_num_tokens: NDArray[np.int32]
    sampled_rows: NDArray[np.int32]
    num_tokens: int


@dataclass(slots=True, kw_only=True)
class StepUpdate:
    """What one result changed.

    Attributes:
        sequences: Live ones that got a token, parallel to `token_ids`. Borrowed, not to write.
        token_ids: One per sequence; already appended to its log.
        finished: Sequences that this result ended.
        num_wasted: Rows that the device had in this step for sequences that had ended before; what
            it computed for them is dropped.
        is_wasted: The step had no other rows.
    """

    sequences: list[Sequence]
    token_ids: list[int]
    finished: list[Sequence] = field(default_factory=list["Sequence"])
    num_wasted: int = 0
    is_wasted: bool = False
