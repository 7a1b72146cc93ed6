"""The text that goes with token ids, from the tokenizer's own library.

Owns: what decoding adds to a prompt, where a stop string cuts it. Does not know: how the product
turns ids into text.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from chaos.load_requests import PlannedRequest
    from chaos.streams import StreamRecord


class TextOracle:
    """Of one model."""

    def __init__(self, model_dir: Path) -> None:
        self._tokenizer: Any = Tokenizer.from_file(str(model_dir / "tokenizer.json"))

    def text(self, request: PlannedRequest, token_ids: Sequence[int]) -> str:
        """What decoding prompt and ids adds to decoding the prompt."""
        skip = request.options.get("skip_special_tokens", True)
        # Of text and conversations the end is the end of a character, and adds nothing.
        prompt = [i for i in request.prompt if isinstance(i, int)]
        base: str = self._tokenizer.decode(prompt, skip_special_tokens=skip)
        whole: str = self._tokenizer.decode([*prompt, *token_ids], skip_special_tokens=skip)
        if whole.startswith(base):
            return whole[len(base) :]
        # The prompt ended in half a character, which the first ids complete.
        return whole[
            sum(1 for _ in itertools.takewhile(_are_equal, zip(base, whole, strict=False))) :
        ]

    def expected(self, record: StreamRecord) -> tuple[str, str | None]:
        """Text and stop string that a client with these ids, and this end, must have."""
        request, token_ids = record.request, record.token_ids
        if record.finish_reason == "stop" and record.stop_string is None:
            # The token that ended it is none of the text.
            token_ids = token_ids[:-1]
        text = self.text(request, token_ids)
        found = [(text.find(stop), -len(stop), stop) for stop in _stops(request) if stop in text]
        if not found:
            return text, None
        # The first one; of those that start together the longest.
        at, _, stop = min(found)
        if request.options.get("include_stop_str_in_output"):
            at += len(stop)
        return text[:at], stop


def _are_equal(pair: tuple[str, str]) -> bool:
    return pair[0] == pair[1]


def _stops(request: PlannedRequest) -> list[str]:
    stop = request.options.get("stop", [])
    return [stop] if isinstance(stop, str) else list(stop)
