"""The synchronous client and the command against a running server."""

from __future__ import annotations

import asyncio
import io
import sys
from typing import TYPE_CHECKING, Any

import pytest
from api_harness import Api, running_api
from pagewire_client import Client, InvalidRequestError, build_request
from pagewire_client.cli import main

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from control_plane.model_catalog import CatalogModel

GREEDY: Any = {"max_tokens": 8, "temperature": 0}


@pytest.fixture
async def api(model: CatalogModel, model_dir: Path) -> AsyncGenerator[Api]:
    async with running_api(model, model_dir) as api, api.ready_worker():
        yield api


async def in_thread(api: Api, work: Any) -> Any:
    def run() -> Any:
        with Client(api.address, timeout_s=60) as client:
            return work(client)

    return await asyncio.to_thread(run)


async def test_chunks_join_to_the_completion(api: Api) -> None:
    def work(client: Client) -> tuple[str, str]:
        chunks = list(client.generate("Hello", **GREEDY))
        return "".join(chunk.text for chunk in chunks), client.complete("Hello", **GREEDY).text

    joined, whole = await in_thread(api, work)
    prompt = api.encode("Hello")
    assert joined == whole == api.text(prompt, api.expected(prompt, max_tokens=8))


async def test_every_method_answers(api: Api) -> None:
    def work(client: Client) -> None:
        ids = client.tokenize("Hi there")
        assert client.detokenize(ids) == "Hi there"
        assert client.tokenize([{"role": "user", "content": "Hi"}])[0] == 1
        assert [model.name for model in client.models()] == ["smol"]
        assert client.stats().replicas[0].usable_blocks == 1023
        requests = [build_request([i], GREEDY) for i in range(5, 10)]
        results = list(client.batch(requests))
        assert sorted(result.request_id for result in results) == list("01234")
        assert all(result.completion for result in results)
        chat = client.chat([{"role": "user", "content": "Hi"}], **GREEDY).result()
        assert chat.usage.completion_tokens == 8

    await in_thread(api, work)


async def test_errors_are_typed(api: Api) -> None:
    def work(client: Client) -> None:
        with pytest.raises(InvalidRequestError) as error:
            client.complete("x", top_p=2.0)
        assert error.value.metadata["field"] == "top_p"

    await in_thread(api, work)


async def command(api: Api, *argv: str) -> int:
    return await asyncio.to_thread(main, [*argv, "--server", api.address])


async def test_the_command_continues_a_text(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    assert await command(api, "generate", "Hello", "--max-tokens", "8", "--temperature", "0") == 0
    prompt = api.encode("Hello")
    expected = api.text(prompt, api.expected(prompt, max_tokens=8))
    assert capsys.readouterr().out.rstrip("\n") == expected.rstrip("\n")


async def test_the_command_chats_once(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("chat", "Hi", "--system", "Be brief.", "--max-tokens", "4")
    assert await command(api, *argv) == 0
    assert capsys.readouterr().out.strip()


async def test_a_conversation_keeps_its_turns(
    api: Api, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n\nAgain\n"))
    assert await command(api, "chat", "--max-tokens", "4", "--temperature", "0") == 0
    messages = [{"role": "user", "content": "Hi"}]
    first = await api.client.chat(messages, max_tokens=4, temperature=0).result()
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "Again"},
    ]
    second = await api.client.chat(messages, max_tokens=4, temperature=0).result()
    out = capsys.readouterr().out
    assert first.text in out
    assert second.text in out


async def test_status_and_models_are_tables(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    assert await command(api, "status") == 0
    out = capsys.readouterr().out
    assert "REPLICA" in out
    assert "LAG" in out
    assert "0/1023" in out
    assert "w0 (fake)" in out
    assert await command(api, "models") == 0
    assert "smol" in capsys.readouterr().out


async def test_status_without_a_worker_says_what_to_do(
    model: CatalogModel, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_api(model, model_dir) as api:
        assert await command(api, "status") == 0
    assert "Start a worker" in capsys.readouterr().out


async def test_a_refusal_is_one_line(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    assert await command(api, "generate", "x", "--temperature", "-1") == 1
    errors = capsys.readouterr().err
    assert errors.startswith("pagewire: temperature must be")
    assert errors.count("\n") == 1
