"""The demo model's tokenizer: without torch, off the event loop, precise about what is no text."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from control_plane.encoding_pool import EncodingPool
from control_plane.errors import InvalidRequestError
from control_plane.tokenizer import Tokenizer, check_text

ROOT = Path(__file__).resolve().parents[3]
USER = {"role": "user", "content": "Hi"}

_WITHOUT_TORCH = """
import sys

from importlib.machinery import PathFinder

class WithoutTorch(PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.partition(".")[0] in ("torch", "triton"):
            return None
        return super().find_spec(fullname, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutTorch
try:
    import torch
    raise AssertionError("torch is there")
except ImportError:
    pass
from pathlib import Path
from control_plane.model_catalog import load_model
import control_plane.server

model = load_model(Path(sys.argv[1]), "m")
ids = model.tokenizer.encode("Hello \\N{GRINNING FACE}").tolist()
text = model.tokenizer.render_chat([{"role": "user", "content": "Hi"}])
assert model.tokenizer.decode(ids) == "Hello \\N{GRINNING FACE}"
assert "torch" not in sys.modules
import json
print(json.dumps([ids, text, model.served.eos_token_ids, model.served.max_model_len]))
"""


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer(model_dir)


def test_everything_works_where_torch_cannot_be_imported(
    model_dir: Path, tokenizer: Tokenizer
) -> None:
    process = subprocess.run(
        [sys.executable, "-c", _WITHOUT_TORCH, str(model_dir)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    ids, text, eos, max_model_len = json.loads(process.stdout)
    assert ids == tokenizer.encode("Hello \N{GRINNING FACE}").tolist()
    assert text == tokenizer.render_chat([USER])
    assert (eos, max_model_len) == ([2], 8192)


def test_a_chat_ends_with_the_turn_of_the_assistant(tokenizer: Tokenizer) -> None:
    assert tokenizer.render_chat([USER]).endswith("<|im_start|>assistant\n")
    assert not tokenizer.render_chat([USER], add_generation_prompt=False).endswith("assistant\n")


def test_special_tokens_of_a_chat_are_single_ids(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat([USER]).tolist()
    assert ids.count(1) == 3
    assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.render_chat([USER])


def with_template(tokenizer: Tokenizer, template: str, **arguments: Any) -> str:
    inner: Any = tokenizer._tokenizer
    before, inner.chat_template = inner.chat_template, template
    try:
        return tokenizer.render_chat(**arguments)
    finally:
        inner.chat_template = before


def test_a_template_gets_tools_and_variables(tokenizer: Tokenizer) -> None:
    template = "{{ tools[0].name }}/{{ enable_thinking }}/{{ messages[0].content }}"
    rendered = with_template(
        tokenizer,
        template,
        messages=[USER],
        tools=[{"name": "search"}],
        template_kwargs={"enable_thinking": True},
    )
    assert rendered == "search/True/Hi"


def test_arguments_of_tool_calls_reach_a_template_as_objects(tokenizer: Tokenizer) -> None:
    call = {"function": {"name": "f", "arguments": '{"city": "Oslo"}'}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    template = "{{ messages[0].tool_calls[0].function.arguments.city }}"
    assert with_template(tokenizer, template, messages=[message]) == "Oslo"
    call["function"]["arguments"] = "no json"
    template = "{{ messages[0].tool_calls[0].function.arguments }}"
    assert with_template(tokenizer, template, messages=[message]) == "no json"


@pytest.mark.parametrize("name", ["messages", "tools", "chat_template", "conversations"])
def test_a_client_cannot_replace_what_is_not_a_variable(tokenizer: Tokenizer, name: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        tokenizer.render_chat([USER], template_kwargs={name: "{{ 1 }}"})
    assert error.value.metadata["field"] == f"chat.template_kwargs.{name}"


def test_a_model_without_a_template_says_so(tokenizer: Tokenizer) -> None:
    tokenizer.has_chat_template = False
    try:
        with pytest.raises(InvalidRequestError, match="no chat template"):
            tokenizer.render_chat([USER])
    finally:
        tokenizer.has_chat_template = True


@pytest.mark.parametrize(("text", "position"), [("\ud800", 0), ("ab\udfff", 2)])
def test_a_lone_surrogate_is_refused_by_place(text: str, position: int) -> None:
    with pytest.raises(InvalidRequestError) as error:
        check_text(text, field="text")
    assert error.value.metadata["position"] == str(position)


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


async def test_encoding_gives_up_the_interpreter_lock(tokenizer: Tokenizer) -> None:
    pool = EncodingPool()
    text = "The quick brown fox. " * 5_000
    encoding = asyncio.create_task(pool.run(len(text), lambda: tokenizer.encode(text)))
    turns = 0
    while not encoding.done():
        await asyncio.sleep(0)
        turns += 1
    # Holding the lock, the thread would let the loop turn a handful of times.
    assert turns > 20
    assert (await encoding).size > 5_000
    pool.close()
