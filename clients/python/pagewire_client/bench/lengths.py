"""How long prompts and outputs are: a distribution named on the command line.

    512                       always 512 tokens
    100-1024                  uniform over the whole numbers from 100 to 1024
    lognormal:MEDIAN:SIGMA:LOW:HIGH
                              exp(ln MEDIAN + SIGMA * z), z standard normal, rounded, then clipped
    sharegpt, alpaca          lognormals with a published mean, see `PRESETS`

Owns: the formulas. Does not know: what the numbers are used for.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

MAX_LENGTH = 1 << 20

_FIXED = re.compile(r"\d+")
_UNIFORM = re.compile(r"(\d+)-(\d+)")


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of whole numbers in [low, high].

    Attributes:
        text: As it was given.
        low: Smallest.
        high: Largest.
        median: Of the lognormal before it is clipped; 0: uniform over [low, high].
        sigma: Of the lognormal.
    """

    text: str
    low: int
    high: int
    median: float = 0.0
    sigma: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high <= MAX_LENGTH:
            raise ValueError(
                f"lengths must be whole numbers with 1 <= LOW <= HIGH <= {MAX_LENGTH}, "
                f"got {self.text!r}"
            )
        if not (math.isfinite(self.median) and math.isfinite(self.sigma) and self.sigma >= 0):
            raise ValueError(
                f"a lognormal needs a finite median and a sigma >= 0, got {self.text!r}"
            )

    def draw(self, rng: Random) -> int:
        """One length."""
        if not self.median:
            return self.low if self.low == self.high else rng.randint(self.low, self.high)
        value = self.median * math.exp(self.sigma * rng.gauss(0.0, 1.0))
        return min(max(round(value), self.low), self.high)


def _with_mean(text: str, mean: float, sigma: float, high: int) -> Lengths:
    # A lognormal's mean is median * exp(sigma^2 / 2).
    return Lengths(text, 4, high, mean / math.exp(sigma * sigma / 2), sigma)


# (prompts, outputs). Source of the means: Kwon et al., "Efficient Memory Management for Large
# Language Model Serving with PagedAttention", 2023, figure 11. The spreads are this project's
# choice: conversations vary by a factor of about three, instructions by two. Clipping moves the
# means a little: 154 and 312 tokens for sharegpt, 19 and 58 for alpaca.
PRESETS: dict[str, tuple[Lengths, Lengths]] = {
    "sharegpt": (
        _with_mean("sharegpt", 161.31, 1.1, 1024),
        _with_mean("sharegpt", 337.99, 0.9, 1024),
    ),
    "alpaca": (
        _with_mean("alpaca", 19.31, 0.6, 1024),
        _with_mean("alpaca", 58.45, 0.8, 1024),
    ),
}


def parse_lengths(text: str, *, is_output: bool) -> Lengths:
    """Read a distribution.

    Args:
        text: As in the module's table.
        is_output: Which half of a preset is meant.

    Raises:
        ValueError: It is none.
    """
    if text in PRESETS:
        return PRESETS[text][is_output]
    if _FIXED.fullmatch(text):
        return Lengths(text, int(text), int(text))
    if match := _UNIFORM.fullmatch(text):
        return Lengths(text, int(match[1]), int(match[2]))
    kind, *numbers = text.split(":")
    if kind == "lognormal" and len(numbers) == 4:
        try:
            median, sigma = float(numbers[0]), float(numbers[1])
            low, high = int(numbers[2]), int(numbers[3])
        except ValueError:
            pass
        else:
            if median > 0:
                return Lengths(text, low, high, median, sigma)
    raise ValueError(
        f"lengths must be N, LOW-HIGH, lognormal:MEDIAN:SIGMA:LOW:HIGH, {' or '.join(PRESETS)}, "
        f"got {text!r}"
    )
