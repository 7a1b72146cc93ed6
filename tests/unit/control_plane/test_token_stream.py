"""What the edge reads of a request."""

from __future__ import annotations

import asyncio

import pytest

from control_plane.errors import AbortedError
from control_plane.request import FinishReason, Request, SamplingParams, Sequence
from control_plane.token_stream import TokenReaders, TokenStream


class Writer:
    """The engine's side: logs a step's tokens and tells the readers, as a cluster does."""

    def __init__(
        self, num_sequences: int = 1, *, known: dict[int, list[int]] | None = None
    ) -> None:
        self.request = Request(
            req_id="r",
            prompt_token_ids=[1],
            sampling=SamplingParams(n=num_sequences),
            seed=0,
            max_total_tokens=100,
            arrival=0,
            resume=known,
        )
        self.readers = TokenReaders()
        self.stream = TokenStream(self.request.sequences, self.readers)

    def step(self, tokens: dict[int, int]) -> None:
        for index, token_id in tokens.items():
            self.sequence(index).output_token_ids.append(token_id)
        self.readers.wake([self.sequence(index) for index in tokens])

    def finish(self, index: int, reason: FinishReason) -> None:
        self.stream.finish(self.sequence(index), reason)

    def sequence(self, index: int) -> Sequence:
        return self.request.sequences[index]


async def test_everything_since_the_last_read_comes_at_once() -> None:
    writer = Writer(2)
    writer.step({0: 5, 1: 7})
    writer.step({0: 6, 1: 8})
    news = await writer.stream.read()
    assert [(s.index, s.token_ids) for s in news.sequences] == [(0, [5, 6]), (1, [7, 8])]
    assert not news.ended
    assert writer.stream.take().sequences == []


async def test_a_read_waits_for_news() -> None:
    writer = Writer()
    for token_id in (5, 6):
        reader = asyncio.create_task(writer.stream.read())
        await asyncio.sleep(0)
        assert not reader.done()
        writer.step({0: token_id})
        assert (await reader).sequences[0].token_ids == [token_id]


async def test_what_a_resume_brought_is_no_news() -> None:
    writer = Writer(known={0: [5, 6]})
    writer.step({0: 7})
    assert (await writer.stream.read()).sequences[0].token_ids == [7]


async def test_a_reader_of_the_end_sleeps_through_tokens() -> None:
    writer = Writer()
    reader = asyncio.create_task(writer.stream.read_end())
    for token_id in (5, 6, 7):
        await asyncio.sleep(0)
        writer.step({0: token_id})
    await asyncio.sleep(0)
    assert not reader.done()
    writer.finish(0, FinishReason.STOP)
    news = await reader
    assert news.sequences[0].token_ids == [5, 6, 7]
    assert news.ended


async def test_a_reader_that_gave_up_waiting_misses_nothing() -> None:
    writer = Writer()
    for wait in (writer.stream.read, writer.stream.read_end):
        reader = asyncio.create_task(wait())
        await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
    writer.step({0: 5})
    assert (await writer.stream.read()).sequences[0].token_ids == [5]


async def test_it_has_ended_when_every_sequence_has() -> None:
    writer = Writer(2)
    writer.finish(0, FinishReason.STOP)
    assert not (await writer.stream.read()).ended
    writer.step({1: 3})
    writer.finish(1, FinishReason.LENGTH)
    news = await writer.stream.read()
    assert news.ended
    assert news.sequences[0].token_ids == [3]
    assert news.sequences[0].finish_reason is FinishReason.LENGTH
    assert (await writer.stream.read()).ended


async def test_only_the_first_end_counts() -> None:
    writer = Writer(2)
    writer.finish(0, FinishReason.STOP)
    writer.finish(0, FinishReason.LENGTH)
    (sequence,) = (await writer.stream.read()).sequences
    assert sequence.token_ids == []
    assert sequence.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("read", [TokenStream.read, TokenStream.read_end])
async def test_a_failure_comes_after_the_tokens_before_it(read: object) -> None:
    writer = Writer()
    writer.step({0: 5})
    writer.stream.fail(AbortedError("gone"))
    news = await read(writer.stream)  # type: ignore[operator]  # a method, by its class
    assert news.sequences[0].token_ids == [5]
    assert not news.ended
    for _ in range(2):
        with pytest.raises(AbortedError):
            await read(writer.stream)  # type: ignore[operator]  # as above


async def test_a_failure_wakes_a_reader() -> None:
    writer = Writer()
    for wait in (writer.stream.read, writer.stream.read_end):
        reader = asyncio.create_task(wait())
        await asyncio.sleep(0)
        writer.stream.fail(AbortedError("gone"))
        with pytest.raises(AbortedError):
            await reader


async def test_a_failure_after_the_end_changes_nothing() -> None:
    writer = Writer()
    writer.finish(0, FinishReason.STOP)
    writer.stream.fail(AbortedError("late"))
    assert (await writer.stream.read()).ended


async def test_a_stream_without_live_sequences_has_ended() -> None:
    assert (await TokenStream([], TokenReaders()).read()).ended


async def test_a_watcher_is_told_of_the_first_token_and_the_reader_sleeps_on() -> None:
    writer = Writer(2)
    told: list[int] = []
    writer.stream.watch(lambda: told.append(len(writer.sequence(0).output_token_ids)))
    reader = asyncio.create_task(writer.stream.read_end())
    await asyncio.sleep(0)
    writer.step({0: 5, 1: 7})
    writer.step({0: 6, 1: 8})
    await asyncio.sleep(0)
    assert told == [1]
    assert not reader.done()
    writer.finish(0, FinishReason.STOP)
    assert [s.token_ids for s in (await reader).sequences] == [[5, 6], [7, 8]]


async def test_a_watcher_that_left_is_not_told() -> None:
    writer = Writer()
    told: list[int] = []
    writer.stream.watch(lambda: told.append(1))
    writer.stream.unwatch()
    writer.stream.unwatch()
    writer.step({0: 5})
    assert told == []
