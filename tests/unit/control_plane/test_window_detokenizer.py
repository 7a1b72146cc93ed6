"""What it costs to cut the text of many tokens, where a token's text depends on its neighbours."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from control_plane.detokenizer import Span, WindowDecoder, WindowDetokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_TOKENS = 2000
BYTE, WORD, HIDDEN = 1, 2, 3


class Counting:
    """A decoder whose words are two characters, bytes are one each, and what it was asked for."""

    def __init__(self) -> None:
        self.num_ids = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        self.num_ids += len(token_ids)
        return "".join({BYTE: "b", WORD: "ww", HIDDEN: ""}[i] for i in token_ids)

    def detokenizer(self, token_ids: Sequence[int]) -> WindowDetokenizer:
        window = WindowDecoder(
            decode=self.decode, hidden=frozenset({HIDDEN}), byte_ids=frozenset({BYTE})
        )
        detokenizer = WindowDetokenizer(window)
        detokenizer.extend(token_ids)
        self.num_ids = 0
        return detokenizer


@pytest.mark.parametrize("pattern", [[BYTE], [WORD], [WORD, BYTE, HIDDEN], [BYTE, HIDDEN]])
def test_cutting_many_tokens_decodes_each_of_them_a_few_times(pattern: list[int]) -> None:
    counting = Counting()
    detokenizer = counting.detokenizer(pattern * (NUM_TOKENS // len(pattern)))
    spans = detokenizer.spans()
    assert len(spans) == len(detokenizer.pending)
    # An emoji is four such tokens, and a text of emojis one run, whose end alone can be cut.
    assert counting.num_ids <= 32 * NUM_TOKENS


def test_a_run_of_bytes_is_cut_behind_its_end_only() -> None:
    detokenizer = Counting().detokenizer([WORD, BYTE, HIDDEN, BYTE, WORD, HIDDEN, BYTE])
    assert detokenizer.spans() == [
        Span(2, is_clean=True),
        Span(2, is_clean=False),
        Span(2, is_clean=False),
        Span(2, is_clean=False),
        Span(6, is_clean=True),
        Span(6, is_clean=True),
        Span(6, is_clean=False),
    ]


def test_a_token_without_text_at_the_beginning_may_be_released() -> None:
    assert Counting().detokenizer([HIDDEN, BYTE]).spans() == [
        Span(0, is_clean=True),
        Span(0, is_clean=False),
    ]
