"""Prompts, outputs and tokens are where they belong and nowhere else.

Not in the log at any level, not in the store, not in metrics or statistics, not in errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
import urllib.request
from typing import TYPE_CHECKING, Any

import redis.asyncio
from api_harness import Api, running_api, until
from pagewire_client import AsyncClient, PagewireError, build_request
from valkey_process import ValkeyProcess

from control_plane.security_config import SecurityConfig

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from control_plane.model_catalog import CatalogModel

ALICE, WORKER = "alice-0123456789abcdef", "worker-0123456789abcdef"
SECRET = "xyzzyplugh"
PROMPT = f"The password of the vault is {SECRET} and nobody else may know. " * 20
SALT = "saltofalice"
GREEDY: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}


async def refusals(client: AsyncClient, prompt_ids: list[int]) -> list[str]:
    """Everything that a failed call says, for requests that are wrong in every way."""
    chat = [{"role": "user", "content": PROMPT}]
    wrong: list[tuple[Any, dict[str, Any]]] = [
        (PROMPT, {"temperature": -1.0}),
        (PROMPT, {"stop": [SECRET * 500]}),
        (PROMPT, {"stop": [SECRET] * 100}),
        (PROMPT, {"cache_salt": SALT * 100}),
        (PROMPT, {"request_id": "x" * 500}),
        (PROMPT + "\0", {}),
        (PROMPT * 500, {}),
        ([*prompt_ids, 10**7], {}),
        (prompt_ids * 1000, {}),
        ([{"role": "", "content": PROMPT}], {}),
        ([*chat, {"role": "nobody", "content": SECRET}], {"template_kwargs": {"tools": SECRET}}),
    ]
    texts: list[str] = []
    for prompt, options in wrong:
        try:
            await client.generate(prompt, **(GREEDY | options)).result()
        except PagewireError as error:
            texts.append(f"{error.message} {error.reason} {error.metadata}")
        except TypeError as error:  # what the client's own signature does not know
            texts.append(str(error))
    assert len(texts) >= len(wrong) - 1
    return texts


async def in_the_store(url: str) -> bytes:
    """All keys with their values, as they lie there."""
    async with redis.asyncio.Redis.from_url(url) as client:
        parts: list[bytes] = []
        async for key in client.scan_iter("*"):
            parts += [key, repr(await _value(client, key)).encode(), await client.dump(key) or b""]
            if await client.type(key) == b"hash":
                for field, value in (await client.hgetall(key)).items():
                    parts += [field, value]
    assert len(parts) > 3
    return b"\n".join(parts)


async def _value(client: Any, key: bytes) -> Any:
    with contextlib.suppress(redis.ResponseError):
        return await client.get(key)
    return None


def as_text(ids: list[int]) -> str:
    return str(ids).strip("[]")


async def scrape(api: Api) -> str:
    url = f"http://127.0.0.1:{api.control_plane.metrics_port}/metrics"

    def read() -> str:
        with urllib.request.urlopen(url, timeout=60) as response:
            return response.read().decode()

    return await asyncio.to_thread(read)


async def test_nothing_of_a_prompt_or_token_shows_anywhere(
    model: CatalogModel, model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    tokens, worker_tokens = tmp_path / "tokens", tmp_path / "worker-tokens"
    tokens.write_text(f"alice {ALICE}\n")
    worker_tokens.write_text(f"{WORKER}\n")
    security = SecurityConfig(
        auth_tokens_file=tokens, worker_token_file=worker_tokens, enforce_cache_salt=True
    )
    store = ValkeyProcess(tmp_path)
    await store.start()
    try:
        async with (
            running_api(model, model_dir, security=security, redis_url=store.url) as api,
            AsyncClient(api.address, token=ALICE, timeout_s=120.0) as client,
        ):
            ids = api.encode(PROMPT)
            async with api.ready_worker(token=WORKER) as worker:
                generation = client.generate(PROMPT, cache_salt=SALT, **GREEDY)
                async for _ in generation:
                    break
                # A worker that dies in the midst, so that all of a replay is logged too.
                await worker.kill()
                async with api.ready_worker(token=WORKER):
                    done = await generation.result()
                    batch = [build_request(PROMPT, {**GREEDY, "request_id": "b"})]
                    assert [r.error async for r in client.batch(batch)] == [None]
                    errors = await refusals(client, ids)
                    await until(
                        lambda: any(
                            r.cached_blocks for r in api.control_plane.cluster.stats().replicas
                        ),
                        what="blocks are cached",
                    )
                    shown = {
                        "errors": "\n".join(errors),
                        "metrics": await scrape(api),
                        "stats": str(await client.stats()),
                    }
            output = done.outputs[0].token_ids
        shown["log"] = caplog.text
        stored = await in_the_store(store.url)
    finally:
        await store.kill()
    assert len(output) == 40
    assert "worker gone" in shown["log"]
    for name, text in shown.items():
        for secret in (SECRET, "password of the vault", ALICE, WORKER, SALT, PROMPT[:20]):
            assert secret not in text, (name, secret)
        for some in (ids[3:6], output[3:6]):
            assert as_text(some) not in text, name
    for secret in (SECRET, SALT, ALICE, WORKER, "alice"):
        assert secret.encode() not in stored
    for some in (ids[3:6], output[3:6]):
        for order in ("<", ">"):
            assert struct.pack(f"{order}3i", *some) not in stored
        assert as_text(some).encode() not in stored
