"""The arithmetic of `make bench-fleet` and `make bench-rtt`, without any process."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from tests.benchmarks import bench_fleet, bench_pipeline
from tests.benchmarks.bench_fleet_stack import cpu_s, starved_s

if TYPE_CHECKING:
    from pathlib import Path

STEP, ROW, TEXT, REQUEST, MESSAGE = 500.0, 0.5, 0.2, 300.0, 80.0


def decode_cell(workers: int, rows: int) -> dict[str, Any]:
    us_per_step = STEP + ROW * rows
    return {
        "cell": "decode",
        "workers": workers,
        "rows": rows,
        "steps": 1000,
        "tokens": 1000 * rows,
        "us_per_step": us_per_step,
        "us_per_token": us_per_step / rows,
    }


def request_cell(requests: int, tokens: int, messages: int = 0) -> dict[str, Any]:
    steps = tokens // 64
    time_us = STEP * steps + (ROW + TEXT) * tokens + REQUEST * requests + MESSAGE * messages
    return {
        "steps": steps,
        "tokens": tokens,
        "requests": requests,
        "messages": messages,
        "cpu_s": time_us / 1e6,
    }


def test_costs_are_found_in_the_cells_that_they_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_fleet, "text_us", lambda: TEXT)
    decode = [decode_cell(1, 16), decode_cell(4, 64), decode_cell(4, 256), decode_cell(16, 256)]
    requests = [request_cell(2000, 100_000), request_cell(500, 250_000)]
    streams = [request_cell(500, 250_000, 50_000), request_cell(500, 250_000, 10_000)]
    costs = bench_fleet.fit(decode, requests, streams)
    assert costs.step == pytest.approx(STEP)
    assert costs.row == pytest.approx(ROW)
    assert costs.request == pytest.approx(REQUEST)
    assert costs.message == pytest.approx(MESSAGE)
    for cell in requests + streams:
        assert bench_fleet.explained(costs, cell) == pytest.approx(1.0)
    figures = bench_fleet.derived(costs, decode[-1])
    assert figures["token_only_tok_s"] == pytest.approx(1e6 * 256 / (STEP + ROW * 256))
    assert figures["streamed_tok_s"] < figures["with_text_tok_s"] < figures["token_only_tok_s"]


def test_costs_are_never_negative() -> None:
    # Noise: more rows took less.
    odd = [decode_cell(4, 64), decode_cell(4, 256) | {"us_per_step": 400.0}]
    costs = bench_fleet.fit(odd, [], [])
    assert costs.row == 0.0
    assert costs.step > 0.0


def test_a_tokens_text_is_measured(model_dir: Path) -> None:
    del model_dir  # converted before
    assert 0.0 < bench_fleet.text_us() < 1000.0


def test_the_hottest_functions_are_ours_and_summed_over_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "profile.txt"
    path.write_text(
        "main (control_plane/__main__.py:5);a (control_plane/a.py:1);b (asyncio/b.py:2) 10\n"
        "main (control_plane/__main__.py:5);a (control_plane/a.py:7) 30\n"
        "main (control_plane/__main__.py:5);a (control_plane/a.py:9) 20\n"
    )
    own, whole = bench_fleet.top(str(path))
    assert own == [{"function": "a (control_plane/a.py)", "share": pytest.approx(50 / 60)}]
    assert whole == [{"function": "a (control_plane/a.py)", "share": pytest.approx(1.0)}]


def test_one_process_is_read_from_proc() -> None:
    assert cpu_s(os.getpid()) > 0
    assert starved_s(os.getpid()) >= 0


def window(round_trip_ms: float, tok_s: float, ttft_ms: float) -> dict[str, Any]:
    return {
        "round_trip_ms": round_trip_ms,
        "tok_s": tok_s,
        "steps_s": 100.0,
        "busy_ttft_ms": {"p50": 2 * ttft_ms},
        "idle_ttft_ms": {"p50": ttft_ms},
        "itl_ms": {"p50": 8.0, "p90": 8.5, "p99": 9.0},
        "bytes_per_step": 200.0,
        "control_plane_busy": 0.2,
        "control_plane_starved": 0.0,
    }


def test_ratios_are_within_a_round_and_goals_by_round_trips() -> None:
    # The second round's machine was half as fast: its ratio is what counts.
    rounds = [
        [window(0.0, 1000.0, 10.0), window(20.0, 990.0, 31.0)],
        [window(0.0, 500.0, 20.0), window(20.0, 495.0, 41.0)],
        [window(0.0, 1000.0, 10.0), window(20.0, 900.0, 90.0)],
    ]
    rows = bench_pipeline.summarize(rounds, {0.0: 0.1, 20.0: 21.0}, 10.0, 64)
    for row in rows:
        row["base_link_ms"] = 0.1
    far = rows[1]
    assert far["ratio"] == pytest.approx(0.99)
    assert far["of_device"] == pytest.approx(1.0)
    assert far["idle_ttft_later_ms"] == pytest.approx(21.0)
    assert far["busy_ttft_later_ms"] == pytest.approx(42.0)
    assert bench_pipeline.verdict(rows[0]) == ""
    # Two round trips are 41.8 ms, and a millisecond is granted.
    assert bench_pipeline.verdict(far) == ""
    assert "throughput below 95%" in bench_pipeline.verdict(far | {"ratio": 0.94})
    assert "busy first token" in bench_pipeline.verdict(far | {"busy_ttft_later_ms": 43.0})
