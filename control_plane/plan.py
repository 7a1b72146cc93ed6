"""A scheduled step as a Plan message, and a StepResult message as arrays.

Owns the mapping between the scheduler's arrays and the columns of the wire, in both directions;
nothing else reads or writes a column. Does not know versions' rules, windows, or who sends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from control_plane.errors import Code, ProtocolError
from protos.pagewire.v1 import inference_pb2, worker_pb2

if TYPE_CHECKING:
    import numpy.typing as npt

    from control_plane.request import Request
    from control_plane.scheduled_step import AddedSequence, ScheduledStep

    Int32Array = npt.NDArray[np.int32]
    UInt8Array = npt.NDArray[np.uint8]

MALFORMED_MESSAGE = "MALFORMED_MESSAGE"

_INT32 = np.dtype("<i4")
_EMPTY = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultColumns:
    """A StepResult that can be read. What it says may be wrong: `step_result` checks that.

    Attributes:
        counts: [rows that ran] uint8, tokens per row.
        token_ids: [sum of counts] int32.
        finished_rows: int32, ascending.
        finish_reasons: uint8, parallel to finished_rows, values of FinishReason.
        waited_us: None: the worker did not measure it.
    """

    version: int
    step: int
    counts: UInt8Array
    token_ids: Int32Array
    finished_rows: Int32Array
    finish_reasons: UInt8Array
    device_time_us: int
    waited_us: int | None


def encode_plan(step: ScheduledStep) -> worker_pb2.Plan:
    """The message that orders `step`; its base version is the one before."""
    plan = worker_pb2.Plan(
        base_version=int(step.version) - 1,
        version=int(step.version),
        num_steps=1,
        removed_rows=_column(step.removed_rows),
        appended_rows=_column(step.appended_rows),
        appended_counts=_column(step.appended_counts),
        appended_block_ids=_column(step.appended_block_ids),
        chunk_rows=_column(step.chunk_rows),
        chunk_num_tokens=_column(step.chunk_num_tokens),
    )
    if step.added:
        plan.added_rows.extend([_encode_added(added) for added in step.added])
    return plan


def count_prompt_tokens(step: ScheduledStep) -> int:
    """Prompt token ids that travel with this step's plan."""
    return sum(added.sequence.request.prompt_token_ids.size for added in step.added)


def decode_step_result(message: worker_pb2.StepResult) -> ResultColumns:
    """The columns of a result as arrays, borrowed from the message.

    Raises:
        ProtocolError: MALFORMED_MESSAGE; a column is torn.
    """
    return ResultColumns(
        version=message.version,
        step=message.step,
        counts=np.frombuffer(message.counts, dtype=np.uint8),
        token_ids=_array(message.token_ids, "step_result.token_ids"),
        finished_rows=_array(message.finished_rows, "step_result.finished_rows"),
        finish_reasons=np.frombuffer(message.finish_reasons, dtype=np.uint8),
        # A count of time must not fall, whatever a worker's clock says.
        device_time_us=max(0, message.device_time_us),
        waited_us=message.waited_us if message.HasField("waited_us") else None,
    )


def malformed(field: str, problem: str) -> ProtocolError:
    """A message that cannot be read, whatever the state."""
    return ProtocolError(
        MALFORMED_MESSAGE,
        f"Malformed message: {field}: {problem}.",
        code=Code.INVALID_ARGUMENT,
        field=field,
    )


def _encode_added(added: AddedSequence) -> worker_pb2.AddedRow:
    sequence = added.sequence
    request = sequence.request
    return worker_pb2.AddedRow(
        row=added.row,
        token_ids=_column(added.token_ids),
        num_prompt_tokens=int(request.prompt_token_ids.size),
        sequence_index=sequence.index,
        seed=request.seed,
        sampling=_encode_sampling(request),
        eos_token_ids=_column(np.asarray(request.eos_token_ids, dtype=np.int32)),
        max_total_tokens=request.max_total_tokens,
        block_ids=_column(added.block_ids),
        num_hit_blocks=added.num_hit_blocks,
        num_computed_tokens=added.num_computed_tokens,
    )


def _encode_sampling(request: Request) -> inference_pb2.SamplingParams:
    """What the device needs; strings to stop at are found by the edge and stay there."""
    sampling = request.sampling
    return inference_pb2.SamplingParams(
        n=sampling.n,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=request.seed,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
    )


def _column(values: Int32Array) -> bytes:
    return values.astype(_INT32, copy=False).tobytes() if values.size else b""


def _array(column: bytes, field: str) -> Int32Array:
    if not column:
        return _EMPTY
    if len(column) % _INT32.itemsize:
        raise malformed(field, f"{len(column)} bytes is not a multiple of {_INT32.itemsize}")
    return np.frombuffer(column, dtype=_INT32)
