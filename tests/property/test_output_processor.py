"""Stop strings: found at the right token, never leaked, whatever the pieces and the tokens."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import tiny_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.output_processor import OutputProcessor, PastEndError
from control_plane.request import FinishReason, SamplingParams

if TYPE_CHECKING:
    from tiny_tokenizers import Tiny

_TEXTS = st.lists(
    st.sampled_from(["E", "EN", "END", "N", "D", " ", "stop", "st", "op", "é", "😀", "x"]),
    max_size=12,
).map("".join)
_STOPS = st.lists(
    st.sampled_from(["END", "ND", "EE", "stop", "op s", "😀", "é😀", "D ", "xEx", "EENDE"]),
    min_size=1,
    max_size=3,
    unique=True,
)


@dataclass(frozen=True)
class End:
    """What the definition says: computed from whole texts, token by token."""

    num_tokens: int
    text: str
    stop: str | None


def visible(tiny: Tiny, ids: list[int], *, final: bool = False) -> str:
    detokenizer = tiny.codec.detokenizer([], skip_special_tokens=True)
    detokenizer.extend(ids)
    return detokenizer.text(final=final)


def defined_end(tiny: Tiny, ids: list[int], stops: list[str], *, include: bool) -> End:
    for count in range(1, len(ids) + 1):
        text = visible(tiny, ids[:count], final=count == len(ids))
        found = [(text.find(stop), -len(stop), stop) for stop in stops if stop in text]
        if found:
            start, _, stop = min(found)
            end = start + len(stop) if include else start
            return End(count, text[:end], stop)
    return End(len(ids), visible(tiny, ids, final=True), None)


def make(
    tiny: Tiny, stops: list[str], *, include: bool = False, **sampling: Any
) -> OutputProcessor:
    return OutputProcessor(
        tiny.codec.detokenizer([], skip_special_tokens=True),
        SamplingParams(stop=tuple(stops), include_stop_str_in_output=include, **sampling),
        eos_token_ids=(2,),
        max_tokens=1000,
    )


@st.composite
def ids_of(draw: Any, tiny: Tiny) -> list[int]:
    ids = tiny.ids(draw(_TEXTS))
    for _ in range(draw(st.integers(0, 2))):
        ids.insert(draw(st.integers(0, len(ids))), draw(st.integers(4, tiny.vocab_size - 1)))
    return ids


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_sequence_ends_at_the_first_token_that_completes_a_stop_string(
    kind: str, data: st.DataObject
) -> None:
    tiny = tiny_tokenizers.ALL[kind]
    ids = data.draw(ids_of(tiny), label="ids")
    stops = data.draw(_STOPS, label="stops")
    include = data.draw(st.booleans(), label="include")
    points = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6), label="cuts"))
    end = defined_end(tiny, ids, stops, include=include)

    processor = make(tiny, stops, include=include)
    text, received = "", list[int]()
    pieces = [ids[a:b] for a, b in itertools.pairwise([0, *points, len(ids)])]
    for i, piece in enumerate(pieces):
        last = i == len(pieces) - 1
        chunk = processor.process(piece, FinishReason.LENGTH if last else None)
        text += chunk.text
        received += chunk.token_ids
        assert end.text.startswith(text)
        if processor.is_finished:
            break
        assert text == visible(tiny, received)
        assert not any(stop in text for stop in stops)
    assert text == end.text
    assert received == ids[: end.num_tokens]
    assert processor.num_tokens == end.num_tokens
    assert chunk.stop_string == end.stop
    assert chunk.finish_reason is (FinishReason.STOP if end.stop else FinishReason.LENGTH)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_resume_finds_the_stop_string_that_the_whole_request_would_have(
    kind: str, data: st.DataObject
) -> None:
    tiny = tiny_tokenizers.ALL[kind]
    ids = data.draw(ids_of(tiny), label="ids")
    stops = data.draw(_STOPS, label="stops")
    end = defined_end(tiny, ids, stops, include=False)
    first = make(tiny, stops)
    received = first.process(ids[: data.draw(st.integers(0, len(ids)), label="cut")])
    if first.is_finished:
        return
    second = make(tiny, stops)
    assert second.resume(received.token_ids) is None
    rest = second.process(ids[len(received.token_ids) :], FinishReason.LENGTH)
    assert received.text + rest.text == end.text
    assert [*received.token_ids, *rest.token_ids] == ids[: end.num_tokens]
    assert second.num_tokens == end.num_tokens


def tiny() -> Tiny:
    return tiny_tokenizers.ALL["byte_level"]


def test_text_that_cannot_begin_a_stop_string_is_released_at_once() -> None:
    processor = make(tiny(), ["END"])
    chunk = processor.process(tiny().ids("hello E"))
    assert chunk.text.startswith("hello")
    assert "E" not in chunk.text
    assert processor.process(tiny().ids("x")).text.endswith("Ex")


def test_everything_held_is_flushed_at_the_end() -> None:
    processor = make(tiny(), ["END"])
    ids = tiny().ids("EN")
    assert not processor.process(ids)
    chunk = processor.process([], FinishReason.LENGTH)
    assert (chunk.text, chunk.token_ids) == ("EN", ids)


def test_half_a_character_at_the_end_becomes_a_replacement_character() -> None:
    processor = make(tiny(), [])
    ids = tiny().ids("😀")[:-1]
    assert ids
    assert not processor.process(ids)
    assert processor.process([], FinishReason.LENGTH).text == "\ufffd"


def test_the_ending_token_is_an_id_without_text() -> None:
    stop_id = tiny().ids("hello")[0]
    processor = make(tiny(), [], stop_token_ids=(stop_id,), skip_special_tokens=False)
    chunk = processor.process([*tiny().ids("x"), stop_id], FinishReason.STOP)
    assert (chunk.text, chunk.token_ids[-1], chunk.stop_token_id) == ("x", stop_id, stop_id)
    assert processor.num_tokens == len(tiny().ids("x")) + 1


def test_end_of_sequence_is_no_stop_reason() -> None:
    chunk = make(tiny(), []).process([2], FinishReason.STOP)
    assert (chunk.text, chunk.token_ids, chunk.stop_token_id) == ("", [2], None)


def test_an_ignored_end_of_sequence_token_is_an_ordinary_one() -> None:
    processor = OutputProcessor(
        tiny().codec.detokenizer([], skip_special_tokens=False),
        SamplingParams(ignore_eos=True),
        eos_token_ids=(2,),
        max_tokens=9,
    )
    assert processor.process([2], FinishReason.LENGTH).text == "</s>"


def test_a_resume_whose_last_id_ended_the_sequence_is_ended() -> None:
    processor = make(tiny(), [])
    end = processor.resume([*tiny().ids("x"), 2])
    assert end is not None
    assert (end.finish_reason, end.text, end.token_ids) == (FinishReason.STOP, "", [])


def test_a_resume_that_goes_on_after_the_end_is_refused() -> None:
    with pytest.raises(PastEndError) as error:
        make(tiny(), []).resume([5, 2, 6])
    assert error.value.num_tokens == 2


def test_a_resume_with_a_stop_string_inside_is_refused() -> None:
    with pytest.raises(PastEndError):
        make(tiny(), ["END"]).resume(tiny().ids("an END of it"))


def test_a_stop_token_before_min_tokens_does_not_end_a_resume() -> None:
    processor = make(tiny(), [], min_tokens=2)
    assert processor.resume([2, 2]) is None


def test_a_resume_that_reached_max_tokens_is_ended() -> None:
    processor = OutputProcessor(
        tiny().codec.detokenizer([], skip_special_tokens=True),
        SamplingParams(),
        eos_token_ids=(2,),
        max_tokens=2,
    )
    end = processor.resume([5, 6])
    assert end is not None
    assert end.finish_reason is FinishReason.LENGTH


def test_the_cost_of_a_token_does_not_grow_with_the_history() -> None:
    calls = 0
    codec = tiny_tokenizers.ALL["sentencepiece"].codec
    detokenizer: Any = codec.detokenizer([], skip_special_tokens=True)
    decoder = detokenizer._decoder
    longest = 0

    class Counting:
        hidden, byte_ids, may_split = decoder.hidden, decoder.byte_ids, decoder.may_split

        @staticmethod
        def decode(token_ids: list[int]) -> str:
            nonlocal calls, longest
            calls += 1
            longest = max(longest, len(token_ids))
            return decoder.decode(token_ids)

    detokenizer._decoder = Counting
    processor = OutputProcessor(detokenizer, SamplingParams(), eos_token_ids=(), max_tokens=9999)
    ids = tiny_tokenizers.ALL["sentencepiece"].ids("hello world " * 40)
    for token_id in ids:
        processor.process([token_id])
    assert longest <= 8
    assert calls <= 3 * len(ids)
