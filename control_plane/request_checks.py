"""What single fields of the public API may hold: every limit that needs no model's file.

Every refusal names the field, its value, the limit and what to do. Values that may be a prompt are
named by place and length only.

Owns: limits. Does not know: defaults, models, live requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from control_plane.errors import InvalidRequestError, RequestTooLongError, UnsupportedFeatureError
from control_plane.tokenizer import check_text
from protos.pagewire.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from control_plane.served_model import ServedModel

MAX_REQUEST_ID_BYTES = 128
MAX_CACHE_SALT_BYTES = 256
MAX_FLUSH_INTERVAL_S = 60.0
_IDS_AT_ONCE = 1 << 16

# Ids that a client has and the finish reason if it has one (0 if not), by sequence index.
Resume = dict[int, tuple[list[int], int]]


def check_request_id(request_id: str) -> None:
    """Refuse what is not at most 128 bytes of printable ASCII; empty is fine.

    Raises:
        InvalidRequestError: Names the length or the place, not the id.
    """
    if len(request_id.encode("utf-8", "surrogatepass")) > MAX_REQUEST_ID_BYTES:
        raise InvalidRequestError(
            f"request_id has {len(request_id)} characters, at most {MAX_REQUEST_ID_BYTES} bytes "
            "are accepted. Use a shorter one, such as a UUID.",
            field="request_id",
            value=len(request_id),
            limit=MAX_REQUEST_ID_BYTES,
        )
    if request_id.isascii() and request_id.isprintable():
        return
    for position, char in enumerate(request_id):
        if not " " <= char <= "~":
            raise InvalidRequestError(
                f"request_id has U+{ord(char):04X} at character {position}; only printable ASCII "
                "is accepted. Use letters, digits and punctuation.",
                field="request_id",
                value=f"U+{ord(char):04X}",
                position=position,
                limit="printable ASCII",
            )


def check_cache_salt(cache_salt: str) -> None:
    """Refuse a salt that is too long or no text.

    Raises:
        InvalidRequestError: Names its length, not the salt.
    """
    check_text(cache_salt, field="cache_salt")
    num_bytes = len(cache_salt.encode())
    if num_bytes > MAX_CACHE_SALT_BYTES:
        raise InvalidRequestError(
            f"cache_salt has {num_bytes} bytes, at most {MAX_CACHE_SALT_BYTES} are accepted. Send "
            "a hash of it instead.",
            field="cache_salt",
            value=num_bytes,
            limit=MAX_CACHE_SALT_BYTES,
        )


def check_priority(priority: int, limit: int | None) -> None:
    """Refuse to be served before others who may not ask for that; None: there is no limit.

    Raises:
        InvalidRequestError: Names both.
    """
    if limit is not None and priority > limit:
        raise InvalidRequestError(
            f"priority is {priority}, at most {limit} is accepted: a higher one would be served "
            "before everybody else's requests. Leave it unset, or ask for a higher --max-priority.",
            field="priority",
            value=priority,
            limit=limit,
        )


def refuse_adapter(adapter: str) -> None:
    """Refuse a request that names one.

    Raises:
        UnsupportedFeatureError: This server has none.
    """
    if adapter:
        raise _unsupported("adapter")


def refuse_unsupported(sampling: inference_pb2.SamplingParams) -> None:
    """Refuse fields that this server would ignore.

    Raises:
        UnsupportedFeatureError: Names the first of them.
    """
    for field in _unsupported_fields(sampling):
        raise _unsupported(field)


def _unsupported(field: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(
        f"{field} is part of the API but not built into this server. Leave it unset.",
        field=field,
    )


def _unsupported_fields(sampling: inference_pb2.SamplingParams) -> Iterator[str]:
    # NaN differs from everything, hence is refused as well.
    if sampling.presence_penalty != 0:
        yield "presence_penalty"
    if sampling.frequency_penalty != 0:
        yield "frequency_penalty"
    if sampling.HasField("repetition_penalty") and sampling.repetition_penalty != 1:
        yield "repetition_penalty"
    for field in ("logprobs", "prompt_logprobs", "structured_output", "beam_search"):
        if sampling.HasField(field):
            yield field
    if sampling.logit_bias:
        yield "logit_bias"
    if sampling.allowed_token_ids:
        yield "allowed_token_ids"
    if sampling.bad_words:
        yield "bad_words"


def flush_interval_s(message: inference_pb2.GenerateRequest) -> float | None:
    """How long tokens may be gathered, in seconds; None leaves it to the server.

    Raises:
        InvalidRequestError: It is negative or longer than a minute.
    """
    if not message.HasField("flush_interval"):
        return None
    interval = message.flush_interval
    seconds = interval.seconds + interval.nanos / 1e9
    if not 0 <= seconds <= MAX_FLUSH_INTERVAL_S:
        raise InvalidRequestError(
            f"flush_interval must be in [0, {MAX_FLUSH_INTERVAL_S:g}] seconds, got {seconds:g}. "
            "Set 0 to get every step's tokens at once, or leave it unset.",
            field="flush_interval",
            value=f"{seconds:g}",
            limit=f"[0, {MAX_FLUSH_INTERVAL_S:g}]",
        )
    return seconds


def checked_ids(ids: Sequence[int], field: str, vocab_size: int) -> NDArray[np.int32]:
    """Token ids as an array.

    Raises:
        InvalidRequestError: Names the first id outside the vocabulary.
    """
    if len(ids) <= _IDS_AT_ONCE:
        array = np.array(ids, np.int32)
    else:
        # In pieces, between which other threads get their turn: a message may hold millions.
        starts = range(0, len(ids), _IDS_AT_ONCE)
        array = np.concatenate([np.array(ids[at : at + _IDS_AT_ONCE], np.int32) for at in starts])
    if array.size and not 0 <= int(array.min()) <= int(array.max()) < vocab_size:
        bad = np.flatnonzero((array < 0) | (array >= vocab_size))
        i, value = int(bad[0]), int(array[bad[0]])
        raise InvalidRequestError(
            f"{field}[{i}] is {value}, outside the vocabulary [0, {vocab_size}). Tokenize with "
            "this model's tokenizer.",
            field=f"{field}[{i}]",
            value=value,
            limit=f"[0, {vocab_size})",
        )
    return array


def check_prompt_length(num_tokens: int, model: ServedModel) -> None:
    """Refuse a prompt that leaves no place for an output token.

    Raises:
        RequestTooLongError: Names both lengths.
    """
    limit = model.max_model_len - 1
    if num_tokens > limit:
        raise RequestTooLongError(
            f"The prompt has {num_tokens} tokens but {model.name} accepts at most {limit} "
            f"(max_model_len={model.max_model_len}, one place is kept for the first output "
            "token). Shorten the prompt.",
            field="prompt",
            value=num_tokens,
            limit=limit,
            max_model_len=model.max_model_len,
        )


def read_resume(
    entries: Iterable[inference_pb2.SequenceResume], n: int, model: ServedModel
) -> Resume:
    """What a client has of each sequence.

    Raises:
        InvalidRequestError: An index, id or finish reason that cannot be, or too many ids.
    """
    resume: Resume = {}
    for i, entry in enumerate(entries):
        field = f"resume[{i}]"
        if not 0 <= entry.index < n or entry.index in resume:
            why = "named twice" if entry.index in resume else f"not one of the {n} continuations"
            raise InvalidRequestError(
                f"{field}.index is {entry.index}, which is {why}. Send one entry per sequence, "
                f"with an index in [0, {n}).",
                field=f"{field}.index",
                value=entry.index,
                limit=f"[0, {n}), each once",
            )
        if entry.finish_reason not in inference_pb2.FinishReason.values():
            raise InvalidRequestError(
                f"{field}.finish_reason is {entry.finish_reason}, which is not a FinishReason. "
                "Send the one that was received, or leave it unset.",
                field=f"{field}.finish_reason",
                value=entry.finish_reason,
                limit="a FinishReason",
            )
        if len(entry.token_ids) > model.max_model_len:
            raise InvalidRequestError(
                f"{field} has {len(entry.token_ids)} token ids, more than the model's length of "
                f"{model.max_model_len}. Send what was received.",
                field=f"{field}.token_ids",
                value=len(entry.token_ids),
                limit=model.max_model_len,
            )
        ids = checked_ids(entry.token_ids, f"{field}.token_ids", model.vocab_size)
        resume[entry.index] = (ids.tolist(), entry.finish_reason)
    return resume
