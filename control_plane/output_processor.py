"""What a client sees of one sequence: text and ids, cut so that they always belong together.

Ids are held back, whole, while their text is half a character or could still become a stop string.
So what a client has at any moment is a prefix from which the sequence can be continued exactly, and
it never has a part of a stop string. An ending token is an id without text.

A sequence ends at the first token that completes a stop string. Among the stop strings that are
complete then, the one that starts first counts (the longest of those that start together), and the
text ends before it. The tokens that spell it are output tokens and travel with the end.

Owns: stop strings and what is held back. Does not know: requests, transports, how ids become text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from control_plane.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from control_plane.detokenizer import Detokenizer
    from control_plane.request import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputChunk:
    """What became visible. Empty chunks are possible: everything may be held back.

    Attributes:
        text: Text released since the previous chunk.
        token_ids: The ids of exactly that text, and at an end the ids that ended it.
        finish_reason: Set in the last chunk.
        stop_string: What matched; the engine does not know of this end yet.
        stop_token_id: What the device stopped at, unless it was end-of-sequence.
    """

    text: str = ""
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    stop_token_id: int | None = None

    def __bool__(self) -> bool:
        return bool(self.text or self.token_ids) or self.finish_reason is not None


class PastEndError(ValueError):
    """Ids that a client resumes from go on after the sequence had ended.

    Attributes:
        num_tokens: How many ids the sequence has up to its end.
    """

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"the sequence ended after {num_tokens} tokens")
        self.num_tokens = num_tokens


class OutputProcessor:
    """Turns the token log of one sequence into chunks. Ended by the first chunk that says so."""

    __slots__ = (
        "_detokenizer",
        "_end_ids",
        "_eos_ids",
        "_include_stop",
        "_max_tokens",
        "_min_tokens",
        "_stop",
        "_tail",
        "_tail_size",
        "is_finished",
        "num_tokens",
    )

    def __init__(
        self,
        detokenizer: Detokenizer,
        sampling: SamplingParams,
        *,
        eos_token_ids: Sequence[int],
        max_tokens: int,
    ) -> None:
        """Start before the first output token.

        Args:
            detokenizer: Placed at the end of the prompt; owned from now on.
            sampling: Of the request.
            eos_token_ids: Of the model.
            max_tokens: Output limit, resolved; >= 1.
        """
        self._detokenizer = detokenizer
        self._stop = sampling.stop
        self._include_stop = sampling.include_stop_str_in_output
        self._eos_ids = frozenset(() if sampling.ignore_eos else eos_token_ids)
        self._end_ids = self._eos_ids | frozenset(sampling.stop_token_ids)
        self._min_tokens = sampling.min_tokens
        self._max_tokens = max_tokens
        # Delivered text that a stop string may have begun in; matters after a resume only, since
        # what could begin one is never delivered otherwise.
        self._tail = ""
        self._tail_size = max((len(stop) for stop in sampling.stop), default=1) - 1
        self.num_tokens = 0
        self.is_finished = False

    def resume(self, token_ids: Sequence[int]) -> OutputChunk | None:
        """Continue after ids that the client has, with their text.

        Returns:
            The end of the sequence, without ids or text, if the last id ended it; else None.

        Raises:
            PastEndError: An id before the last one ended it.
        """
        for count, token_id in enumerate(token_ids, start=1):
            # A device stops at these only where min_tokens output tokens came before.
            ends = token_id in self._end_ids and count > self._min_tokens
            if (ends or count >= self._max_tokens) and count < len(token_ids):
                raise PastEndError(count)
        if not token_ids:
            return None
        detokenizer = self._detokenizer
        detokenizer.extend(token_ids)
        self.num_tokens = len(token_ids)
        text = detokenizer.text()
        if (match := self._find_stop(text)) is not None:
            if match.num_tokens < len(token_ids):
                raise PastEndError(match.num_tokens)
            return self._end(FinishReason.STOP, stop_string=match.stop)
        self._remember(text)
        detokenizer.deliver()
        last = token_ids[-1]
        if last in self._end_ids and self.num_tokens > self._min_tokens:
            stop_token_id = None if last in self._eos_ids else last
            return self._end(FinishReason.STOP, stop_token_id=stop_token_id)
        if self.num_tokens >= self._max_tokens:
            return self._end(FinishReason.LENGTH)
        return None

    def process(
        self, token_ids: Sequence[int], finish_reason: FinishReason | None = None
    ) -> OutputChunk:
        """Take new tokens of the log, and its end with the last of them.

        A stop string makes its chunk the last one, whatever came after it in `token_ids`.
        """
        end_id: int | None = None
        if finish_reason is FinishReason.STOP and token_ids:
            end_id = token_ids[-1]
            token_ids = token_ids[:-1]
        detokenizer = self._detokenizer
        detokenizer.extend(token_ids)
        self.num_tokens += len(token_ids)
        text = detokenizer.text(final=finish_reason is not None)
        if self._stop and (match := self._find_stop(text)) is not None:
            ids = detokenizer.pending[: match.num_tokens]
            self.num_tokens -= len(detokenizer.pending) - match.num_tokens
            return self._end(
                FinishReason.STOP,
                text=text[: match.num_chars],
                token_ids=ids,
                stop_string=match.stop,
            )
        if finish_reason is None:
            return self._release(text)
        ids = list(detokenizer.pending)
        stop_token_id: int | None = None
        if end_id is not None:
            ids.append(end_id)
            self.num_tokens += 1
            stop_token_id = None if end_id in self._eos_ids else end_id
        return self._end(finish_reason, text=text, token_ids=ids, stop_token_id=stop_token_id)

    def _end(
        self,
        reason: FinishReason,
        *,
        text: str = "",
        token_ids: list[int] | None = None,
        stop_string: str | None = None,
        stop_token_id: int | None = None,
    ) -> OutputChunk:
        self.is_finished = True
        return OutputChunk(
            text=text,
            token_ids=token_ids or [],
            finish_reason=reason,
            stop_string=stop_string,
            stop_token_id=stop_token_id,
        )

    def _release(self, text: str) -> OutputChunk:
        """Release the tokens whose text is complete and free of what could become a stop string."""
        detokenizer = self._detokenizer
        num_chars = self._num_free(text)
        if num_chars == len(text) and detokenizer.is_clean:
            count = len(detokenizer.pending)
        else:
            count, num_chars = self._last_cut(num_chars)
        ids = detokenizer.pending[:count]
        if count:
            text = text[:num_chars]
            detokenizer.release(count)
            self._remember(text)
        else:
            text = ""
        return OutputChunk(text=text, token_ids=ids)

    def _last_cut(self, num_chars: int) -> tuple[int, int]:
        """Tokens and characters up to the last clean end at or before `num_chars`."""
        best = (0, 0)
        for count, span in enumerate(self._detokenizer.spans(), start=1):
            if span.num_chars > num_chars:
                break
            if span.is_clean:
                best = (count, span.num_chars)
        return best

    def _remember(self, text: str) -> None:
        if self._tail_size:
            self._tail = (self._tail + text)[-self._tail_size :]

    def _num_free(self, text: str) -> int:
        """Characters of `text` before the first position at which a stop string may have begun."""
        if not self._stop:
            return len(text)
        whole = self._tail + text
        first = len(whole)
        for stop in self._stop:
            start = max(0, len(whole) - len(stop) + 1)
            while (at := whole.find(stop[0], start, first)) != -1:
                if stop.startswith(whole[at:]):
                    first = at
                    break
                start = at + 1
        return max(0, first - len(self._tail))

    def _find_stop(self, text: str) -> _Match | None:
        """The end of the sequence by a stop string, at the first token that completes one."""
        if not self._stop:
            return None
        tail = len(self._tail)
        whole = self._tail + text
        ends = [at + len(stop) for stop in self._stop if (at := whole.find(stop)) != -1]
        if not ends:
            return None
        needed = min(ends) - tail
        num_tokens = len(self._detokenizer.pending)
        visible = len(text)
        for count, span in enumerate(self._detokenizer.spans(), start=1):
            if span.num_chars >= needed:
                num_tokens, visible = count, span.num_chars
                break
        whole = whole[: tail + visible]
        start, _, stop = min(
            (at, -len(stop), stop) for stop in self._stop if (at := whole.find(stop)) != -1
        )
        end = start + len(stop) if self._include_stop else start
        return _Match(stop=stop, num_tokens=num_tokens, num_chars=max(0, end - tail))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Match:
    stop: str
    num_tokens: int  # pending tokens up to the one that completes it
    num_chars: int  # characters of the pending text that the client still gets
