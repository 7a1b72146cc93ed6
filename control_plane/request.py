"""Requests, their sequences and sampling parameters: the token log of everything being served.

Owns: what a client asked for, resolved once, and the tokens emitted for it so far. A sequence can
be replayed from here alone, on any replica.
Does not know: rows, blocks, plans, workers, text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NewType

import numpy as np

from control_plane.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

BlockId = NewType("BlockId", int)
BlockHash = NewType("BlockHash", bytes)
Version = NewType("Version", int)

MAX_N = 256
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256
MAX_STOP_TOKEN_IDS = 256
MAX_TEMPERATURE = 100.0

_MAX_INT32 = 2**31 - 1
_MAX_UINT64 = 2**64 - 1


class FinishReason(IntEnum):
    """Why a sequence ended; the numbers are those on the wire."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4


def _check_int(field: str, value: object, low: int, high: int, remedy: str) -> None:
    # bool is an int to Python and a mistake to everybody else.
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequestError(
            f"{field} must be an integer in [{low}, {high}], got {value!r}. {remedy}",
            field=field,
            value=value,
            limit=f"[{low}, {high}]",
        )


def _check_float(
    field: str, value: object, low: float, high: float, remedy: str, *, low_is_open: bool = False
) -> None:
    limit = f"{'(' if low_is_open else '['}{low:g}, {high:g}]"
    # NaN compares false to everything, so a test for being outside would let it through.
    ok = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and low <= value <= high
        and not (low_is_open and value == low)
    )
    if not ok:
        raise InvalidRequestError(
            f"{field} must be a finite number in {limit}, got {value!r}. {remedy}",
            field=field,
            value=value,
            limit=limit,
        )


def check_num_stops(num_strings: int, num_token_ids: int) -> None:
    """Refuse too many stop strings or stop tokens, before anybody looks at each of them.

    Raises:
        InvalidRequestError: names the number.
    """
    if num_strings > MAX_STOP_STRINGS:
        raise InvalidRequestError(
            f"stop has {num_strings} strings, at most {MAX_STOP_STRINGS} are accepted. "
            "Send fewer, or stop on the client's side.",
            field="stop",
            value=num_strings,
            limit=MAX_STOP_STRINGS,
        )
    if num_token_ids > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError(
            f"stop_token_ids has {num_token_ids} ids, at most {MAX_STOP_TOKEN_IDS} are accepted. "
            "Send fewer.",
            field="stop_token_ids",
            value=num_token_ids,
            limit=MAX_STOP_TOKEN_IDS,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when to stop: resolved, validated, never changed.

    Attributes:
        n: Continuations per prompt.
        max_tokens: Output limit per sequence; None leaves it to the model's length.
        min_tokens: No end-of-sequence and no stop token before this many output tokens.
        temperature: 0 is greedy.
        top_p: Nucleus, in (0, 1].
        top_k: 0 keeps all tokens.
        min_p: Relative to the most probable token, in [0, 1].
        seed: As the client gave it; `Request.seed` is the resolved one.
        stop: Strings that end the text before they occur.
        stop_token_ids: Tokens that end the sequence.
        ignore_eos: Goes on past end-of-sequence tokens.
        include_stop_str_in_output: Keeps the matched stop string in the text.
        skip_special_tokens: Leaves special tokens out of the text.

    Raises:
        InvalidRequestError: a value is outside its limits, or not a finite number.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, MAX_N, "Ask for fewer continuations.")
        if self.max_tokens is not None:
            _check_int(
                "max_tokens",
                self.max_tokens,
                1,
                _MAX_INT32,
                "Leave it unset for as many tokens as the model's length allows.",
            )
        most = _MAX_INT32 if self.max_tokens is None else self.max_tokens
        _check_int("min_tokens", self.min_tokens, 0, most, "It may not exceed max_tokens.")
        _check_float(
            "temperature", self.temperature, 0.0, MAX_TEMPERATURE, "Use 0 for greedy decoding."
        )
        _check_float("top_p", self.top_p, 0.0, 1.0, "Use 1 to keep all tokens.", low_is_open=True)
        _check_int("top_k", self.top_k, 0, _MAX_INT32, "Use 0 to keep all tokens.")
        _check_float("min_p", self.min_p, 0.0, 1.0, "Use 0 to keep all tokens.")
        if self.seed is not None:
            _check_int("seed", self.seed, 0, _MAX_UINT64, "Leave it unset to have one drawn.")
        self._check_stops()

    def _check_stops(self) -> None:
        check_num_stops(len(self.stop), len(self.stop_token_ids))
        for i, text in enumerate(self.stop):
            # Lone surrogates have no UTF-8 form; they are counted, and matched by nothing.
            num_bytes = len(text.encode("utf-8", "surrogatepass"))
            if not 1 <= num_bytes <= MAX_STOP_STRING_BYTES:
                raise InvalidRequestError(
                    f"stop[{i}] has {num_bytes} bytes of UTF-8, 1 to {MAX_STOP_STRING_BYTES} are "
                    "accepted. Remove it or use a shorter one.",
                    field=f"stop[{i}]",
                    value=num_bytes,
                    limit=f"[1, {MAX_STOP_STRING_BYTES}]",
                )
        for i, token_id in enumerate(self.stop_token_ids):
            _check_int(f"stop_token_ids[{i}]", token_id, 0, _MAX_INT32, "Token ids are int32.")


class Sequence:
    """One of the `n` continuations of a request.

    Attributes:
        request: The request it belongs to.
        index: Which continuation; part of the key of every random draw.
        output_token_ids: The token log. Appended to by the scheduler only; a resume pre-fills it.
        finish_reason: None while it is live.
        num_cached_tokens: Prefix hits at its first admission.
        num_admissions: Times it was given a row.
        block_hashes: Chain over its full blocks of known tokens, as far as it was needed. A cache
            kept by `block_hash.BlockHasher`.
    """

    __slots__ = (
        "block_hashes",
        "finish_reason",
        "index",
        "num_admissions",
        "num_cached_tokens",
        "output_token_ids",
        "request",
    )

    def __init__(self, request: Request, index: int, output_token_ids: Iterable[int] = ()) -> None:
        self.request = request
        self.index = index
        self.output_token_ids: list[int] = list(output_token_ids)
        self.finish_reason: FinishReason | None = None
        self.num_cached_tokens = 0
        self.num_admissions = 0
        self.block_hashes: list[BlockHash] = []

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_replays(self) -> int:
        """Times it was given a row again after it had lost one."""
        return max(0, self.num_admissions - 1)

    @property
    def num_tokens(self) -> int:
        """Known tokens, prompt and output."""
        return self.request.prompt_token_ids.size + len(self.output_token_ids)

    def token_ids(self, start: int = 0, stop: int | None = None) -> NDArray[np.int32]:
        """Known tokens [start, stop) of prompt and output; a view if they are all prompt."""
        prompt = self.request.prompt_token_ids
        num_prompt = prompt.size
        end = self.num_tokens if stop is None else stop
        if end <= num_prompt:
            return prompt[start:end]
        output = np.array(
            self.output_token_ids[max(start - num_prompt, 0) : end - num_prompt], dtype=np.int32
        )
        if start >= num_prompt:
            return output
        return np.concatenate((prompt[start:], output))

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.req_id}/{self.index}, "
            f"prompt={self.request.prompt_token_ids.size}, output={len(self.output_token_ids)}, "
            f"finish_reason={self.finish_reason})"
        )


class Request:
    """One client request with everything resolved that a replay needs.

    Attributes:
        req_id: The server's internal id, unique among live requests.
        prompt_token_ids: int32 [num_prompt_tokens], at least one, read-only.
        sampling: As submitted; limits count from the prompt's end.
        seed: 64 bits, part of the key of every random draw.
        eos_token_ids: Tokens that end a sequence unless `sampling.ignore_eos`.
        max_total_tokens: min(prompt + max_tokens, max_model_len).
        open_limit: What max_total_tokens may be at most, if the client left its output open; it is
            then lowered to what fits where the request is placed. None if it did not.
        priority: Higher is served first.
        tenant: Whom round robin is fair to.
        cache_salt: Prefixes are shared within one salt only.
        adapter: Id of a fine-tuned adapter; empty for the base model.
        adapter_version: Which version of it; KV is never shared between two.
        arrival: Monotone admission number of this process, kept through preemption and replay.
        sequences: Its `n` continuations.
        num_losses: Lost workers and failed steps while it was in flight.
        avoid: The replica on which its last step failed, if one did; others are tried first.
    """

    __slots__ = (
        "adapter",
        "adapter_version",
        "arrival",
        "avoid",
        "cache_salt",
        "eos_token_ids",
        "max_total_tokens",
        "num_losses",
        "open_limit",
        "priority",
        "prompt_token_ids",
        "req_id",
        "sampling",
        "seed",
        "sequences",
        "tenant",
    )

    def __init__(
        self,
        *,
        req_id: str,
        prompt_token_ids: Iterable[int] | NDArray[np.int32],
        sampling: SamplingParams,
        seed: int,
        max_total_tokens: int,
        is_open_ended: bool = False,
        arrival: int,
        eos_token_ids: tuple[int, ...] = (),
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
        adapter: str = "",
        adapter_version: str = "",
        resume: Mapping[int, Iterable[int]] | None = None,
    ) -> None:
        """Build the request and its sequences; `resume` maps sequence index to known output.

        Raises:
            InvalidRequestError: the prompt is empty or has ids outside int32, the seed does not
                fit 64 bits, or `resume` names a sequence that does not exist.
        """
        ids = (
            prompt_token_ids
            if isinstance(prompt_token_ids, np.ndarray)
            else np.fromiter(prompt_token_ids, dtype=np.int64)
        )
        if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
            raise InvalidRequestError(
                f"The prompt must be a row of at least one integer token id, got shape {ids.shape} "
                f"of {ids.dtype}. Send a longer prompt.",
                field="prompt",
                value=ids.size,
                limit=">= 1",
            )
        if int(ids.min()) < 0 or int(ids.max()) > _MAX_INT32:
            raise InvalidRequestError(
                f"Prompt token ids must be in [0, {_MAX_INT32}], got {int(ids.min())} to "
                f"{int(ids.max())}. Check the tokenizer.",
                field="prompt",
                value=int(ids.min()) if int(ids.min()) < 0 else int(ids.max()),
                limit=f"[0, {_MAX_INT32}]",
            )
        _check_int("seed", seed, 0, _MAX_UINT64, "Seeds have 64 bits.")
        # A copy, frozen: the log is the truth that replays and hashes start from.
        self.prompt_token_ids: NDArray[np.int32] = np.array(ids, dtype=np.int32)
        self.prompt_token_ids.setflags(write=False)
        self.req_id = req_id
        self.sampling = sampling
        self.seed = seed
        self.eos_token_ids = eos_token_ids
        self.max_total_tokens = max_total_tokens
        self.open_limit = max_total_tokens if is_open_ended else None
        self.priority = priority
        self.tenant = tenant
        self.cache_salt = cache_salt
        self.adapter = adapter
        self.adapter_version = adapter_version
        self.arrival = arrival
        self.num_losses = 0
        self.avoid = ""
        known = {} if resume is None else resume
        for index in known:
            _check_int("resume.index", index, 0, sampling.n - 1, "It must name one of the n.")
        self.sequences = [Sequence(self, i, known.get(i, ())) for i in range(sampling.n)]

    @property
    def num_prompt_tokens(self) -> int:
        return self.prompt_token_ids.size

    @property
    def is_finished(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    @property
    def live_sequences(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.finish_reason is None]

    def __repr__(self) -> str:
        return f"Request({self.req_id}, arrival={self.arrival}, sequences={self.sequences})"
