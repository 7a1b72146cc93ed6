"""Token ids to text, piece by piece, never half a character.

Two ways, one interface. `ByteDetokenizer` serves byte-level vocabularies (GPT-2's alphabet, most
models of today): the text of ids is the UTF-8 decoding of their concatenated bytes, so it needs
nothing but a table and the bytes of one unfinished character. `WindowDetokenizer` serves every
other decoder (SentencePiece with byte fallback, WordPiece) by decoding a short window that starts
at the last released tokens.

The text of a sequence is what decoding prompt and ids together adds to decoding the prompt alone:
a pure function of prompt and ids, and what a client gets by concatenating. Joined, the pieces are
exactly that, however the ids were cut into pieces.

Owns: ids that are not released yet and the few before them that their text depends on.
Does not know: stop strings, why a sequence ends, requests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_CONTEXT_TOKENS = 4  # what a window keeps of the released tokens
_BYTE_CONTEXT_TOKENS = 16  # an unfinished character has at most 3 bytes, some tokens have none
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class Span:
    """Where the text of the pending tokens stands after one of them.

    Attributes:
        num_chars: Complete characters up to and including this token.
        is_clean: The token ends at the end of a character; only then may it be released.
    """

    num_chars: int
    is_clean: bool


class Detokenizer(ABC):
    """The text of one sequence. Tokens are pending until they are released, oldest first."""

    __slots__ = ("_base", "_pending")

    def __init__(self) -> None:
        self._pending: list[int] = []
        # What decoding the kept context yields and was delivered before.
        self._base = ""

    @property
    def pending(self) -> list[int]:
        """Ids whose text is not released, in order. Borrowed: the caller must not change it."""
        return self._pending

    def extend(self, token_ids: Iterable[int]) -> None:
        self._pending.extend(token_ids)

    @abstractmethod
    def text(self, *, final: bool = False) -> str:
        """Complete characters of the pending tokens; with `final`, incomplete ones as U+FFFD."""

    @property
    @abstractmethod
    def is_clean(self) -> bool:
        """Whether the pending tokens end at the end of a character."""

    @abstractmethod
    def spans(self) -> list[Span]:
        """One entry per pending token. Costs a pass over them: for cutting, not for every flush."""

    @abstractmethod
    def release(self, count: int) -> None:
        """Drop the first `count` pending tokens; the last of them must be clean."""

    @abstractmethod
    def deliver(self) -> None:
        """Drop all pending tokens: a client has them and their complete characters."""

    def _added(self, whole: str) -> str:
        if whole.startswith(self._base):
            return whole[len(self._base) :]
        # The context ended in half a character, which the first pending tokens complete.
        common = 0
        for ours, theirs in zip(whole, self._base, strict=False):
            if ours != theirs:
                break
            common += 1
        return whole[common:]


class ByteDetokenizer(Detokenizer):
    """For vocabularies whose tokens are byte strings."""

    __slots__ = ("_head", "_table")

    def __init__(self, table: Sequence[bytes], prompt_token_ids: Sequence[int] = ()) -> None:
        """Start after a prompt.

        Args:
            table: Bytes of every token id; empty for what does not show. Shared, never changed.
            prompt_token_ids: The prompt, or its end.
        """
        super().__init__()
        self._table = table
        tail = b"".join([table[i] for i in prompt_token_ids[-_BYTE_CONTEXT_TOKENS:]])
        self._head = _incomplete_end(tail)
        self._base = REPLACEMENT if self._head else ""

    def text(self, *, final: bool = False) -> str:
        data = self._bytes()
        if not final and (size := incomplete_size(data)):
            data = data[:-size]
        return self._added(data.decode("utf-8", "replace")) if data else ""

    @property
    def is_clean(self) -> bool:
        return not incomplete_size(self._bytes())

    def spans(self) -> list[Span]:
        spans: list[Span] = []
        text = ""
        rest = self._head
        num_chars = 0
        for token_id in self._pending:
            data = rest + self._table[token_id]
            size = incomplete_size(data)
            piece = data[: len(data) - size].decode("utf-8", "replace")
            rest = data[len(data) - size :]
            if self._base and piece and not num_chars:
                # Only the first characters can belong to what the prompt showed already.
                text += piece
                num_chars = len(self._added(text))
            else:
                num_chars += len(piece)
            spans.append(Span(num_chars, not rest))
        return spans

    def release(self, count: int) -> None:
        del self._pending[:count]
        if count:
            self._head = b""
            self._base = ""

    def deliver(self) -> None:
        self._head = _incomplete_end(self._bytes())
        self._pending.clear()
        self._base = ""

    def _bytes(self) -> bytes:
        table = self._table
        data = b"".join([table[i] for i in self._pending])
        return self._head + data if self._head else data


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowDecoder:
    """What a window needs to know of a tokenizer. Shared by all sequences of a model.

    Attributes:
        decode: Ids to text, special tokens kept.
        hidden: Ids that never show: special tokens where they are skipped, and ids without a token.
        byte_ids: Tokens that stand for one byte. How a run of them decodes is known at its end
            only: one bad byte turns the whole run into U+FFFD.
        may_split: The decoder may end in U+FFFD because a character is incomplete.
    """

    decode: Callable[[Sequence[int]], str]
    hidden: frozenset[int]
    byte_ids: frozenset[int]
    may_split: bool = False


class WindowDetokenizer(Detokenizer):
    """For every decoder whose text of a token depends on the tokens just before it only."""

    __slots__ = ("_context", "_decoder")

    def __init__(self, decoder: WindowDecoder, prompt_token_ids: Sequence[int] = ()) -> None:
        """Start after a prompt, of which the end is enough."""
        super().__init__()
        self._decoder = decoder
        self._context = self._shorten(prompt_token_ids)
        self._base = decoder.decode(self._context)

    def text(self, *, final: bool = False) -> str:
        shown = self._shown(self._pending)
        if not final:
            shown = shown[: self._num_decodable(shown)]
        return self._text_of(shown)

    @property
    def is_clean(self) -> bool:
        shown = self._shown(self._pending)
        return self._num_decodable(shown) == len(shown)

    def spans(self) -> list[Span]:
        # Released as they come by a copy: decoding all of them anew for each one would take the
        # square of their number, and a client that resumes can bring a whole output at once.
        copy = WindowDetokenizer(self._decoder)
        copy._context, copy._base = self._context, self._base
        spans: list[Span] = []
        span, num_released = Span(0, is_clean=True), 0
        for token_id in self._pending:
            copy._pending.append(token_id)
            if token_id in self._decoder.byte_ids:
                span = Span(span.num_chars, is_clean=False)
            elif token_id not in self._decoder.hidden:
                num_chars = num_released + len(copy.text())
                span = Span(num_chars, copy.is_clean)
                if span.is_clean:
                    copy.release(len(copy._pending))
                    num_released = num_chars
            spans.append(span)
        return spans

    def release(self, count: int) -> None:
        shown = self._shown(self._pending[:count])
        del self._pending[:count]
        if shown:
            self._context = self._shorten(self._context + shown)
            self._base = self._decoder.decode(self._context)

    def deliver(self) -> None:
        shown = self._shown(self._pending)
        if not shown:
            self._pending.clear()
            return
        # The tokens of an unfinished character stay in the context, without their text.
        num_unfinished = len(shown) - self._num_decodable(shown)
        self._pending.clear()
        self._context = self._shorten(self._context + shown, keep=num_unfinished)
        self._base = self._decoder.decode(self._context[: len(self._context) - num_unfinished])

    def _shown(self, token_ids: Iterable[int]) -> list[int]:
        hidden = self._decoder.hidden
        return [i for i in token_ids if i not in hidden]

    def _num_decodable(self, shown: list[int]) -> int:
        """Tokens before the trailing run that later tokens may still change."""
        byte_ids = self._decoder.byte_ids
        end = len(shown)
        while end and shown[end - 1] in byte_ids:
            end -= 1
        if not self._decoder.may_split:
            return end
        # A character has at most four bytes: what is still broken four tokens back stays broken.
        for back in range(min(4, end + 1)):
            if not self._decoder.decode(self._context + shown[: end - back]).endswith(REPLACEMENT):
                return end - back
        return end

    def _text_of(self, shown: list[int]) -> str:
        return self._added(self._decoder.decode(self._context + shown)) if shown else ""

    def _shorten(self, token_ids: Sequence[int], *, keep: int = 0) -> list[int]:
        """The end of the tokens: at least `keep` of them, never starting inside a run of bytes."""
        decoder = self._decoder
        kept: list[int] = []
        for token_id in reversed(token_ids):
            if token_id in decoder.hidden:
                continue
            kept.append(token_id)
            if len(kept) >= keep + _CONTEXT_TOKENS and token_id not in decoder.byte_ids:
                break
        kept.reverse()
        return kept


def incomplete_size(data: bytes) -> int:
    """Bytes at the end that may be the start of a UTF-8 character, 0 to 3."""
    for back in range(1, min(3, len(data)) + 1):
        lead = data[-back]
        if lead & 0xC0 == 0x80:
            continue
        if not 0xC2 <= lead <= 0xF4:
            return 0
        size = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
        if back >= size or (back > 1 and not _may_follow(lead, data[1 - back])):
            return 0
        return back
    return 0


def _may_follow(lead: int, second: int) -> bool:
    """Whether a second byte keeps out overlong forms, surrogates and what is past U+10FFFF."""
    if lead == 0xE0:
        return second >= 0xA0
    if lead == 0xED:
        return second < 0xA0
    if lead == 0xF0:
        return second >= 0x90
    if lead == 0xF4:
        return second < 0x90
    return True


def _incomplete_end(data: bytes) -> bytes:
    size = incomplete_size(data)
    return data[-size:] if size else b""
