"""The tables that turn one model's token ids back into text, built once and shared.

Reads the decoder of a `tokenizers` file and picks the way that is exact for it: byte strings where
the vocabulary is byte-level, else short windows through the library's own decoder.

Owns: bytes of every token, which tokens are special. Does not know: sequences, prompts.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from control_plane.detokenizer import ByteDetokenizer, WindowDecoder, WindowDetokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from control_plane.detokenizer import Detokenizer

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TextCodec:
    """Makes the detokenizers of one model."""

    def __init__(self, backend: Any, *, vocab_size: int) -> None:
        """Build the tables.

        Args:
            backend: A `tokenizers.Tokenizer`.
            vocab_size: Of the model: ids past the tokenizer's own have no text.
        """
        tokens: list[str | None] = [backend.id_to_token(i) for i in range(vocab_size)]
        special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        decoder: Any = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
        self._tables: dict[bool, list[bytes]] | None = None
        self._windows: dict[bool, WindowDecoder] = {}
        if decoder.get("type") == "ByteLevel":
            pieces = [_bytes_of(token) for token in tokens]
            skipped = [b"" if i in special else piece for i, piece in enumerate(pieces)]
            self._tables = {True: skipped, False: pieces}
            return
        kinds = _kinds(decoder)
        holes = {i for i, token in enumerate(tokens) if token is None}
        byte_ids: set[int] = set()
        if "ByteFallback" in kinds:
            byte_ids = {i for i, t in enumerate(tokens) if t and _BYTE_TOKEN.fullmatch(t)}

        def decode(token_ids: Sequence[int]) -> str:
            return backend.decode(list(token_ids), skip_special_tokens=False)

        for skip in (True, False):
            self._windows[skip] = WindowDecoder(
                decode=decode,
                hidden=frozenset(holes | special if skip else holes),
                byte_ids=frozenset(byte_ids - special if skip else byte_ids),
                may_split="ByteLevel" in kinds,
            )

    def detokenizer(self, prompt: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
        """A detokenizer at the end of a prompt."""
        if self._tables is not None:
            return ByteDetokenizer(self._tables[skip_special_tokens], prompt)
        return WindowDetokenizer(self._windows[skip_special_tokens], prompt)


def _kinds(decoder: Any) -> set[str]:
    """Types of a decoder and of those it is a sequence of."""
    kinds = {str(decoder.get("type"))}
    for part in decoder.get("decoders", ()):
        kinds |= _kinds(part)
    return kinds


def _alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: those that print stand for themselves.

    Source: https://github.com/openai/gpt-2/blob/master/src/encoder.py (bytes_to_unicode)
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return alphabet


_ALPHABET = _alphabet()


def _bytes_of(token: str | None) -> bytes:
    if token is None:
        return b""
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:
        # An added token outside the alphabet stands for its own text.
        return token.encode()
