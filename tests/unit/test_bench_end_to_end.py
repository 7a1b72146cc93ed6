"""The arithmetic of `make bench-end-to-end`, without any process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.benchmarks import bench_end_to_end as bench

if TYPE_CHECKING:
    from pathlib import Path


def burst(what: str, tok_s: float, model: str = "qwen3-0.6b") -> dict[str, Any]:
    return {"model": model, "arguments": bench.BURSTS[what], "output_tok_s": tok_s}


def test_rounds_count_by_their_median_and_as_a_share_of_the_worker_alone() -> None:
    rows = [burst("GenerateBatch", rate) for rate in (99.0, 90.0, 98.0)]
    rows.append({"model": "qwen3-0.6b", "arguments": "--workload decode-rows", "output_tok_s": 1})
    rows.append(burst("Generate", 90.0, "llama-3.1-8b"))
    alone = [{"model": "qwen3-0.6b", "output_tok_s": rate} for rate in (100.0, 100.0)]
    got = bench.compare(rows, alone)
    assert [(row["model"], row["what"], row["tok_s"]) for row in got] == [
        ("qwen3-0.6b", "worker alone", 100.0),
        ("qwen3-0.6b", "GenerateBatch", 98.0),
        ("llama-3.1-8b", "Generate", 90.0),
    ]
    assert got[1]["share"] == pytest.approx(0.98)
    assert got[2]["share"] is None


def test_what_misses_a_goal_says_so() -> None:
    row = {"model": "qwen3-0.6b", "what": "Generate", "tok_s": 27_500.0, "share": 0.98}
    assert bench.misses(row) == []
    assert bench.misses(row | {"tok_s": 27_499.0}) == ["below 27500 tok/s"]
    assert bench.misses(row | {"share": 0.9799}) == ["below 98% of the worker alone"]
    # The worker alone is what the others are compared with.
    assert bench.misses(row | {"what": "worker alone", "tok_s": 1.0, "share": None}) == []


def test_metrics_are_read_by_name() -> None:
    text = """# HELP pagewire_steps_total Steps confirmed.
pagewire_steps_total{model_name="m",replica_id="a b"} 12.0
pagewire_lookahead{model_name="m",replica_id="a b"} 3.0
process_cpu_seconds_total 1.0
"""
    assert bench.read_metrics(text) == {"steps": 12.0, "lookahead": 3.0}


def test_clocks_are_those_under_load() -> None:
    text = "345, 78.2\n1980, 650.0\n1500, 690.5\n1530, 692.0\n19"
    assert bench.medians_under_load(text) == {"clock_mhz": 1530.0, "power_w": 690.5}
    assert bench.medians_under_load("[N/A], [N/A]\n") == {}


def test_a_model_directory_has_what_both_planes_want(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for name in bench.TOKENIZER_FILES:
        (tokenizer / name).write_text("{}")
    path = bench.write_model("tiny", tmp_path / "models", tokenizer)
    assert sorted(file.name for file in path.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    content = (path / "model.safetensors").read_bytes()
    assert len(content) == 8 + int.from_bytes(content[:8], "little") + 4
