"""Why a worker refuses a plan: every reason a Nack can carry, in one place."""

from __future__ import annotations

from enum import StrEnum

from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

DOMAIN = "pagewire"


class Refusal(StrEnum):
    """`ErrorInfo.reason` of a Nack."""

    # The plan does not build on the state the worker is in: base_version is not its applied
    # version, or version is not base_version + 1.
    BASE_VERSION_MISMATCH = "BASE_VERSION_MISMATCH"
    # More steps would be ordered and unconfirmed than lookahead + 1.
    TOO_MANY_UNCONFIRMED = "TOO_MANY_UNCONFIRMED"
    # A column's length is not a multiple of its element size or contradicts its neighbours, a
    # count is below 1, or rows are not strictly ascending.
    MALFORMED_COLUMN = "MALFORMED_COLUMN"
    # num_steps is below 1, above what any row has left to compute, or above 1 although a row is
    # in prefill.
    BAD_NUM_STEPS = "BAD_NUM_STEPS"
    # A row index is outside [0, max_num_seqs).
    ROW_OUT_OF_RANGE = "ROW_OUT_OF_RANGE"
    # A sequence shall start in a row that has one.
    ROW_OCCUPIED = "ROW_OCCUPIED"
    # A row without a sequence is removed, extended, copied, or given work.
    ROW_EMPTY = "ROW_EMPTY"
    # The row is not in the state the order needs: a chunk for a decoding row, a pause for a row
    # in prefill or already paused, a resume for one that is not paused.
    ROW_STATE = "ROW_STATE"
    # A number of an added row is outside its limits: num_prompt_tokens, num_computed_tokens,
    # num_hit_blocks, max_total_tokens, sequence_index, a chunk, or a sampling parameter.
    VALUE_OUT_OF_RANGE = "VALUE_OUT_OF_RANGE"
    # A token id is outside the vocabulary.
    TOKEN_OUT_OF_VOCABULARY = "TOKEN_OUT_OF_VOCABULARY"
    # A block id is outside [1, num_blocks).
    BLOCK_ID_OUT_OF_RANGE = "BLOCK_ID_OUT_OF_RANGE"
    # A block is handed out although a row holds it, handed out twice, handed out and hit in one
    # plan, or twice in one row's table.
    BLOCK_IN_USE = "BLOCK_IN_USE"
    # The step would write a block that other rows hold too, or that is a prefix hit.
    BLOCK_NOT_WRITABLE = "BLOCK_NOT_WRITABLE"
    # A row's table does not cover the tokens it shall compute.
    TABLE_TOO_SHORT = "TABLE_TOO_SHORT"
    # A row's table would exceed ceil(max_model_len / block_size) blocks.
    TABLE_TOO_LONG = "TABLE_TOO_LONG"
    # A step would compute more than max_num_batched_tokens.
    TOO_MANY_TOKENS = "TOO_MANY_TOKENS"
    # A fork whose parent is in the middle of its prefill, was itself forked in this plan, or is
    # its own child.
    ILLEGAL_FORK = "ILLEGAL_FORK"
    # A copy whose source is not the table entry it replaces or holds nothing yet, or an id that
    # is source and destination in one plan.
    ILLEGAL_COPY = "ILLEGAL_COPY"
    # A known field whose feature this worker does not have: token masks, drafts, adapters,
    # penalties, logit bias, log probabilities, structured output, beam search.
    UNSUPPORTED = "UNSUPPORTED"


class PlanRefused(Exception):  # noqa: N818 - a verdict on the plan, not a fault of the worker
    """The plan breaks a rule; nothing was changed.

    Attributes:
        reason: For machines.
        message: What, its value, its limit.
        metadata: The same values as strings.
    """

    def __init__(self, reason: Refusal, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.metadata = {key: str(value) for key, value in metadata.items()}


def make_status(
    reason: str,
    message: str,
    *,
    code: int = code_pb2.INVALID_ARGUMENT,
    metadata: dict[str, str] | None = None,
) -> status_pb2.Status:
    """Build the google.rpc.Status of a Nack or StepFailed, with its ErrorInfo."""
    info = any_pb2.Any()
    info.Pack(error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata or {}))
    return status_pb2.Status(code=code, message=message, details=[info])


def status_reason(status: status_pb2.Status) -> str:
    """Return the ErrorInfo reason inside a status; empty without one."""
    info = error_details_pb2.ErrorInfo()
    for detail in status.details:
        if detail.Unpack(info):
            return info.reason
    return ""
