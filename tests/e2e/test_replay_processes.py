"""A recording of real processes with a tiny random model, and the command that replays it."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conditions import until
from replay_harness import LIMITS, rewrite, write_model

from demo.stack import ServingStack, StackConfig
from protos.recording_file import list_segments

if TYPE_CHECKING:
    from pagewire_client import AsyncClient

    from protos.pagewire.v1 import recording_pb2

ROOT = Path(__file__).resolve().parents[2]
PROMPT = [5 + index * 7 % 90 for index in range(30)]
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.0, "stop": ["e"]},
]
WORKER_ARGS = [f"--{name.replace('_', '-')}={value}" for name, value in LIMITS.items()]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


async def replay(recording: Path, *args: str) -> tuple[int, str, str]:
    """Exit code, output and messages of the command."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pagewire_client.cli", "replay", str(recording), *args),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, messages = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, output.decode(), messages.decode()


async def ask(client: AsyncClient, index: int, max_tokens: int = 48) -> None:
    prompt = [*PROMPT, 100 + index % 3]
    await client.complete(
        prompt,
        **OPTIONS[index % len(OPTIONS)],
        max_tokens=max_tokens,
        ignore_eos=True,
        timeout_s=300.0,
    )


async def leave_early(client: AsyncClient) -> None:
    async for _ in client.generate(PROMPT, max_tokens=48, ignore_eos=True):
        return


async def test_a_recorded_run_is_replayed_by_the_command(tmp_path: Path) -> None:
    model_dir = tmp_path / "model"
    write_model(model_dir)
    directory = tmp_path / "recordings"
    config = StackConfig(
        root=ROOT,
        base_dir=tmp_path,
        model_dir=model_dir,
        model_name="smol",
        python=sys.executable,
        environment=os.environ,
        store="memory://",
        random_ports=True,
        control_plane_args=("--record", str(directory)),
        worker_args=tuple(WORKER_ARGS),
    )
    async with ServingStack(config) as stack:
        control_plane = stack.start_control_plane()
        stack.start_worker("w0")
        await stack.wait_until_ready()
        async with stack.client() as client:
            await asyncio.gather(*(ask(client, index) for index in range(6)), leave_early(client))
            [replica] = (await client.stats()).replicas
            assert replica.num_preemptions > 0
            assert replica.prefix_hits > 0

            async def num_tokens() -> int:
                replicas = (await client.stats()).replicas
                return sum(r.generation_tokens for r in replicas)

            before = await num_tokens()
            running = [asyncio.create_task(ask(client, index)) for index in range(3)]

            async def is_under_way() -> bool:
                return await num_tokens() > before + 20

            await until(is_under_way, limit_s=120)
            stack.workers["w0"].kill()
            await stack.workers["w0"].wait()
            stack.start_worker("w0")
            await asyncio.gather(*running)
        await control_plane.stop(30.0)

    assert directory.stat().st_mode & 0o777 == 0o700
    [path] = list_segments(directory / "replica-w0")
    assert path.stat().st_mode & 0o777 == 0o600
    code, output, messages = await replay(directory, "--model", str(model_dir))
    assert code == 0, output + messages
    assert output.startswith("no difference: ")
    assert "2 streams" in output

    def alter(record: recording_pb2.Record) -> bool:
        result = record.received.step_result
        if not record.HasField("received") or not result.token_ids or result.version < 20:
            return False
        result.token_ids = bytes([result.token_ids[0] ^ 1]) + result.token_ids[1:]
        return True

    rewrite(path, alter)
    code, output, _ = await replay(directory, "--model", str(model_dir), "--quiet")
    assert code == 1
    assert output.startswith("first difference: plan 20, step 0, row ")
    assert "expected: token" in output
    assert "got:      token" in output
