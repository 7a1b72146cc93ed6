"""kill -9 of the control plane, with real processes, a real Valkey and a real model.

The cache is as warm afterwards as before, and clients of both languages go on by themselves.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis.asyncio
from conditions import until
from pagewire_client import UnavailableError

from demo.stack import ServingStack, StackConfig

if TYPE_CHECKING:
    from pagewire_client import AsyncClient, Completion

ROOT = Path(__file__).resolve().parents[2]
NODE_DIR = ROOT / "clients" / "node"
PREFIX = [100 + i * 7919 % 20000 for i in range(2000)]
NUM_TOKENS = 60
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 5},
    "unseeded": {"temperature": 1.0},
}
PROMPT = "Once upon a time"

pytestmark = [pytest.mark.slow, pytest.mark.redis]

NODE_SCRIPT = """
import { PagewireClient } from './pagewire.js';
const client = new PagewireClient(process.argv[1]);
const sampling = { maxTokens: Number(process.argv[2]), ignoreEos: true };
const ids = [], seeds = [];
let text = '', usage;
for await (const response of client.generate({ text: process.argv[3], sampling })) {
  if (response.seed !== undefined && response.requestId) seeds.push(response.seed);
  for (const output of response.outputs) { ids.push(...output.tokenIds); text += output.text; }
  usage = response.usage ?? usage;
  if (ids.length) console.log(JSON.stringify({ count: ids.length }));
}
console.log(JSON.stringify({ ids, text, seeds, completionTokens: usage.completionTokens }));
client.close();
"""


def stack_config(base_dir: Path, model_dir: Path) -> StackConfig:
    return StackConfig(
        root=ROOT,
        base_dir=base_dir,
        model_dir=model_dir,
        model_name="smol",
        python=sys.executable,
        environment=os.environ,
        random_ports=True,
        worker_args=("--max-model-len", "2304", "--kv-cache-memory", "256MiB"),
    )


async def kill_and_restart(stack: ServingStack, *args: str) -> float:
    """Give the time of the restart.

    Args:
        stack: Whose control plane it is.
        args: Further flags of the new one.
    """
    assert stack.control_plane is not None
    stack.control_plane.kill()
    await stack.control_plane.wait()
    stack.start_control_plane(*args)
    return time.monotonic()


async def test_the_cache_is_as_warm_after_a_kill_as_before(
    tmp_path: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with ServingStack(stack_config(tmp_path, model_dir)) as stack:
        await stack.start_store()
        stack.start_control_plane()
        stack.start_worker("w0")
        await stack.wait_until_ready()

        async def ask(client: AsyncClient, tail: int) -> Completion:
            return await client.complete([*PREFIX, tail], temperature=0.0, max_tokens=4)

        async with stack.client() as client:
            cold = await ask(client, 1)
            before = await ask(client, 1)
            [replica] = (await client.stats()).replicas
            num_entries = replica.cached_blocks
        assert cold.usage.cached_tokens == 0
        assert before.usage.cached_tokens == len(PREFIX) // 16 * 16
        assert stack.ports.store is not None
        async with redis.asyncio.Redis(port=stack.ports.store, protocol=2) as store:

            async def is_written() -> bool:
                [key] = await store.keys("pagewire:1:blocks:*")
                return await store.hlen(key) == num_entries + 1

            await until(is_written)
        restarted_at = await kill_and_restart(stack)
        control_plane = stack.control_plane
        assert control_plane is not None
        await until(lambda: "public=" in control_plane.log_tail(), limit_s=60)
        listening_s = time.monotonic() - restarted_at
        async with stack.client() as client:
            while True:
                try:
                    chunks = client.generate([*PREFIX, 1], temperature=0.0, max_tokens=4)
                    ids: list[int] = []
                    first_token_s = 0.0
                    async for chunk in chunks:
                        first_token_s = first_token_s or time.monotonic() - restarted_at
                        ids += chunk.token_ids
                    break
                except UnavailableError:
                    await asyncio.sleep(0.02)
            after = await chunks.result()
            [replica] = (await client.stats()).replicas
        assert ids == cold.token_ids == before.token_ids
        assert after.usage.cached_tokens == before.usage.cached_tokens
        assert replica.adopted_blocks == num_entries
        assert replica.refused_entries == 0
    with capsys.disabled():
        print(
            f"\nhit tokens before kill -9: {before.usage.cached_tokens}, "
            f"right after: {after.usage.cached_tokens}; from restart to listening "
            f"{listening_s:.2f} s, to the first token {first_token_s:.2f} s"
        )


async def until_stored(stack: ServingStack, num_blocks: int) -> None:
    """Until the store, which is written behind, knows so many blocks of all workers together."""
    assert stack.ports.store is not None
    async with redis.asyncio.Redis(port=stack.ports.store, protocol=2) as store:

        async def is_written() -> bool:
            keys = await store.keys("pagewire:1:blocks:*")
            return sum([await store.hlen(key) - 1 for key in keys]) == num_blocks

        await until(is_written)


async def test_the_caches_of_two_workers_are_as_warm_after_a_kill_as_before(
    tmp_path: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [[*PREFIX, 1], [*PREFIX[::-1], 1]]
    options: Any = {"temperature": 0.0, "max_tokens": 4}
    async with ServingStack(stack_config(tmp_path, model_dir)) as stack:
        await stack.start_store()
        stack.start_control_plane()
        stack.start_worker("w0")
        stack.start_worker("w1")
        await stack.wait_until_ready(2)
        async with stack.client() as client:
            # At once, so that each has a worker of its own.
            await asyncio.gather(*(client.complete(prompt, **options) for prompt in prompts))
            before = [await client.complete(prompt, **options) for prompt in prompts]
            num_blocks = [r.cached_blocks for r in (await client.stats()).replicas]
        assert all(num_blocks)
        assert [one.usage.cached_tokens for one in before] == [len(PREFIX) // 16 * 16] * 2
        await until_stored(stack, sum(num_blocks))
        # On a machine that is busy with other things workers may take longer than the default.
        restarted_at = await kill_and_restart(stack, "--return-wait-s", "60")
        control_plane = stack.control_plane
        assert control_plane is not None
        await until(lambda: "public=" in control_plane.log_tail(), limit_s=60)
        async with stack.client() as client:
            # The first request of all; clients wait for what is not there yet.
            after = [await client.complete(prompt, **options) for prompt in reversed(prompts)][::-1]
        assert "requests waited for replicas" in control_plane.log_tail()
        seconds = time.monotonic() - restarted_at
    assert [one.token_ids for one in after] == [one.token_ids for one in before]
    assert [one.usage.cached_tokens for one in after] == [one.usage.cached_tokens for one in before]
    with capsys.disabled():
        print(f"\ntwo workers: {seconds:.2f} s from restart to the end of two warm requests")


@pytest.mark.parametrize("with_worker", [False, True], ids=["worker stays", "worker dies too"])
async def test_clients_go_on_after_a_kill(
    tmp_path: Path, model_dir: Path, *, with_worker: bool
) -> None:
    has_node = shutil.which("node") and (NODE_DIR / "node_modules").is_dir()
    options: Any = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    async with ServingStack(stack_config(tmp_path, model_dir)) as stack:
        await stack.start_store()
        stack.start_control_plane()
        stack.start_worker("w0")
        await stack.wait_until_ready()
        async with stack.client() as client:
            generations = {
                kind: client.generate(PROMPT, **options, **o) for kind, o in KINDS.items()
            }
            streamed: dict[str, list[int]] = {kind: [] for kind in KINDS}

            async def read(kind: str) -> None:
                async for chunk in generations[kind]:
                    streamed[kind] += chunk.token_ids

            node = NodeStream(stack.address) if has_node else None
            if node is not None:
                await node.start()
            reading = [asyncio.create_task(read(kind)) for kind in KINDS]
            try:
                await until(lambda: all(len(ids) >= 5 for ids in streamed.values()), limit_s=60)
                if node is not None:
                    await until(lambda: node.count >= 5, limit_s=60)
                if with_worker:
                    stack.workers["w0"].kill()
                assert not any(task.done() for task in reading)
                await kill_and_restart(stack)
                if with_worker:
                    stack.start_worker("w1")
                async with asyncio.timeout(150):
                    await asyncio.gather(*reading)
                    last = await node.result() if node is not None else None
            finally:
                for task in reading:
                    task.cancel()
                if node is not None:
                    await node.close()
            for kind, generation in generations.items():
                completion = await generation.result()
                assert generation.num_resumes >= 1
                again = await client.complete(
                    PROMPT, **{**options, **KINDS[kind], "seed": completion.seed}
                )
                assert streamed[kind] == completion.token_ids == again.token_ids
                assert completion.text == again.text
            if last is not None:
                [seed] = last["seeds"]
                again = await client.complete(PROMPT, **options, temperature=1.0, seed=int(seed))
                assert last["ids"] == again.token_ids
                assert last["text"] == again.text
                assert last["completionTokens"] == NUM_TOKENS


class NodeStream:
    """The Node client, streaming one unseeded request."""

    def __init__(self, address: str) -> None:
        self.count = 0
        self._address = address
        self._lines: list[str] = []

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *("node", "--input-type=module", "--eval", NODE_SCRIPT),
            *("--", self._address, str(NUM_TOKENS), PROMPT),
            cwd=NODE_DIR,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self._lines.append(line.decode())
            self.count = json.loads(line).get("count", self.count)

    async def result(self) -> dict[str, Any]:
        await self._reading
        assert await self._process.wait() == 0
        return json.loads(self._lines[-1])

    async def close(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._process.wait()
