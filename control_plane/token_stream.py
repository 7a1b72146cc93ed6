"""What the edge reads of one request: tokens, ends and failure, coalesced between reads.

Owns the news that was not read yet; at most the request's own tokens, so it needs no bound of its
own. Does not know text, clients or replicas. The engine's side never blocks and never awaits.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from control_plane.errors import ServingError
    from control_plane.request import FinishReason


@dataclass(slots=True)
class SequenceNews:
    """What happened to one sequence since the last read.

    Attributes:
        index: Which of the request's continuations.
        token_ids: New output tokens, in order.
        finish_reason: Set once, with the last news of this sequence.
    """

    index: int
    token_ids: list[int] = field(default_factory=list[int])
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class StreamNews:
    """Everything since the last read, one entry per sequence that has any.

    Attributes:
        sequences: In order of first news.
        ended: Nothing will follow: every sequence has finished.
    """

    sequences: list[SequenceNews]
    ended: bool


class TokenStream:
    """One request's way back to its client. One writer (the engine), one reader (the edge).

    Both live on one event loop. A failure is delivered after the tokens that came before it.
    """

    __slots__ = ("_error", "_news", "_open", "_wake", "closed")

    def __init__(self, indices: Iterable[int] = (0,)) -> None:
        """Open a stream.

        Args:
            indices: The sequences that will finish; the stream has ended when all of them have.
        """
        self._open = set(indices)
        self._news: dict[int, SequenceNews] = {}
        self._error: ServingError | None = None
        self._wake = asyncio.Event()
        self.closed = not self._open

    def push(self, index: int, token_ids: Iterable[int]) -> None:
        """Add output tokens; dropped if the sequence has ended."""
        if index in self._open and self._error is None:
            self._entry(index).token_ids.extend(token_ids)
            self._wake.set()

    def push_token(self, index: int, token_id: int) -> None:
        """`push` of one token, for the loop over every row of a step."""
        if index in self._open and self._error is None:
            self._entry(index).token_ids.append(token_id)
            self._wake.set()

    def finish(self, index: int, reason: FinishReason) -> None:
        """End one sequence; later tokens of it are dropped."""
        if index not in self._open or self._error is not None:
            return
        self._entry(index).finish_reason = reason
        self._open.discard(index)
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
        if not self._news and not self.closed:
            await self._wake.wait()
        return self.take()

    def take(self) -> StreamNews:
        """What is there now, possibly nothing; `read` without the wait.

        Raises:
            ServingError: As `read`.
        """
        self._wake.clear()
        if self._error is not None and not self._news:
            raise self._error
        sequences = list(self._news.values())
        self._news = {}
        return StreamNews(sequences, ended=self.closed and self._error is None)

    def _entry(self, index: int) -> SequenceNews:
        entry = self._news.get(index)
        if entry is None:
            entry = self._news[index] = SequenceNews(index)
        return entry
