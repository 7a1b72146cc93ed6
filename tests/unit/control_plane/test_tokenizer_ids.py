"""Ids of texts are those that transformers gives, whichever way they are made."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from transformers import AutoTokenizer

from control_plane.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = (
    "The capital of France is",
    "  two spaces, a tab\tand\r\nlines\n\n\n",
    "naïve café über straße 你好 世界 👩‍👩‍👧 e\u0301",
    "<|im_start|>user\nspecial tokens<|im_end|>",
    "1234567890 3.14159 0x7f",
    "word " * 3000,
)


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_ids_of_a_text_are_those_of_transformers(
    model_dir: Path, *, add_special_tokens: bool
) -> None:
    ours = Tokenizer(model_dir)
    theirs = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
    for text in TEXTS:
        expected = theirs(text, add_special_tokens=add_special_tokens)["input_ids"]
        assert ours.encode(text, add_special_tokens=add_special_tokens).tolist() == expected
