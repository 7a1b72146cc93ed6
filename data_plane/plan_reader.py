"""Plan message to numpy columns: everything about a plan that can be checked without state.

Owns: well-formedness of columns, ranges of rows, block ids, token ids and parameters. Does not
know: which rows are occupied or which blocks are held; `plan_draft` checks that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from data_plane.plan_refused import PlanRefused, Refusal
from data_plane.step_work import BlockCopies, Int32Array, NewRow, RowSampling

if TYPE_CHECKING:
    from protos.pagewire.v1 import inference_pb2, worker_pb2

_INT32 = np.dtype("<i4")
_EMPTY = np.empty(0, np.int32)

MAX_TEMPERATURE = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds a plan's numbers; from Hello, `num_blocks` from Welcome.

    Attributes:
        max_num_seqs: Rows.
        num_blocks: Block ids are in [1, num_blocks).
        max_model_len: Longest sequence.
        block_size: Tokens per block; a power of two.
        max_num_batched_tokens: Most tokens of one step.
        vocab_size: Token ids are in [0, vocab_size).
    """

    max_num_seqs: int
    num_blocks: int
    max_model_len: int
    block_size: int
    max_num_batched_tokens: int
    vocab_size: int

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size must be a power of two, got {self.block_size}")
        if self.num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2, got {self.num_blocks}")
        for name in ("max_num_seqs", "max_model_len", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every row decodes one token per step"
            )

    @property
    def max_blocks_per_seq(self) -> int:
        return -(-self.max_model_len // self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkOrder:
    """One Fork message, its rows in range."""

    parent_row: int
    child_row: int
    sequence_index: int
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanColumns:
    """A plan whose columns are well-formed and whose ids are in range."""

    num_steps: int
    removed_rows: Int32Array
    added: tuple[NewRow, ...]
    forks: tuple[ForkOrder, ...]
    copies: BlockCopies
    appended_rows: Int32Array
    appended_counts: Int32Array
    appended_block_ids: Int32Array
    chunk_rows: Int32Array
    chunk_num_tokens: Int32Array
    paused_rows: Int32Array
    resumed_rows: Int32Array


_NO_COPIES = BlockCopies()


def read_plan(plan: worker_pb2.Plan, limits: Limits) -> PlanColumns:
    """Check what needs no state and return the plan's columns.

    Raises:
        PlanRefused: a column is malformed, a value outside its limit, a feature unsupported.
    """
    if plan.HasField("token_masks") or plan.HasField("drafts"):
        field = "token_masks" if plan.HasField("token_masks") else "drafts"
        raise PlanRefused(
            Refusal.UNSUPPORTED, f"{field} is set but not built into this worker", field=field
        )
    if plan.num_steps < 1:
        raise PlanRefused(
            Refusal.BAD_NUM_STEPS,
            f"num_steps is {plan.num_steps}, it must be at least 1",
            field="num_steps",
            value=plan.num_steps,
        )
    appended_rows = _read_rows("appended_rows", plan.appended_rows, limits)
    appended_counts = _read_column("appended_counts", plan.appended_counts)
    appended_block_ids = _read_block_ids("appended_block_ids", plan.appended_block_ids, limits)
    _check_counts("appended_counts", appended_counts, "appended_rows", appended_rows)
    # int64: a sum of hostile int32 counts must not wrap around to the right number.
    total = int(appended_counts.sum(dtype=np.int64)) if appended_counts.size else 0
    if total != appended_block_ids.size:
        raise PlanRefused(
            Refusal.MALFORMED_COLUMN,
            f"appended_counts add up to {total} but appended_block_ids has "
            f"{appended_block_ids.size} ids",
            field="appended_block_ids",
            value=appended_block_ids.size,
            limit=total,
        )
    chunk_rows = _read_rows("chunk_rows", plan.chunk_rows, limits)
    chunk_num_tokens = _read_column("chunk_num_tokens", plan.chunk_num_tokens)
    _check_counts("chunk_num_tokens", chunk_num_tokens, "chunk_rows", chunk_rows)
    return PlanColumns(
        num_steps=plan.num_steps,
        removed_rows=_read_rows("removed_rows", plan.removed_rows, limits),
        added=tuple(_read_added_row(row, limits) for row in plan.added_rows),
        forks=tuple(_read_fork(fork, limits) for fork in plan.forks),
        copies=_read_copies(plan.block_copies, limits)
        if plan.HasField("block_copies")
        else _NO_COPIES,
        appended_rows=appended_rows,
        appended_counts=appended_counts,
        appended_block_ids=appended_block_ids,
        chunk_rows=chunk_rows,
        chunk_num_tokens=chunk_num_tokens,
        paused_rows=_read_rows("paused_rows", plan.paused_rows, limits),
        resumed_rows=_read_rows("resumed_rows", plan.resumed_rows, limits),
    )


def _read_column(name: str, data: bytes) -> Int32Array:
    if not data:
        return _EMPTY
    if len(data) % _INT32.itemsize:
        raise PlanRefused(
            Refusal.MALFORMED_COLUMN,
            f"{name} has {len(data)} bytes, not a multiple of {_INT32.itemsize}",
            field=name,
            value=len(data),
            limit=_INT32.itemsize,
        )
    # A copy, because torch warns about arrays that it could write to but must not.
    return np.frombuffer(data, _INT32).astype(np.int32)


def _read_rows(name: str, data: bytes, limits: Limits) -> Int32Array:
    rows = _read_column(name, data)
    if not rows.size:
        return rows
    if rows.size > 1 and not (rows[1:] > rows[:-1]).all():
        raise PlanRefused(Refusal.MALFORMED_COLUMN, f"{name} is not strictly ascending", field=name)
    _check_row(name, int(rows[0]), limits)
    _check_row(name, int(rows[-1]), limits)
    return rows


def _check_row(name: str, row: int, limits: Limits) -> None:
    if not 0 <= row < limits.max_num_seqs:
        raise PlanRefused(
            Refusal.ROW_OUT_OF_RANGE,
            f"{name} names row {row}, rows are in [0, {limits.max_num_seqs})",
            field=name,
            value=row,
            limit=limits.max_num_seqs,
        )


def _check_counts(name: str, counts: Int32Array, rows_name: str, rows: Int32Array) -> None:
    if counts.size != rows.size:
        raise PlanRefused(
            Refusal.MALFORMED_COLUMN,
            f"{name} has {counts.size} values for the {rows.size} of {rows_name}",
            field=name,
            value=counts.size,
            limit=rows.size,
        )
    if counts.size and int(counts.min()) < 1:
        raise PlanRefused(
            Refusal.MALFORMED_COLUMN,
            f"{name} has a count of {int(counts.min())}, counts are at least 1",
            field=name,
            value=int(counts.min()),
            limit=1,
        )


def _read_block_ids(name: str, data: bytes, limits: Limits) -> Int32Array:
    ids = _read_column(name, data)
    if ids.size:
        low, high = int(ids.min()), int(ids.max())
        if low < 1 or high >= limits.num_blocks:
            value = low if low < 1 else high
            raise PlanRefused(
                Refusal.BLOCK_ID_OUT_OF_RANGE,
                f"{name} has block id {value}, ids are in [1, {limits.num_blocks})",
                field=name,
                value=value,
                limit=limits.num_blocks,
            )
    return ids


def _read_token_ids(name: str, ids: Int32Array, limits: Limits) -> Int32Array:
    if ids.size:
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= limits.vocab_size:
            value = low if low < 0 else high
            raise PlanRefused(
                Refusal.TOKEN_OUT_OF_VOCABULARY,
                f"{name} has token id {value}, the vocabulary is [0, {limits.vocab_size})",
                field=name,
                value=value,
                limit=limits.vocab_size,
            )
    return ids


def _check_range(name: str, value: float, low: float, high: float, row: int) -> None:
    # Written so that NaN fails too.
    if not low <= value <= high:
        raise PlanRefused(
            Refusal.VALUE_OUT_OF_RANGE,
            f"{name} of row {row} is {value}, it must be in [{low}, {high}]",
            field=name,
            value=value,
            limit=high if value > high else low,
            row=row,
        )


def _read_added_row(added: worker_pb2.AddedRow, limits: Limits) -> NewRow:
    row = added.row
    _check_row("added_rows.row", row, limits)
    if added.adapter_slot != 0:
        raise _unsupported("adapter_slot", row)
    token_ids = _read_token_ids(
        "added_rows.token_ids", _read_column("added_rows.token_ids", added.token_ids), limits
    )
    block_ids = _read_block_ids("added_rows.block_ids", added.block_ids, limits)
    num_known, num_blocks = token_ids.size, block_ids.size
    # A row that already has all its tokens has nothing to compute.
    _check_range("max_total_tokens", added.max_total_tokens, 2, limits.max_model_len, row)
    _check_range("num token_ids", num_known, 1, added.max_total_tokens - 1, row)
    _check_range("num_prompt_tokens", added.num_prompt_tokens, 1, num_known, row)
    _check_range("num_computed_tokens", added.num_computed_tokens, 0, num_known - 1, row)
    _check_range("num_hit_blocks", added.num_hit_blocks, 0, num_blocks, row)
    _check_range("sequence_index", added.sequence_index, 0, math.inf, row)
    if num_blocks > limits.max_blocks_per_seq:
        raise PlanRefused(
            Refusal.TABLE_TOO_LONG,
            f"row {row} starts with {num_blocks} blocks, a table has at most "
            f"{limits.max_blocks_per_seq}",
            field="added_rows.block_ids",
            value=num_blocks,
            limit=limits.max_blocks_per_seq,
        )
    # Only hits hold KV when the row starts.
    _check_range(
        "num_computed_tokens",
        added.num_computed_tokens,
        0,
        added.num_hit_blocks * limits.block_size,
        row,
    )
    return NewRow(
        row=row,
        token_ids=token_ids,
        num_prompt_tokens=added.num_prompt_tokens,
        sequence_index=added.sequence_index,
        seed=added.seed,
        sampling=_read_sampling(added.sampling, row, limits),
        eos_token_ids=_read_token_ids(
            "added_rows.eos_token_ids",
            _read_column("added_rows.eos_token_ids", added.eos_token_ids),
            limits,
        ),
        max_total_tokens=added.max_total_tokens,
        block_ids=block_ids,
        num_hit_blocks=added.num_hit_blocks,
        num_computed_tokens=added.num_computed_tokens,
    )


def _unsupported(field: str, row: int) -> PlanRefused:
    return PlanRefused(
        Refusal.UNSUPPORTED,
        f"{field} of row {row} asks for something that is not built into this worker",
        field=field,
        row=row,
    )


def _read_sampling(sampling: inference_pb2.SamplingParams, row: int, limits: Limits) -> RowSampling:
    # Refused rather than ignored: a client must not get tokens drawn by other rules than it set.
    for field in ("presence_penalty", "frequency_penalty"):
        if getattr(sampling, field) != 0.0:
            raise _unsupported(field, row)
    if sampling.HasField("repetition_penalty") and sampling.repetition_penalty != 1.0:
        raise _unsupported("repetition_penalty", row)
    for field in ("logprobs", "prompt_logprobs", "structured_output", "beam_search"):
        if sampling.HasField(field):
            raise _unsupported(field, row)
    for field in ("logit_bias", "allowed_token_ids", "bad_words"):
        if len(getattr(sampling, field)):
            raise _unsupported(field, row)
    temperature = sampling.temperature if sampling.HasField("temperature") else 1.0
    top_p = sampling.top_p if sampling.HasField("top_p") else 1.0
    _check_range("temperature", temperature, 0.0, MAX_TEMPERATURE, row)
    _check_range("top_p", top_p, 0.0, 1.0, row)
    if top_p == 0.0:
        raise PlanRefused(
            Refusal.VALUE_OUT_OF_RANGE,
            f"top_p of row {row} is 0, it must be in (0, 1]",
            field="top_p",
            value=top_p,
            limit=0,
            row=row,
        )
    _check_range("min_p", sampling.min_p, 0.0, 1.0, row)
    _check_range("top_k", sampling.top_k, 0, math.inf, row)
    _check_range("min_tokens", sampling.min_tokens, 0, math.inf, row)
    stop_token_ids = tuple(sampling.stop_token_ids)
    _read_token_ids("sampling.stop_token_ids", np.array(stop_token_ids, np.int32), limits)
    return RowSampling(
        temperature=temperature,
        top_k=sampling.top_k,
        top_p=top_p,
        min_p=sampling.min_p,
        min_tokens=sampling.min_tokens,
        stop_token_ids=stop_token_ids,
        ignore_eos=sampling.ignore_eos,
    )


def _read_fork(fork: worker_pb2.Fork, limits: Limits) -> ForkOrder:
    _check_row("forks.parent_row", fork.parent_row, limits)
    _check_row("forks.child_row", fork.child_row, limits)
    _check_range("sequence_index", fork.sequence_index, 0, math.inf, fork.child_row)
    if fork.token != -1:
        _read_token_ids("forks.token", np.array([fork.token], np.int32), limits)
    if fork.parent_row == fork.child_row:
        raise PlanRefused(
            Refusal.ILLEGAL_FORK,
            f"row {fork.child_row} is forked from itself",
            field="forks.child_row",
            value=fork.child_row,
        )
    return ForkOrder(
        parent_row=fork.parent_row,
        child_row=fork.child_row,
        sequence_index=fork.sequence_index,
        token=fork.token,
    )


def _read_copies(copies: worker_pb2.BlockCopies, limits: Limits) -> BlockCopies:
    src = _read_block_ids("block_copies.src", copies.src, limits)
    dst = _read_block_ids("block_copies.dst", copies.dst, limits)
    rows = _read_column("block_copies.row", copies.row)
    indices = _read_column("block_copies.index", copies.index)
    if not src.size == dst.size == rows.size == indices.size:
        raise PlanRefused(
            Refusal.MALFORMED_COLUMN,
            f"block_copies has {src.size} src, {dst.size} dst, {rows.size} row and "
            f"{indices.size} index values",
            field="block_copies",
        )
    for row in rows.tolist():
        _check_row("block_copies.row", row, limits)
    both = np.intersect1d(src, dst)
    if both.size:
        raise PlanRefused(
            Refusal.ILLEGAL_COPY,
            f"block {int(both[0])} is source and destination of copies in one plan",
            field="block_copies.dst",
            value=int(both[0]),
        )
    return BlockCopies(src=src, dst=dst, rows=rows, indices=indices)
