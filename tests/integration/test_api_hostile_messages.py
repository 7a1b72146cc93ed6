"""Messages of millions of parts are refused by their count: nobody else's tokens wait for them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from api_harness import Api, running_api
from pagewire_client import errors

from control_plane import prompt_encoder
from control_plane.message_decoding import MessageDecoder
from protos.pagewire.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from control_plane.model_catalog import CatalogModel

pb = inference_pb2
MAX_MODEL_LEN = 8192
MANY = 1_000_000
# An id that is looked at would be refused as being outside the vocabulary.
BAD_ID = 1 << 30


@pytest.fixture
async def api(model: CatalogModel, model_dir: Path) -> AsyncGenerator[Api]:
    async with running_api(model, model_dir) as api, api.ready_worker():
        yield api


CASES = {
    "messages": (
        pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage()] * (MAX_MODEL_LEN + 1))),
        "chat.messages", str(MAX_MODEL_LEN + 1), str(MAX_MODEL_LEN),
    ),
    "prompt ids": (
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[BAD_ID] * 500_000)),
        "prompt", "500000", str(MAX_MODEL_LEN - 1),
    ),
    "stop strings": (
        pb.GenerateRequest(text="x", sampling=pb.SamplingParams(stop=["\0"] * MANY)),
        "stop", str(MANY), "16",
    ),
    "stop ids": (
        pb.GenerateRequest(text="x", sampling=pb.SamplingParams(stop_token_ids=[5] * MANY)),
        "stop_token_ids", str(MANY), "256",
    ),
    "resume ids": (
        pb.GenerateRequest(text="x", resume=[pb.SequenceResume(token_ids=[BAD_ID] * 500_000)]),
        "resume[0].token_ids", "500000", str(MAX_MODEL_LEN),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
async def test_a_count_above_its_limit_is_refused_before_the_parts_are_read(
    api: Api, name: str
) -> None:
    message, field, value, limit = CASES[name]
    with pytest.raises(errors.InvalidRequestError) as refusal:
        await api.client.start(message).result()
    metadata = refusal.value.metadata
    assert (metadata["field"], metadata["value"], metadata["limit"]) == (field, value, limit)


async def test_a_long_conversation_is_read_off_the_event_loop(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[str] = set()
    read = prompt_encoder._chat_message

    def recording(*args: Any) -> dict[str, object]:
        threads.add(threading.current_thread().name)
        return read(*args)

    monkeypatch.setattr(prompt_encoder, "_chat_message", recording)
    await api.client.tokenize([{"role": "user", "content": "x"}] * 1000)
    assert threads
    assert threading.main_thread().name not in threads


def test_what_a_decoder_explains_is_bounded() -> None:
    decode = MessageDecoder(pb.GenerateRequest, max_bytes=4 << 20)
    empty_text, bad_text = b"\x1a\x00", b"\x1a\x01\xff"
    near: Any = decode(empty_text * 100 + bad_text)
    far: Any = decode(empty_text * MANY + bad_text)
    assert near.metadata["field"] == "text"
    assert far.metadata["field"] == "message"
