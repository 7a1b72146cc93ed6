"""What passes between the control stream and whatever executes steps, as plain numpy data.

Owns: the shapes of a step's work and of its outcome, and the interface of a step runner.
Does not know: messages, versions' rules, torch. `row_table` makes StepWork, `model_runner` (or a
test's fake) executes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
UInt8Array = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    """Sampling parameters of a row, validated and with defaults filled in.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 keeps all tokens.
        top_p: In (0, 1].
        min_p: In [0, 1].
        min_tokens: No EOS and no stop token before this many output tokens, counted from the end
            of the prompt (`NewRow.num_prompt_tokens`), also after a replay.
        stop_token_ids: End the sequence, beside `NewRow.eos_token_ids`.
        ignore_eos: EOS tokens do not end the sequence; `stop_token_ids` still do.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRow:
    """A sequence that starts, or is replayed, in a row.

    Attributes:
        row: In [0, max_num_seqs).
        token_ids: [num_known] int32, prompt and output so far.
        num_prompt_tokens: How many of them are prompt.
        sequence_index: Part of the key of every random draw.
        seed: uint64, part of the key of every random draw.
        eos_token_ids: int32.
        max_total_tokens: A row that has this many tokens is finished with LENGTH.
        block_ids: int32, the row's table from the start, before this plan's copies and appends.
        num_hit_blocks: The first ones hold KV already; the others are handed out by this plan.
        num_computed_tokens: Tokens whose KV is already there; < num_known.
    """

    row: int
    token_ids: Int32Array
    num_prompt_tokens: int
    sequence_index: int
    seed: int
    sampling: RowSampling
    eos_token_ids: Int32Array
    max_total_tokens: int
    block_ids: Int32Array
    num_hit_blocks: int
    num_computed_tokens: int


def _no_int32() -> Int32Array:
    return np.empty(0, np.int32)


def _no_bool() -> BoolArray:
    return np.empty(0, np.bool_)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forks:
    """Rows that start as a copy of another row, as parallel columns.

    Attributes:
        parent_rows: int32.
        child_rows: int32. The child's device state and table become copies of the parent's.
        sequence_indices: int32, the children's own.
        token_ids: int32. -1: the child inherits the device's last token of its parent (or its
            logits, see shares_logits). >= 0: the child's next input.
        shares_logits: The parent computes its last known token in this very step: the child
            computes nothing and samples from the parent's logits with its own key. It is among
            `StepWork.rows`, with num_new_tokens 0 and samples set.
    """

    parent_rows: Int32Array = field(default_factory=_no_int32)
    child_rows: Int32Array = field(default_factory=_no_int32)
    sequence_indices: Int32Array = field(default_factory=_no_int32)
    token_ids: Int32Array = field(default_factory=_no_int32)
    shares_logits: BoolArray = field(default_factory=_no_bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopies:
    """Block contents to copy in every layer, then table[rows[i], indices[i]] = dst[i]; int32."""

    src: Int32Array = field(default_factory=_no_int32)
    dst: Int32Array = field(default_factory=_no_int32)
    rows: Int32Array = field(default_factory=_no_int32)
    indices: Int32Array = field(default_factory=_no_int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """One forward pass and the deltas to apply before it, in field order. Never mutated.

    Of a plan with several steps only the first StepWork carries deltas.

    Attributes:
        version: Of the plan.
        step: Index within the plan, from 0.
        is_last_step: Whether it is the plan's last.
        removed_rows: int32 ascending.
        added: Rows that start.
        forks: Rows that branch off.
        copies: Block contents to copy.
        appended_rows: int32 ascending; row appended_rows[i] gets the next appended_counts[i] ids
            of appended_block_ids (int32).
        handed_out: int32, every block id that this plan hands out (of added rows, copies and
            appends): their generation becomes `version`.
        rows: int32 ascending, rows that take part in this step.
        num_new_tokens: int32, parallel to rows: tokens it computes.
        start_positions: int64, parallel to rows: position of the first of them.
        samples: bool, parallel to rows: whether one token is drawn behind its last position.
            StepOutput is parallel to rows[samples].
        is_decode: bool, parallel to rows: it feeds the device's last token of the row (one
            token); otherwise its tokens come from chunk_token_ids.
        chunk_token_ids: int32, known tokens of the rows that are not decoding, concatenated in
            row order.
    """

    version: int
    step: int
    is_last_step: bool
    removed_rows: Int32Array
    added: tuple[NewRow, ...]
    forks: Forks
    copies: BlockCopies
    appended_rows: Int32Array
    appended_counts: Int32Array
    appended_block_ids: Int32Array
    handed_out: Int32Array
    rows: Int32Array
    num_new_tokens: Int32Array
    start_positions: Int64Array
    samples: BoolArray
    is_decode: BoolArray
    chunk_token_ids: Int32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What a step produced, as StepResult carries it.

    Attributes:
        counts: uint8, parallel to rows[samples]: tokens produced; 0 if the row had stopped on the
            device before, or produced nothing usable.
        token_ids: int32, those tokens concatenated in row order.
        finished_rows: int32 ascending, rows that stopped in this step.
        finish_reasons: uint8, parallel to finished_rows: values of the wire's FinishReason.
        device_time_us: Time the device spent.
    """

    counts: UInt8Array
    token_ids: Int32Array
    finished_rows: Int32Array
    finish_reasons: UInt8Array
    device_time_us: int = 0


class StepError(Exception):
    """A step could not be executed; the state behind it is undefined until the next reset.

    Attributes:
        code: gRPC status code number, e.g. 13 for INTERNAL, 8 for RESOURCE_EXHAUSTED.
        reason: Upper-case name for machines.
        is_fatal: The device context is lost: the process has to end.
    """

    def __init__(
        self, message: str, *, reason: str = "STEP_FAILED", code: int = 13, is_fatal: bool = False
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.code = code
        self.is_fatal = is_fatal


class PendingStep(Protocol):
    """A step that was ordered on the device. Waited for once, on another thread."""

    def wait(self) -> StepOutput:
        """Block until the step's results are on the host.

        Raises:
            StepError: the step failed on the device.
        """
        ...


class StepRunner(Protocol):
    """What the step loop drives: `ModelRunner`, or a fake. `launch` and `reset` come from one
    thread; `generations` may be read from another one while no step is running.
    """

    @property
    def generations(self) -> Int64Array:
        """[num_blocks] int64: version of the plan that last handed the block out, 0 for never."""
        ...

    def launch(self, work: StepWork) -> PendingStep:
        """Order the step on the device without waiting for it.

        Raises:
            StepError: it could not be ordered.
        """
        ...

    def reset(self) -> None:
        """Drop all rows; KV bytes and generations stay. No step is running."""
        ...
