"""The Node.js client against real processes: control plane, CPU worker, demo model."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from pagewire_client import AsyncClient

from demo.ports import any_free_port
from demo.processes import ManagedProcess, ProcessGroup, child_environment

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

ROOT = Path(__file__).resolve().parents[2]
NODE_DIR = ROOT / "clients" / "node"
START_LIMIT_S = 60

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        not (shutil.which("node") and shutil.which("npm")), reason="Node.js is not installed"
    ),
]

# Prints what every kind of failure looks like to a caller, one JSON object a line.
FAILURES = """
import { PagewireClient } from './pagewire.js';
const client = new PagewireClient(process.argv[1]);
const show = async (name, request, options) => {
  try {
    for await (const response of client.generate(request, options));
    console.log(JSON.stringify({ name, ended: true }));
  } catch (e) {
    const { message, code, reason, metadata } = e;
    console.log(JSON.stringify({ name, type: e.name, message, code, reason, metadata }));
  }
};
const long = { text: 'x', sampling: { temperature: 0, maxTokens: 300, ignoreEos: true } };
await show('unknown model', { model: 'nope', text: 'x' });
await show('bad value', { text: 'x', sampling: { topP: 5 } });
await show('unknown field', { text: 'x', sampling: { max_tokens: 5 } });
await show('deadline', long, { timeoutMs: 50 });
await show('aborted', long, { signal: AbortSignal.timeout(50) });
await show('aborted before', long, { signal: AbortSignal.abort() });
client.close();
"""

# Leaves the loop after the first response; prints the blocks once nothing runs any more.
BREAK = """
import { PagewireClient } from './pagewire.js';
const client = new PagewireClient(process.argv[1]);
const long = { text: 'x', sampling: { temperature: 0, maxTokens: 300, ignoreEos: true, seed: 7 } };
let first;
for await (const response of client.generate(long)) { first = response; break; }
let replica;
do { [replica] = (await client.getStats()).replicas; } while (replica.numRequestsRunning > 0);
console.log(JSON.stringify({ first, replica }));
client.close();
"""


@pytest.fixture(scope="module")
def node_modules() -> None:
    if not (NODE_DIR / "node_modules").is_dir():
        subprocess.run(
            ["npm", "ci", "--no-audit", "--no-fund"], cwd=NODE_DIR, check=True, timeout=120
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(
    node_modules: None, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[str]:
    """The public address of a control plane with one worker."""
    group = ProcessGroup(
        log_dir=tmp_path_factory.mktemp("logs"),
        cwd=ROOT,
        env=child_environment(ROOT, os.environ),
    )
    async with group:
        flags = ["--port=0", "--worker-port=0", "--metrics-port=0"]
        model = ["--model", str(model_dir)]
        control = group.start("control", [sys.executable, "-m", "control_plane", *model, *flags])
        public, workers = await group.guard(_listening(control))
        flags = ["--device=cpu", "--kv-cache-memory=64MiB", "--max-model-len=1024"]
        address = f"--control-plane={workers}"
        group.start("worker", [sys.executable, "-m", "data_plane", *model, *flags, address])
        await group.guard(_is_ready(public))
        yield public
        group.check()


async def _listening(control: ManagedProcess) -> tuple[str, str]:
    async with asyncio.timeout(START_LIMIT_S):
        while True:
            if found := re.search(r"public=(\S+) workers=(\S+)", control.log_tail()):
                return found[1], found[2]
            await asyncio.sleep(0.02)


async def _is_ready(public: str) -> None:
    """Return once the worker takes work; some scripts look at it before they need it."""
    async with AsyncClient(public, timeout_s=20.0) as client, asyncio.timeout(START_LIMIT_S):
        while not (await client.models())[0].ready_replicas:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)


async def run_node(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        "node",
        *arguments,
        cwd=NODE_DIR,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(180):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, out.decode(), err.decode()


async def run_script(script: str, server: str) -> list[dict[str, object]]:
    code, out, err = await run_node("--input-type=module", "--eval", script, server)
    assert code == 0, err
    return [json.loads(line) for line in out.splitlines()]


async def test_node_example_streams_then_cancels_and_blocks_are_free_again(server: str) -> None:
    code, out, err = await run_node(
        "example.js", "--server", server, "What is the capital of France?"
    )
    assert code == 0, out + err
    assert "Paris" in out
    assert re.search(r"cancelling after \d+ tokens; (\d+) of (\d+) blocks are free", out)
    free, usable, running = map(
        int, re.search(r"cancelled; (\d+) of (\d+) blocks are free, (\d+) requests", out).groups()
    )
    assert (free, running) == (usable, 0)


async def test_node_example_fails_when_nothing_answers(node_modules: None) -> None:
    address = f"127.0.0.1:{any_free_port()}"
    code, _, err = await run_node("example.js", "--server", address, "--wait-s", "0.2")
    assert code == 1
    assert err == f"{address} does not answer\n"


async def test_node_errors_carry_reason_and_values(server: str) -> None:
    shown = {line["name"]: line for line in await run_script(FAILURES, server)}
    unknown = shown["unknown model"]
    assert (unknown["type"], unknown["code"]) == ("PagewireError", "NOT_FOUND")
    assert unknown["reason"] == "UNKNOWN_MODEL"
    bad = shown["bad value"]
    assert (bad["code"], bad["reason"]) == ("INVALID_ARGUMENT", "INVALID_REQUEST")
    assert bad["metadata"]["field"] == "top_p"
    assert shown["unknown field"]["type"] == "TypeError"
    assert "max_tokens" in str(shown["unknown field"]["message"])
    assert shown["deadline"]["code"] == "DEADLINE_EXCEEDED"
    assert shown["aborted"]["type"] == "TimeoutError"
    assert shown["aborted before"]["type"] == "AbortError"


async def test_leaving_a_node_loop_cancels_the_request(server: str) -> None:
    [result] = await run_script(BREAK, server)
    assert result["first"]["seed"] == "7"
    assert result["replica"]["freeBlocks"] == result["replica"]["usableBlocks"]
