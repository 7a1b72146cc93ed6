"""`--simulate`: profiles, flags, what is read of a model directory."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_plane.config import MAX_SIMULATED_WORKERS, parse_args
from data_plane.simulated_profile import PROFILES, SimulationProfile, read_profile
from data_plane.simulated_worker import build_simulated_workers, read_token_pool
from protos.model_fingerprint import base_fingerprint, served_fingerprint

# Milliseconds in docs/performance.md: decode steps by rows at a context of 1 024, first tokens by
# prompt length.
MEASURED = {
    "h200-0.6b": (
        {1: 0.84, 8: 1.37, 32: 1.93, 128: 5.02, 256: 9.02},
        {128: 3.27, 1024: 5.26, 8192: 38.9},
    ),
    "h200-8b": (
        {1: 4.26, 8: 4.67, 32: 5.55, 128: 10.27, 256: 17.23},
        {128: 7.23, 1024: 24.6, 8192: 228.9},
    ),
}


def write_model(directory: Path, *, tokenizer: Any = None, **config: object) -> Path:
    directory.mkdir(exist_ok=True)
    shape = {"vocab_size": 500, "max_position_embeddings": 256, "eos_token_id": 2, **config}
    (directory / "config.json").write_text(json.dumps(shape))
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer or {}))
    (directory / "model.safetensors").write_bytes(b"")
    return directory


@pytest.mark.parametrize("name", sorted(MEASURED))
def test_profiles_take_the_time_that_was_measured(name: str) -> None:
    profile = PROFILES[name]
    decode, first = MEASURED[name]
    for rows, measured_ms in decode.items():
        time_us = profile.step_time_us(
            num_rows=rows, num_kv_tokens=rows * 1024, num_prefill_tokens=0, num_pairs=0
        )
        assert time_us == pytest.approx(measured_ms * 1000, rel=0.19 if rows < 32 else 0.04)
    for tokens, measured_ms in first.items():
        time_us = profile.step_time_us(
            num_rows=1,
            num_kv_tokens=0,
            num_prefill_tokens=tokens,
            num_pairs=tokens * (tokens + 1) // 2,
        )
        assert time_us == pytest.approx(measured_ms * 1000, rel=0.01)


@pytest.mark.parametrize(("text", "step_us"), [("8ms", 8000), ("2.5ms", 2500), ("1s", 1e6)])
def test_a_time_per_step_is_a_profile(text: str, step_us: float) -> None:
    assert read_profile(text) == SimulationProfile(name=text, step_us=step_us)


def test_a_profile_can_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"step_us": 500, "row_us": 2.5, "max_num_seqs": 64}))
    expected = SimulationProfile(name="mine", step_us=500, row_us=2.5, max_num_seqs=64)
    assert read_profile(str(path)) == expected
    path.write_text(json.dumps(dataclasses.asdict(PROFILES["h200-8b"])))
    assert read_profile(str(path)) == PROFILES["h200-8b"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "no step_us"),
        ({"step_us": 0}, r"step_us must be in \(0"),
        ({"step_us": -1}, "step_us must be finite and not negative"),
        ({"step_us": "8ms"}, "step_us must be a number"),
        ({"step_us": True}, "step_us must be a number"),
        ({"step_us": 1e12}, "step_us must be in"),
        ({"step_us": 1, "row_us": float("nan")}, "row_us must be finite"),
        ({"step_us": 1, "rows_us": 2}, "unknown keys rows_us; known: .*row_us"),
        ({"step_us": 1, "mean_output_tokens": 0.5}, "mean_output_tokens must be 0"),
        ({"step_us": 1, "num_blocks": 1}, "num_blocks must be at least 2"),
        ({"step_us": 1, "num_blocks": 9.5}, "num_blocks must be a whole number"),
        ({"step_us": 1, "max_num_batched_tokens": 8}, "at least max_num_seqs"),
        ({"step_us": 1, "name": 5}, "name must be a text"),
        ([], "must hold a JSON object"),
    ],
)
def test_a_profile_of_nonsense_is_refused(tmp_path: Path, content: object, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        read_profile(str(path))


@pytest.mark.parametrize("text", ["h100", "8", "-8ms", "ms", "", "profile.yaml"])
def test_an_unknown_profile_is_refused_by_what_there_is(text: str) -> None:
    with pytest.raises(ValueError, match=r"h200-0\.6b, h200-8b, a time per step such as 8ms"):
        read_profile(text)


def test_a_missing_profile_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*gone\.json: No such file"):
        read_profile(str(tmp_path / "gone.json"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--simulate-workers", "2"], "--simulate-workers needs --simulate"),
        (["--simulate", "8ms", "--simulate-workers", "0"], "must be at least 1, got 0"),
        (
            ["--simulate", "8ms", "--simulate-workers", str(MAX_SIMULATED_WORKERS + 1)],
            "start further processes",
        ),
        (["--simulate", "8ms", "--device", "cuda"], "--device cuda has no meaning"),
        (["--simulate", "8ms", "--enforce-eager"], "--enforce-eager has no meaning"),
        (["--simulate", "8ms", "--load-format", "dummy"], "--load-format has no meaning"),
        (["--simulate", "8ms", "--kv-cache-memory", "1G"], "--kv-cache-memory has no meaning"),
        (["--simulate", "8ms", "--attention-backend", "torch"], "--attention-backend has no"),
        (["--simulate", "fast"], "--simulate must be one of"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse_args(["--model", str(tmp_path), *arguments])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_workers_of_one_process_are_replicas_of_the_model(tmp_path: Path) -> None:
    model = write_model(
        tmp_path / "model",
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size=32,
        torch_dtype="bfloat16",
    )
    config = parse_args(
        f"--model {model} --simulate h200-8b --simulate-workers 3 --worker-id sim --replica-id rep "
        "--num-blocks 40".split()
    )
    workers = build_simulated_workers(config)
    identities = [worker.protocol.identity for worker in workers]
    assert [i.worker_id for i in identities] == ["sim-0", "sim-1", "sim-2"]
    assert [i.replica_id for i in identities] == ["rep-0", "rep-1", "rep-2"]
    assert len({i.epoch for i in identities}) == 3
    first = identities[0]
    assert first.model_fingerprint == served_fingerprint(
        base_fingerprint(model), kv_dtype="bfloat16"
    )
    assert (first.num_layers, first.num_kv_heads, first.head_size) == (3, 2, 8)
    assert (first.num_blocks, first.max_num_seqs, first.max_model_len) == (40, 256, 256)
    assert first.device == "simulated h200-8b"
    assert workers[0].runner.generations.size == 40


def test_a_single_simulated_worker_keeps_its_names(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    (worker,) = build_simulated_workers(
        parse_args(["--model", str(model), "--simulate", "8ms", "--worker-id", "sim"])
    )
    assert worker.protocol.identity.worker_id == worker.protocol.identity.replica_id == "sim"


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        ({}, ["--num-blocks", "4"], "4 blocks of 16 tokens hold 48 tokens"),
        ({}, ["--max-model-len", "512"], "trained for 256 positions"),
        ({"vocab_size": None}, [], "no usable vocab_size: got None"),
        ({"max_position_embeddings": "8k"}, [], "no usable max_position_embeddings"),
        ({"torch_dtype": "int4"}, [], "unsupported dtype 'int4'"),
        ({}, ["--dtype", "half"], "unsupported dtype 'half'"),
    ],
)
def test_a_model_that_cannot_be_simulated_is_refused(
    tmp_path: Path, config: dict[str, object], arguments: list[str], message: str
) -> None:
    model = write_model(tmp_path / "model", **config)
    with pytest.raises(ValueError, match=message):
        build_simulated_workers(
            parse_args(["--model", str(model), "--simulate", "8ms", *arguments])
        )


def test_the_pool_is_words_without_special_ids(tmp_path: Path) -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = [f"\u0120{a}{b}" for a in letters[:10] for b in letters[:10]]
    vocab = {"<s>": 0, "\u00c3": 1, "\u0120the": 2, "42": 3, "end": 4, "\u2581of": 5, "too": 900}
    vocab |= {piece: 10 + i for i, piece in enumerate(pieces)}
    tokenizer = {
        "added_tokens": [{"id": 0, "content": "<s>"}, {"id": 4, "content": "end"}],
        "model": {"vocab": vocab},
    }
    model = write_model(tmp_path / "model", tokenizer=tokenizer, eos_token_id=[2, 10])
    pool = read_token_pool(model, 500)
    assert pool.dtype == np.int32
    assert pool.tolist() == [5, *range(11, 110)]


def test_a_tokenizer_without_words_gives_every_ordinary_id(tmp_path: Path) -> None:
    tokenizer = {"added_tokens": [{"id": 1}], "model": {"vocab": [["\u2581a", -1.0], ["b", -2.0]]}}
    model = write_model(tmp_path / "model", tokenizer=tokenizer)
    assert read_token_pool(model, 6).tolist() == [0, 3, 4, 5]


def test_simulation_never_imports_torch(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    code = (
        "import sys\n"
        "for name in ('torch', 'triton', 'transformers', 'safetensors', 'gguf'):\n"
        "    sys.modules[name] = None  # importing it fails\n"
        "from data_plane.config import parse_args\n"
        "from data_plane.control_stream import ControlStream\n"
        "from data_plane.simulated_worker import build_simulated_workers\n"
        f"config = parse_args(['--model', {str(model)!r}, '--simulate', 'h200-0.6b'])\n"
        "print(len(build_simulated_workers(config)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={"PYTHONPATH": str(Path(__file__).resolve().parents[3])},
    )
    assert done.stdout == "1\n", done.stderr
