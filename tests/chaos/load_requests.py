"""What the streams ask for: drawn from a seed and from nothing else.

Owns: kinds of requests and their shares, prompts, sampling parameters, which requests are given up
half-way. Does not know: clients, what comes back.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagewire_client import GenerateOptions, Prompt

# Ids that stand for text: no special tokens, none of the padding behind the vocabulary.
_TOKEN_IDS = (4, 400)
_NUM_TOKEN_DOCUMENTS = 10
_WORDS = (
    *("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "and", "sleeps", "on"),
    *("hello", "world", "how", "are", "you", "today", "fine", "thank", "STOP", "end", "of"),
    *("naïve", "café", "straße", "你好", "世界", "😀", "a", "sentence"),
)
_NUM_TEXT_DOCUMENTS = 6
# Drawn again and again, so that most of them were answered by the undisturbed system already.
_NUM_PLAIN_TAILS = 6
_NUM_SEEDS = 4
_DRAWS: tuple[GenerateOptions, ...] = (
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05},
)
_OUTPUT_LENGTHS = (16, 40, 80, 160, 240)
# Answers of a batch come whole; several of them wait for each other's rows.
_BATCH_OUTPUT_LENGTHS = (16, 40, 80, 120)
_BATCH_SIZES = (3, 7)
# From what nearly every output has to what hardly any has; of one and of several tokens.
_STOP_STRINGS = (["dog"], ["e "], ["s the", "zz"], [" the quick"], ["o", "u"], ["th", "é"], ["r"])


class RequestKind(StrEnum):
    """Kinds as the report counts them."""

    PLAIN = "text or ids"
    CHAT = "chat"
    STOP_STRING = "stop string"
    STOP_TOKEN = "stop token or eos"
    BATCH = "of a batch"
    CANCELLED = "given up half-way"
    DEADLINE = "with a deadline"


# Of every so many requests of a lane. A batch counts as one of them.
SHARES = {
    RequestKind.PLAIN: 4,
    RequestKind.CHAT: 3,
    RequestKind.STOP_STRING: 2,
    RequestKind.STOP_TOKEN: 2,
    RequestKind.BATCH: 2,
    RequestKind.CANCELLED: 2,
    RequestKind.DEADLINE: 1,
}
_PACK = [kind for kind, share in SHARES.items() for _ in range(share)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request of one lane.

    Attributes:
        name: For people: lane and number.
        kind: What is special about it.
        draws: "greedy", "seeded" or "unseeded".
        prompt: Text, token ids or messages.
        options: As the client takes them, without those of the call.
        cancel_after: Tokens after which the client gives up; None: never.
        leave_after_s: Time after which it does, whatever has come; None: never.
        timeout_s: The call's own limit; None: none.
    """

    name: str
    kind: RequestKind
    draws: str
    prompt: Prompt
    options: GenerateOptions
    cancel_after: int | None = None
    leave_after_s: float | None = None
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBatch:
    """One `GenerateBatch` of one lane.

    Attributes:
        name: For people: lane and number.
        requests: All of kind BATCH.
        leave_after: Answers after which the client gives up on the rest; None: never.
    """

    name: str
    requests: tuple[PlannedRequest, ...]
    leave_after: int | None = None


@dataclass(frozen=True, slots=True)
class Documents:
    """Beginnings that requests share, long enough to fill whole blocks."""

    token_ids: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]


def make_documents(seed: int) -> Documents:
    draw = random.Random(f"documents of {seed}")
    return Documents(
        token_ids=tuple(
            tuple(draw.randrange(*_TOKEN_IDS) for _ in range(draw.randint(30, 300)))
            for _ in range(_NUM_TOKEN_DOCUMENTS)
        ),
        texts=tuple(
            " ".join(draw.choice(_WORDS) for _ in range(draw.randint(15, 70)))
            for _ in range(_NUM_TEXT_DOCUMENTS)
        ),
    )


def lane_requests(
    seed: int, lane: int, documents: Documents
) -> Iterator[PlannedRequest | PlannedBatch]:
    """All requests of one lane, without end.

    Kinds come as from a pack of cards, so that each has its share of any long enough run.
    """
    draw = random.Random(f"lane {lane} of {seed}")
    number = 0
    while True:
        pack = list(_PACK)
        draw.shuffle(pack)
        for kind in pack:
            number += 1
            name = f"{lane}.{number}"
            if kind is RequestKind.BATCH:
                yield _batch(draw, documents, name)
            else:
                yield _request(draw, documents, name, kind)


def _batch(draw: random.Random, documents: Documents, name: str) -> PlannedBatch:
    size = draw.randint(*_BATCH_SIZES)
    leaves = draw.random() < 0.25
    return PlannedBatch(
        name=f"{name} (batch)",
        requests=tuple(
            _request(draw, documents, f"{name}[{i}]", RequestKind.BATCH) for i in range(size)
        ),
        leave_after=draw.randrange(1, size) if leaves else None,
    )


def _request(
    draw: random.Random, documents: Documents, name: str, kind: RequestKind
) -> PlannedRequest:
    draws = draw.choice(("greedy", "seeded", "unseeded"))
    is_chat = kind is RequestKind.CHAT
    if kind in (RequestKind.BATCH, RequestKind.CANCELLED, RequestKind.DEADLINE):
        is_chat = draw.random() < 0.25
    return PlannedRequest(
        name=f"{name} ({kind}, {draws})",
        kind=kind,
        draws=draws,
        prompt=_messages(draw, documents) if is_chat else _prompt(draw, documents),
        options=_options(draw, kind, draws),
        **_patience(draw, kind),
    )


def _prompt(draw: random.Random, documents: Documents) -> Prompt:
    tail = _tail(draw)
    if draw.random() < 0.4:
        return f"{draw.choice(documents.texts)} {_words(tail)}"
    ids = draw.choice(documents.token_ids)
    # Prefixes end anywhere within a block.
    return [*ids, *(tail.randrange(*_TOKEN_IDS) for _ in range(tail.randint(1, 40)))]


def _messages(draw: random.Random, documents: Documents) -> Prompt:
    """A conversation of one to three turns behind a system prompt that others have too."""
    tail = _tail(draw)
    messages = [{"role": "system", "content": draw.choice(documents.texts)}]
    for _ in range(tail.randrange(3)):
        messages.append({"role": "user", "content": _words(tail)})
        messages.append({"role": "assistant", "content": _words(tail)})
    messages.append({"role": "user", "content": _words(tail)})
    return messages


def _tail(draw: random.Random) -> random.Random:
    return random.Random(f"tail {draw.randrange(_NUM_PLAIN_TAILS)}")


def _words(draw: random.Random) -> str:
    return " ".join(draw.choice(_WORDS) for _ in range(draw.randint(1, 8)))


def _options(draw: random.Random, kind: RequestKind, draws: str) -> GenerateOptions:
    is_batch = kind is RequestKind.BATCH
    lengths = _BATCH_OUTPUT_LENGTHS if is_batch else _OUTPUT_LENGTHS
    options: GenerateOptions = {"max_tokens": draw.choice(lengths), "ignore_eos": True}
    if draws == "greedy":
        options["temperature"] = 0.0
    else:
        options.update(draw.choice(_DRAWS))
    if draws == "seeded":
        options["seed"] = draw.randrange(_NUM_SEEDS)
    chance = draw.random()
    if kind is RequestKind.STOP_STRING or (is_batch and chance < 0.2):
        options["stop"] = draw.choice(_STOP_STRINGS)
        options["include_stop_str_in_output"] = draw.random() < 0.3
    elif kind is RequestKind.STOP_TOKEN or (is_batch and chance < 0.4):
        options["ignore_eos"] = draw.random() < 0.5
        options["stop_token_ids"] = [draw.randrange(*_TOKEN_IDS) for _ in range(8)]
        options["min_tokens"] = draw.choice((0, 0, 10))
    if draw.random() < 0.2:
        options["skip_special_tokens"] = False
    return options


def _patience(draw: random.Random, kind: RequestKind) -> dict[str, Any]:
    match kind:
        case RequestKind.DEADLINE:
            return {"timeout_s": draw.uniform(0.05, 2.0)}
        case RequestKind.CANCELLED if draw.random() < 0.5:
            # In the queue, before the first token, while nobody answers.
            return {"leave_after_s": draw.expovariate(1.0)}
        case RequestKind.CANCELLED:
            return {"cancel_after": draw.randint(1, 40)}
        case _:
            return {}
