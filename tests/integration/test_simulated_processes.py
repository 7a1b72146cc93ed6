"""`pagewire-worker --simulate` as processes under a real control plane, torch out of reach."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from typing import TYPE_CHECKING

import pytest
from api_harness import MODEL, Api, running_api, until
from pagewire_client import build_request

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator
    from pathlib import Path

    from control_plane.model_catalog import CatalogModel

pytestmark = pytest.mark.slow

# Whoever imports one of these in the worker ends it.
_MAIN = (
    "import sys\n"
    "for name in ('torch', 'triton', 'transformers', 'safetensors', 'gguf'):\n"
    "    sys.modules[name] = None\n"
    "from data_plane.__main__ import main\n"
    "sys.exit(main())\n"
)
PROMPTS = [[100 + i, 200 + i, 300, 400, 500 + i] for i in range(12)]


@contextlib.asynccontextmanager
async def simulated(
    api: Api, model_dir: Path, name: str, *arguments: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", _MAIN, "--model", str(model_dir), "--control-plane", api.worker_address),
        *("--worker-id", name, "--num-blocks", "1024", *arguments),
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        # Reads what is left, so that a full pipe holds nothing up.
        await process.communicate()


@contextlib.asynccontextmanager
async def running(model: CatalogModel, model_dir: Path) -> AsyncGenerator[Api]:
    async with running_api(model, model_dir) as api:
        yield api


async def ready(api: Api, count: int) -> None:
    await until(
        lambda: api.control_plane.cluster.num_ready(MODEL) == count,
        what=f"{count} replicas",
        timeout_s=120.0,
    )


async def answers(api: Api, *, temperature: float) -> list[tuple[list[int], str, str | None]]:
    """All prompts at once: ids, text and reason of each."""
    requests = [
        build_request(
            prompt,
            {"max_tokens": 40, "temperature": temperature, "seed": i, "ignore_eos": i % 2 == 0},
        )
        for i, prompt in enumerate(PROMPTS)
    ]
    done = await asyncio.gather(*(api.client.start(request).result() for request in requests))
    return [(one.token_ids, one.text, one.finish_reason) for one in done]


async def test_simulated_workers_serve_words_and_leave_in_order(
    model: CatalogModel, model_dir: Path
) -> None:
    async with running(model, model_dir) as api:
        arguments = ("--simulate", "h200-0.6b", "--simulate-workers", "3")
        async with simulated(api, model_dir, "sim", *arguments) as process:
            await ready(api, 3)
            ids = {r.replica_id for r in api.control_plane.cluster.stats().replicas}
            assert ids == {"sim-0", "sim-1", "sim-2"}
            got = await answers(api, temperature=1.0)
            for i, (token_ids, text, reason) in enumerate(got):
                assert re.fullmatch(r"[A-Za-z ]*", text)
                if i % 2 == 0:
                    assert (len(token_ids), reason) == (40, "length")
                else:
                    assert len(token_ids) == 40 or reason == "stop"
            assert len({text for _, text, _ in got}) == len(PROMPTS)
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(60):
                _, stderr = await process.communicate()
            log = stderr.decode()
            assert process.returncode == 0, log
            counts = re.findall(r"simulated: worker=sim-\d steps=\d+ tokens=(\d+)", log)
            assert len(counts) == 3
            assert sum(map(int, counts)) >= sum(len(token_ids) for token_ids, _, _ in got)


async def test_a_killed_simulated_worker_costs_no_token_and_doubles_none(
    model: CatalogModel, model_dir: Path
) -> None:
    async with running(model, model_dir) as api:
        arguments = ("--simulate", "20ms")
        async with simulated(api, model_dir, "a", *arguments) as first:
            await ready(api, 1)
            undisturbed = await answers(api, temperature=1.0)
            async with simulated(api, model_dir, "b", *arguments):
                await ready(api, 2)
                before = api.num_generated()
                again = asyncio.create_task(answers(api, temperature=1.0))
                await until(
                    lambda: api.num_generated() > before + 100, what="it runs", timeout_s=60.0
                )
                first.kill()
                assert await again == undisturbed
            await until(lambda: not api.control_plane.cluster.stats().num_requests_live, what="end")
