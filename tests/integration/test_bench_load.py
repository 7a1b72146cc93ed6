"""`pagewire bench` against a real control plane and simulated workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from api_harness import MODEL, Api, running_api, until
from pagewire_client.bench.calls import Access
from pagewire_client.bench.config import BenchConfig
from pagewire_client.bench.load import Load
from pagewire_client.bench.report import summarize, table
from simulated_harness import simulated_workers
from tls_helpers import make_pki

from control_plane.cluster_config import ClusterConfig
from control_plane.security_config import SecurityConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pagewire_client.bench.records import Outcome

    from control_plane.model_catalog import CatalogModel

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
async def api(model: CatalogModel, model_dir: Path) -> AsyncIterator[Api]:
    """Two workers that take a millisecond per step."""
    async with (
        running_api(model, model_dir) as api,
        simulated_workers(api, model_dir, "1ms", count=2),
    ):
        yield api
        await until(api.is_idle, what="every block is free")


def load(api: Api, **changes: Any) -> Load:
    values = {
        "server": api.address,
        "num_requests": 24,
        "concurrency": 8,
        "prompt_lengths": "10-40",
        "output_lengths": "5-30",
        "vocab_size": 40_000,
        **changes,
    }
    return Load(BenchConfig(**values), Access(server=api.address))


def good(outcome: Outcome, count: int) -> Outcome:
    assert [r.reason for r in outcome.records] == [""] * count
    assert sorted(r.index for r in outcome.records) == list(range(count))
    assert all(r.output_tokens == r.wanted_tokens for r in outcome.records)
    assert sum(outcome.tokens_by_second.values()) == sum(r.output_tokens for r in outcome.records)
    return outcome


async def test_a_closed_loop_keeps_its_concurrency_and_measures_every_token(api: Api) -> None:
    bench = load(api)
    outcome = good(await bench.run(), 24)
    spans = [(r.sent_s, r.end_s) for r in outcome.records]
    assert max(sum(a <= at < b for a, b in spans) for at, _ in spans) == 8
    for record in outcome.records:
        assert record.first_s is not None
        assert record.last_s is not None
        assert record.sent_s < record.first_s <= record.last_s <= record.end_s
    assert outcome.gaps.count == sum(r.num_messages - 1 for r in outcome.records)
    assert (bench.num_done, bench.num_failed) == (24, 0)
    summary = summarize(bench.config, outcome)
    assert summary["results"]["tokens"]["output"] == sum(r.output_tokens for r in outcome.records)
    assert "24 of 24" in table(summary)


async def test_a_batch_gives_the_same_tokens_without_their_times(api: Api) -> None:
    outcome = good(await load(api, via="batch", arrivals="burst", num_requests=150).run(), 150)
    assert all(r.first_s is None and r.num_messages == 0 for r in outcome.records)
    assert all(r.prompt_tokens for r in outcome.records)


async def test_poisson_arrivals_do_not_wait_for_answers(api: Api) -> None:
    outcome = good(
        await load(api, arrivals="poisson", rate=100.0, concurrency=0, num_requests=30).run(), 30
    )
    due = [r.sent_s - r.late_s for r in sorted(outcome.records, key=lambda r: r.index)]
    assert due == sorted(due)
    assert due[-1] > 0


async def test_a_shared_prefix_is_a_hit_and_a_random_prompt_is_not(api: Api) -> None:
    outcome = good(
        await load(
            api, workload="shared-prefix", prefix_length=320, prompt_lengths="8", concurrency=2
        ).run(),
        24,
    )
    # Both replicas may have to compute it first, and two requests at once do.
    assert sum(r.cached_tokens >= 320 for r in outcome.records) >= 20
    outcome = good(await load(api, seed=9).run(), 24)
    assert sum(r.cached_tokens for r in outcome.records) == 0


async def test_a_turn_has_everything_before_it_in_its_prompt(api: Api) -> None:
    for as_text in (False, True):
        bench = load(
            api,
            workload="multi-turn",
            turns=3,
            num_requests=12,
            concurrency=4,
            as_text=as_text,
            prompt_lengths="40",
            output_lengths="30",
            seed=int(as_text),
        )
        outcome = good(await bench.run(), 12)
        by_index = {r.index: r for r in outcome.records}
        for first in range(0, 12, 3):
            turns = [by_index[first + k] for k in range(3)]
            assert turns[0].end_s <= turns[1].sent_s <= turns[1].end_s <= turns[2].sent_s
            assert turns[0].prompt_tokens < turns[1].prompt_tokens < turns[2].prompt_tokens
            if not as_text:
                assert [t.prompt_tokens for t in turns] == [40, 110, 180]
                assert turns[2].cached_tokens >= 96


async def test_decode_rows_are_measured_together(api: Api) -> None:
    bench = load(api, workload="decode-rows", arrivals="burst", batch=4, num_requests=4)
    summary = summarize(bench.config, good(await bench.run(), 4))
    assert summary["results"]["decode"]["rows"] == 4
    # A step takes a millisecond at least.
    assert summary["results"]["decode"]["step_ms"] >= 0.99


async def test_errors_are_counted_by_the_servers_reason(api: Api) -> None:
    bench = load(api, num_requests=6, prompt_lengths="9000")
    outcome = await bench.run()
    assert {r.reason for r in outcome.records} == {"REQUEST_TOO_LONG"}
    assert bench.num_failed == 6
    batch = await load(api, num_requests=6, prompt_lengths="9000", via="batch").run()
    assert {r.reason for r in batch.records} == {"REQUEST_TOO_LONG"}


async def test_a_server_that_vanishes_is_an_error_of_each_request(
    model: CatalogModel, model_dir: Path
) -> None:
    cluster = ClusterConfig(term_gather_s=0.01, replica_wait_s=0.05)
    async with running_api(model, model_dir, cluster=cluster) as api:
        outcome = await load(api, num_requests=4, warmup=0).run()
        assert {r.reason for r in outcome.records} == {"NO_REPLICA"}
        gone = load(api, num_requests=4, warmup=0)
    for via in ("stream", "batch"):
        bench = Load(BenchConfig(**gone.config.to_json() | {"via": via}), Access(server="[::1]:9"))
        assert {r.reason for r in (await bench.run()).records} == {"UNAVAILABLE"}


async def test_a_run_ends_after_its_duration_and_gives_up_what_does_not_end(
    model: CatalogModel, model_dir: Path
) -> None:
    async with (
        running_api(model, model_dir) as api,
        simulated_workers(api, model_dir, "100ms"),
    ):
        bench = load(
            api, warmup=0, num_requests=10_000, output_lengths="2000", duration_s=0.5, drain_s=0.5
        )
        outcome = await bench.run()
        assert len(outcome.records) == 8
        assert {r.reason for r in outcome.records} == {"UNFINISHED"}
        assert sum(r.output_tokens for r in outcome.records) > 0
        assert not outcome.is_interrupted
        await until(api.is_idle, what="what was given up holds nothing")


@contextlib.asynccontextmanager
async def bench_process(api: Api, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "pagewire_client.cli", "bench", "--server", api.address, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'clients' / 'python'}"},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_several_processes_share_a_run_and_write_one_result(api: Api, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    arguments = "--requests 30 --concurrency 9 --processes 3 --prompt-len 16 --output-len 20"
    async with bench_process(api, *arguments.split(), "--json", str(path)) as process:
        async with asyncio.timeout(120):
            stdout, stderr = await process.communicate()
    assert process.returncode == 0, stderr.decode()
    assert "30 of 30" in stdout.decode()
    summary = json.loads(path.read_text())
    assert summary["parameters"]["processes"] == 3
    assert summary["parameters"]["vocab_size"] == 49_152
    assert summary["server"]["model"] == MODEL
    assert summary["server"]["replicas"][0]["devices"] == ["simulated 1ms"]
    assert summary["results"]["tokens"]["output"] == 600
    assert len(summary["results"]["client"]["cpu_s"]) == 3
    assert {"date", "versions", "machine", "definitions"} <= summary.keys()


async def test_every_process_brings_certificates_and_token(
    model: CatalogModel, model_dir: Path, tmp_path: Path
) -> None:
    pki = make_pki(tmp_path)
    tokens = tmp_path / "tokens"
    tokens.write_text("alice alice-0123456789abcdef\n")
    token = tmp_path / "alice.token"
    token.write_text("alice-0123456789abcdef\n")
    security = SecurityConfig(
        tls=pki.files("server", ca=pki.ca), auth_tokens_file=tokens, enforce_cache_salt=True
    )
    # Workers dial their own port, which is open here.
    async with (
        running_api(model, model_dir, security=security) as api,
        simulated_workers(api, model_dir, "1ms"),
    ):
        arguments = f"--token-file {token} --requests 8 --concurrency 4 --processes 2 "
        mine = pki.files("client", ca=pki.ca)
        arguments += f"--tls-ca {mine.ca} --tls-cert {mine.cert} --tls-key {mine.key} "
        arguments += "--output-len 5"
        async with bench_process(api, *arguments.split()) as process:
            async with asyncio.timeout(120):
                stdout, stderr = await process.communicate()
        assert process.returncode == 0, stderr.decode()
        assert "8 of 8" in stdout.decode()
        assert "alice-0123456789abcdef" not in stdout.decode() + stderr.decode()


@pytest.mark.parametrize("processes", [1, 2])
async def test_ctrl_c_shows_what_there_is(
    model: CatalogModel, model_dir: Path, processes: int
) -> None:
    async with (
        running_api(model, model_dir) as api,
        simulated_workers(api, model_dir, "20ms"),
    ):
        arguments = "--requests 100000 --concurrency 4 --warmup 0 --output-len 40 --prompt-len 8"
        async with bench_process(api, *arguments.split(), f"--processes={processes}") as process:
            await until(lambda: api.num_generated() > 300, what="it runs", timeout_s=120.0)
            process.send_signal(signal.SIGINT)
            async with asyncio.timeout(60):
                stdout, stderr = await process.communicate()
        assert process.returncode == 130, stderr.decode()
        assert "Interrupted" in stdout.decode()
        assert "UNFINISHED" in stdout.decode()
        await until(api.is_idle, what="every block is free")
