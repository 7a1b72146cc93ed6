"""What the edge reads of a request."""

from __future__ import annotations

import asyncio

import pytest

from control_plane.errors import AbortedError
from control_plane.request import FinishReason
from control_plane.token_stream import TokenStream


async def test_everything_since_the_last_read_comes_at_once() -> None:
    stream = TokenStream([0, 1])
    stream.push_token(0, 5)
    stream.push(1, [7, 8])
    stream.push_token(0, 6)
    news = await stream.read()
    assert [(s.index, s.token_ids) for s in news.sequences] == [(0, [5, 6]), (1, [7, 8])]
    assert not news.ended
    assert stream.take().sequences == []


async def test_a_read_waits_for_news() -> None:
    stream = TokenStream()
    reader = asyncio.create_task(stream.read())
    await asyncio.sleep(0)
    assert not reader.done()
    stream.push_token(0, 5)
    assert (await reader).sequences[0].token_ids == [5]


async def test_it_has_ended_when_every_sequence_has() -> None:
    stream = TokenStream([0, 1])
    stream.finish(0, FinishReason.STOP)
    assert not (await stream.read()).ended
    stream.push_token(1, 3)
    stream.finish(1, FinishReason.LENGTH)
    news = await stream.read()
    assert news.ended
    assert news.sequences[0].finish_reason is FinishReason.LENGTH
    assert (await stream.read()).ended


async def test_tokens_behind_an_end_are_dropped() -> None:
    stream = TokenStream([0, 1])
    stream.finish(0, FinishReason.STOP)
    stream.push_token(0, 5)
    stream.finish(0, FinishReason.LENGTH)
    (sequence,) = (await stream.read()).sequences
    assert sequence.token_ids == []
    assert sequence.finish_reason is FinishReason.STOP


async def test_a_failure_comes_after_the_tokens_before_it() -> None:
    stream = TokenStream()
    stream.push_token(0, 5)
    stream.fail(AbortedError("gone"))
    stream.push_token(0, 6)
    news = await stream.read()
    assert news.sequences[0].token_ids == [5]
    assert not news.ended
    for _ in range(2):
        with pytest.raises(AbortedError):
            await stream.read()


async def test_a_failure_after_the_end_changes_nothing() -> None:
    stream = TokenStream()
    stream.finish(0, FinishReason.STOP)
    stream.fail(AbortedError("late"))
    assert (await stream.read()).ended


async def test_a_stream_without_live_sequences_has_ended() -> None:
    assert (await TokenStream([]).read()).ended
