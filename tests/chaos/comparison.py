"""Received tokens against expected ones.

Owns: what counts as wrong, lost or doubled. Does not know where either came from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# A run of so many tokens again in step tells a shift from a coincidence.
_MATCH = 6
_MAX_SHIFT = 64


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two outputs part.

    Attributes:
        kind: "wrong", "lost" or "doubled".
        at: Index of the first token that differs.
        text: For people.
    """

    kind: str
    at: int
    text: str


def compare_tokens(
    received: Sequence[int], expected: Sequence[int], *, is_complete: bool
) -> Difference | None:
    """Compare; None if they are equal, or `received` is a beginning and need not be complete."""
    at = next(
        (i for i, (got, want) in enumerate(zip(received, expected, strict=False)) if got != want),
        min(len(received), len(expected)),
    )
    if at == len(received):
        if at == len(expected) or not is_complete:
            return None
        return Difference(
            "lost", at, f"ended after {at} tokens, {len(expected) - at} are missing at the end"
        )
    for shift in range(1, _MAX_SHIFT):
        if _continues(received[at:], expected[at + shift :]):
            return Difference("lost", at, f"tokens {at} to {at + shift - 1} are missing")
        if _continues(received[at + shift :], expected[at:]):
            again = received[at : at + shift] == received[max(0, at - shift) : at]
            what = "came twice" if again else "are none of its own"
            return Difference("doubled", at, f"tokens {at} to {at + shift - 1} {what}")
    if at == len(expected):
        return Difference("doubled", at, f"{len(received) - at} tokens came after its end")
    return Difference("wrong", at, f"token {at} is {received[at]} instead of {expected[at]}")


def _continues(received: Sequence[int], expected: Sequence[int]) -> bool:
    """Whether both go on alike, for long enough to be no coincidence."""
    length = min(len(received), len(expected), _MATCH)
    return length >= _MATCH // 2 and list(received[:length]) == list(expected[:length])
