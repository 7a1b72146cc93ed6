"""What the edge reads of one request: tokens, ends and failure, coalesced between reads.

Tokens are read out of the token logs themselves, so a step costs a stream nothing unless its reader
sleeps until the next token. Owns: how far each log was read, ends and failure that were not.
Does not know text, clients or replicas. The engine's side never blocks and never awaits.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from control_plane.errors import ServingError
    from control_plane.request import FinishReason, Sequence


@dataclass(frozen=True, slots=True)
class SequenceNews:
    """What happened to one sequence since the last read.

    Attributes:
        index: Which of the request's continuations.
        token_ids: New output tokens, in order.
        finish_reason: Set once, with the last news of this sequence.
    """

    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class StreamNews:
    """Everything since the last read, one entry per sequence that has any.

    Attributes:
        sequences: By index.
        ended: Nothing will follow: every sequence has finished.
    """

    sequences: list[SequenceNews]
    ended: bool


class TokenReaders:
    """The streams whose readers sleep until the next token. One per cluster.

    A step with hundreds of sequences asks here once, instead of telling each of its streams.
    """

    def __init__(self) -> None:
        self._streams: dict[Sequence, TokenStream] = {}

    def wake(self, sequences: Iterable[Sequence]) -> None:
        """These sequences have got a token each."""
        if self._streams:
            for sequence in self._streams.keys() & sequences:
                # A stream that was told of one of its sequences may have taken out the others.
                if (stream := self._streams.get(sequence)) is not None:
                    stream.wake()

    def add(self, sequence: Sequence, stream: TokenStream) -> None:
        self._streams[sequence] = stream

    def discard(self, sequence: Sequence) -> None:
        self._streams.pop(sequence, None)


class TokenStream:
    """One request's way back to its client. One writer (the engine), one reader (the edge).

    Both live on one event loop. A failure is delivered after the tokens that came before it.
    """

    __slots__ = (
        "_ends",
        "_error",
        "_on_token",
        "_open",
        "_positions",
        "_readers",
        "_wake",
        "_watched",
        "closed",
    )

    def __init__(self, sequences: Iterable[Sequence], readers: TokenReaders) -> None:
        """Open a stream behind what the logs hold now.

        Args:
            sequences: Those that will finish; the stream has ended when all of them have.
            readers: Where a reader that waits for a token is known.
        """
        self._positions = {s: len(s.output_token_ids) for s in sequences}
        self._open = set(self._positions)
        self._ends: dict[Sequence, FinishReason] = {}  # not read yet
        self._error: ServingError | None = None
        self._readers = readers
        self._wake = asyncio.Event()
        self._on_token: Callable[[], None] | None = None
        self._watched: tuple[Sequence, ...] = ()
        self.closed = not self._open

    def watch(self, on_token: Callable[[], None]) -> None:
        """Have the next token told by a call, which costs less than waking a task.

        Until then, or `unwatch`, the reader may use `read_end` only.
        """
        self._on_token = on_token
        self._watched = tuple(self._open)
        for sequence in self._watched:
            self._readers.add(sequence, self)

    def unwatch(self) -> None:
        """Nobody is told any more. Idempotent; whoever watches has to call it at the end."""
        self._on_token = None
        for sequence in self._watched:
            self._readers.discard(sequence)
        self._watched = ()

    def wake(self) -> None:
        """There is a token."""
        if (on_token := self._on_token) is not None:
            self.unwatch()
            on_token()
        else:
            self._wake.set()

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End one sequence; its log does not grow any more."""
        if sequence not in self._open or self._error is not None:
            return
        self._ends[sequence] = reason
        self._open.discard(sequence)
        self.closed = not self._open
        self._wake.set()

    def fail(self, error: ServingError) -> None:
        """End all of it with an error, unless it has ended already."""
        if not self.closed:
            self._error = error
            self.closed = True
            self._wake.set()

    async def read(self) -> StreamNews:
        """Wait for news and take all of it.

        Returns:
            Everything since the last read; at once with `ended` when nothing will follow.

        Raises:
            ServingError: The request failed, and everything that came before was read.
        """
        if not self._has_news():
            waiting = tuple(self._open)
            for sequence in waiting:
                self._readers.add(sequence, self)
            try:
                await self._wake.wait()
            finally:
                for sequence in waiting:
                    self._readers.discard(sequence)
        return self.take()

    async def read_end(self) -> StreamNews:
        """`read`, but tokens alone are no news: they gather until something ends.

        Raises:
            ServingError: As `read`.
        """
        if not (self._ends or self.closed):
            await self._wake.wait()
        return self.take()

    def take(self) -> StreamNews:
        """What is there now, possibly nothing; `read` without the wait.

        Raises:
            ServingError: As `read`.
        """
        self._wake.clear()
        news: list[SequenceNews] = []
        for sequence, position in self._positions.items():
            token_ids = sequence.output_token_ids[position:]
            reason = self._ends.get(sequence)
            if token_ids or reason is not None:
                self._positions[sequence] = position + len(token_ids)
                news.append(SequenceNews(sequence.index, token_ids, reason))
        for sequence in self._ends:
            del self._positions[sequence]
        self._ends.clear()
        if self._error is not None and not news:
            raise self._error
        return StreamNews(news, ended=self.closed and self._error is None)

    def _has_news(self) -> bool:
        if self.closed or self._ends:
            return True
        for sequence, position in self._positions.items():
            if len(sequence.output_token_ids) > position:
                return True
        return False
