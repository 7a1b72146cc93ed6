"""What the streams ask for: drawn from a seed and from nothing else.

Owns: prompts, sampling parameters, which requests are given up half-way. Does not know: clients,
what comes back.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request of one lane.

    Attributes:
        name: For people: lane and number.
        kind: "greedy", "seeded" or "unseeded".
        prompt: Text or token ids.
        options: As the client takes them, without those of the call.
        cancel_after: Tokens after which the client gives up; None: never.
        timeout_s: The call's own limit; None: none.
    """

    name: str
    kind: str
    prompt: Prompt
    options: GenerateOptions
    cancel_after: int | None = None
    timeout_s: float | None = None


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


def lane_requests(seed: int, lane: int, documents: Documents) -> Iterator[PlannedRequest]:
    """All requests of one lane, without end."""
    draw = random.Random(f"lane {lane} of {seed}")
    number = 0
    while True:
        number += 1
        kind = draw.choice(("greedy", "seeded", "unseeded"))
        request = PlannedRequest(
            name=f"{lane}.{number} ({kind})",
            kind=kind,
            prompt=_prompt(draw, documents),
            options=_options(draw, kind),
            **_patience(draw),
        )
        yield request


def _prompt(draw: random.Random, documents: Documents) -> Prompt:
    tail = random.Random(f"tail {draw.randrange(_NUM_PLAIN_TAILS)}")
    if draw.random() < 0.4:
        words = " ".join(tail.choice(_WORDS) for _ in range(tail.randint(1, 8)))
        return f"{draw.choice(documents.texts)} {words}"
    ids = draw.choice(documents.token_ids)
    # Prefixes end anywhere within a block.
    return [*ids, *(tail.randrange(*_TOKEN_IDS) for _ in range(tail.randint(1, 40)))]


def _options(draw: random.Random, kind: str) -> GenerateOptions:
    options: GenerateOptions = {"max_tokens": draw.choice(_OUTPUT_LENGTHS), "ignore_eos": True}
    if kind == "greedy":
        options["temperature"] = 0.0
    else:
        options.update(draw.choice(_DRAWS))
    if kind == "seeded":
        options["seed"] = draw.randrange(_NUM_SEEDS)
    chance = draw.random()
    if chance < 0.15:
        options["ignore_eos"] = False
    elif chance < 0.3:
        options["stop"] = draw.choice((["dog"], ["e "], ["s the", "zz"], [" the quick"]))
    elif chance < 0.4:
        options["stop_token_ids"] = [draw.randrange(*_TOKEN_IDS)]
    return options


def _patience(draw: random.Random) -> dict[str, Any]:
    chance = draw.random()
    if chance < 0.06:
        return {"cancel_after": draw.randint(1, 40)}
    if chance < 0.12:
        return {"timeout_s": draw.uniform(0.05, 2.0)}
    return {}
