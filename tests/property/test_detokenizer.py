"""Text in pieces equals text at once, however the ids are cut, for every kind of tokenizer."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import tiny_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import Tiny

from control_plane.detokenizer import incomplete_size
from control_plane.output_processor import OutputProcessor
from control_plane.request import FinishReason, SamplingParams
from control_plane.text_codec import TextCodec
from control_plane.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

KINDS = list(tiny_tokenizers.ALL)
_SAMPLING = SamplingParams()
_TEXTS = st.lists(
    st.sampled_from(["hello", " world", " END", "é", "你好", "😀", "👩‍👩‍👧", " ", "\n", "x" * 9]),
    max_size=8,
).map("".join)


@st.composite
def some_ids(draw: Any, tiny: Tiny, max_size: int = 12) -> list[int]:
    """Text that makes sense, broken up by ids that do not."""
    ids = tiny.ids(draw(_TEXTS))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(ids)))
        noise = draw(st.lists(st.integers(0, tiny.vocab_size - 1), max_size=3))
        ids[at:at] = noise
    return ids[:max_size] if draw(st.booleans()) else ids


@st.composite
def cuts(draw: Any, ids: list[int]) -> list[list[int]]:
    """The ids in arbitrary pieces, empty ones included."""
    points = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=len(ids) + 2)))
    edges = [0, *points, len(ids)]
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


def check_pieces(tiny: Tiny, prompt: list[int], pieces: list[list[int]], skip: bool) -> None:
    processor = OutputProcessor(
        tiny.codec.detokenizer(prompt, skip_special_tokens=skip),
        _SAMPLING,
        eos_token_ids=(),
        max_tokens=1000,
    )
    text, ids = "", list[int]()
    for piece in pieces:
        chunk = processor.process(piece)
        text += chunk.text
        ids += chunk.token_ids
        assert text == tiny.added_text(prompt, ids, skip_special_tokens=skip)
    chunk = processor.process([], FinishReason.LENGTH)
    whole = [i for piece in pieces for i in piece]
    assert ids + chunk.token_ids == whole
    assert text + chunk.text == tiny.added_text(prompt, whole, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_pieces_join_to_the_full_decoding(kind: str, data: st.DataObject) -> None:
    tiny = tiny_tokenizers.ALL[kind]
    prompt = data.draw(some_ids(tiny), label="prompt")
    ids = data.draw(some_ids(tiny), label="ids")
    check_pieces(tiny, prompt, data.draw(cuts(ids), label="pieces"), data.draw(st.booleans()))


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_resume_at_any_released_prefix_continues_exactly(kind: str, data: st.DataObject) -> None:
    tiny = tiny_tokenizers.ALL[kind]
    prompt = data.draw(some_ids(tiny), label="prompt")
    ids = data.draw(some_ids(tiny), label="ids")
    skip = data.draw(st.booleans())

    def new() -> OutputProcessor:
        return OutputProcessor(
            tiny.codec.detokenizer(prompt, skip_special_tokens=skip),
            _SAMPLING,
            eos_token_ids=(),
            max_tokens=1000,
        )

    first = new()
    received = first.process(ids[: data.draw(st.integers(0, len(ids)))])
    second = new()
    assert second.resume(received.token_ids) is None
    rest = second.process(ids[len(received.token_ids) :], FinishReason.LENGTH)
    assert received.text + rest.text == tiny.added_text(prompt, ids, skip_special_tokens=skip)
    assert second.num_tokens == len(ids)


def could_begin(data: bytes) -> bool:
    """Whether some bytes make exactly one character of it."""
    for more in range(1, 4):
        for tail in itertools.product((0x80, 0x90, 0x9F, 0xA0, 0xBF), repeat=more):
            try:
                if len((data + bytes(tail)).decode()) == 1:
                    return True
            except UnicodeDecodeError:
                pass
    return False


@given(
    data=st.lists(
        st.one_of(
            st.integers(0, 255),
            st.sampled_from([0xE0, 0xED, 0xF0, 0xF4, 0xF5, 0x80, 0x90, 0x9F, 0xA0, 0xC1, 65]),
        ),
        max_size=6,
    ).map(bytes)
)
@settings(max_examples=400, deadline=None)
def test_incomplete_size_is_the_longest_end_that_could_begin_a_character(data: bytes) -> None:
    sizes = [k for k in (3, 2, 1) if k <= len(data) and could_begin(data[-k:])]
    assert incomplete_size(data) == (sizes[0] if sizes else 0)


@pytest.fixture(scope="module")
def real(model_dir: Path) -> Tiny:
    """The demo model's own tokenizer."""
    tokenizer = Tokenizer(model_dir, vocab_size=49152 + 128)
    backend = tokenizer._backend
    return Tiny("smollm2", backend, TextCodec(backend, vocab_size=49280), 49280)


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_pieces_join_to_the_full_decoding_with_a_real_vocabulary(
    real: Tiny, data: st.DataObject
) -> None:
    prompt = data.draw(some_ids(real), label="prompt")
    ids = data.draw(some_ids(real), label="ids")
    check_pieces(real, prompt, data.draw(cuts(ids), label="pieces"), data.draw(st.booleans()))


@given(text=st.text(alphabet="😀👩‍🚀🏳️‍🌈é你a ", max_size=20))
@settings(max_examples=60, deadline=None)
def test_emoji_survive_one_token_at_a_time(real: Tiny, text: str) -> None:
    ids = real.ids(text)
    check_pieces(real, [], [[i] for i in ids], skip=True)
    assert real.backend.decode(ids) == text
