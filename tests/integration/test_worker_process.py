"""`pagewire-worker` as a process, with a tiny random model, against a scripted control plane."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from fake_worker import FakeWorker
from scripted_control_plane import (
    ScriptedControlPlane,
    ScriptedStream,
    added_row,
    plan,
    read_column,
)

from data_plane.config import parse_args
from data_plane.worker import build_worker
from protos.model_fingerprint import base_fingerprint, served_fingerprint

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.slow

VOCAB = 97
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 53, 58, 97 - 4, 7, 32, 38, 46, 26, 43, 38]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        # Far from uniform, so that greedy search wanders instead of repeating a token.
        initializer_range=0.4,
        tie_word_embeddings=False,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(path)
    # Only its bytes count here: they are part of the fingerprint.
    (path / "tokenizer.json").write_text("{}")
    return path


def reference(model: Path, num_tokens: int) -> list[int]:
    from transformers import LlamaForCausalLM

    llama = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    output = llama.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(PROMPT) :].tolist()


@contextlib.asynccontextmanager
async def worker_process(
    model: Path, address: str, *arguments: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "data_plane", "--model", str(model), "--control-plane", address),
        *("--device", "cpu", "--num-blocks", "64", "--worker-id", "w0", *arguments),
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def end_of(process: asyncio.subprocess.Process) -> tuple[int, str]:
    """The exit code and everything logged."""
    async with asyncio.timeout(60):
        _, stderr = await process.communicate()
    assert process.returncode is not None
    return process.returncode, stderr.decode()


async def attach(control: ScriptedControlPlane) -> ScriptedStream:
    stream = await control.accept(timeout_s=120.0)
    await stream.attach(1)
    return stream


async def start_row(stream: ScriptedStream) -> list[int]:
    await stream.send(
        plan(
            2,
            added_rows=[added_row(0, PROMPT, [1, 2, 3], max_total_tokens=40)],
            chunk_rows=[0],
            chunk_num_tokens=[len(PROMPT)],
        )
    )
    return read_column((await stream.receive()).step_result.token_ids)


async def test_worker_serves_the_models_tokens_and_drains_on_sigterm(tiny_model: Path) -> None:
    async with (
        ScriptedControlPlane() as control,
        worker_process(tiny_model, control.address) as process,
    ):
        stream = await control.accept(timeout_s=120.0)
        hello = await stream.attach(1)
        assert hello.model_fingerprint == served_fingerprint(
            base_fingerprint(tiny_model), kv_dtype="float32"
        )
        assert (hello.num_blocks, hello.max_model_len) == (64, 256)
        assert hello.kv_geometry.num_kv_heads == 2
        tokens = await start_row(stream)
        process.send_signal(signal.SIGTERM)
        assert (await stream.receive()).drain.grace.ToSeconds() == 30
        # Steps ordered ahead, as with lookahead 2, to the last token.
        await stream.send(plan(3), plan(4), plan(5))
        version = 6
        while len(tokens) < 22:
            tokens += read_column((await stream.receive()).step_result.token_ids)
            if version <= 23:
                await stream.send(plan(version))
                version += 1
        assert tokens == reference(tiny_model, 22)
        await stream.receive_end()
        stream.end()
        exit_code, log = await end_of(process)
        assert exit_code == 0
        for event in ("loading model:", "model loaded:", "warmed up:", "attached:", "drained:"):
            assert log.count(event) == 1


async def test_second_signal_ends_the_worker_at_once(tiny_model: Path) -> None:
    async with (
        ScriptedControlPlane() as control,
        worker_process(tiny_model, control.address) as process,
    ):
        stream = await attach(control)
        await start_row(stream)
        process.send_signal(signal.SIGTERM)
        assert (await stream.receive()).HasField("drain")
        process.send_signal(signal.SIGTERM)
        assert (await end_of(process))[0] == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--num-blocks", "4"), "Lower --max-model-len to 48"),
        (("--max-model-len", "1000"), "max_model_len is 1000"),
        (("--attention-backend", "nope"), "unknown attention backend 'nope'"),
        (("--dtype", "int3"), "unsupported dtype 'int3'"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_what_does_not_fit_together_is_refused_before_anything_is_dialled(
    tiny_model: Path, arguments: tuple[str, ...], message: str
) -> None:
    config = parse_args(["--model", str(tiny_model), "--device", "cpu", *arguments])
    with pytest.raises(ValueError, match=re.escape(message)):
        build_worker(config)


async def test_worker_that_cannot_start_says_why_and_exits_with_2(
    tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((tiny_model / "config.json").read_text())
    async with worker_process(tmp_path, "127.0.0.1:1") as process:
        exit_code, log = await end_of(process)
        assert exit_code == 2
        assert "tokenizer.json" in log
        assert "Traceback" not in log


def test_a_plane_whose_packages_are_missing_names_the_extra_to_install(tiny_model: Path) -> None:
    # As after a bare `pip install pagewire`: the packages of neither extra are there.
    for module, missing, extra in (
        ("control_plane", "uvloop", "control"),
        ("data_plane", "torch", "worker"),
    ):
        code = (
            f"import sys; sys.modules[{missing!r}] = None; import {module}.__main__ as m; "
            f"sys.exit(m.main(['--model', {str(tiny_model)!r}]))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 2
        assert f"the package {missing} is missing" in done.stderr
        assert f"pagewire[{extra}]" in done.stderr
        assert "Traceback" not in done.stderr


async def test_a_worker_dials_directly_where_a_proxy_is_set(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    async with ScriptedControlPlane() as control, FakeWorker(control.address):
        stream = await control.accept()
        await stream.attach(1)
