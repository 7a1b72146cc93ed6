"""Where the kernels of a step find what they need in the persistent state of a row."""

from __future__ import annotations

from typing import NamedTuple


class RowLayout(NamedTuple):
    """Columns of the int32 words that describe a row; given by whoever owns the state.

    `temperature`, `top_p` and `min_p` hold float32 bits; `seed` is the first of two words, the low
    one first; `length` counts the tokens before the one that is drawn.
    """

    last_token: int
    length: int
    active: int
    min_total: int
    max_total: int
    sequence_index: int
    top_k: int
    temperature: int
    top_p: int
    min_p: int
    seed: int
