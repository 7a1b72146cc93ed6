"""`pagewire bench` without a server: what it would send, and how it sums up."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from io import StringIO
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from pagewire_client.bench.command import add_flags, read_config
from pagewire_client.bench.config import BenchConfig
from pagewire_client.bench.lengths import PRESETS, parse_lengths
from pagewire_client.bench.plot import PlotUnavailableError, require_matplotlib
from pagewire_client.bench.progress import Progress
from pagewire_client.bench.records import Gaps, Outcome, RequestRecord
from pagewire_client.bench.report import decode_steps, spread, summarize, table
from pagewire_client.bench.workload import Workload
from pagewire_client.cli import main

if TYPE_CHECKING:
    from pathlib import Path


def config(**changes: Any) -> BenchConfig:
    return BenchConfig(**{"server": "here:1", "vocab_size": 1000, **changes})


def flags(*arguments: str) -> BenchConfig:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return read_config(parser.parse_args(arguments), "here:1")


# ---- lengths -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [("7", 7, 7), ("3-9", 3, 9), ("lognormal:50:1.5:10:200", 10, 200), ("sharegpt", 4, 1024)],
)
def test_lengths_stay_within_their_bounds(text: str, low: int, high: int) -> None:
    rng = Random(0)
    drawn = [parse_lengths(text, is_output=False).draw(rng) for _ in range(2000)]
    assert (min(drawn), max(drawn)) == (low, high)


@pytest.mark.parametrize(("name", "means"), [("sharegpt", (154, 312)), ("alpaca", (19.3, 58.4))])
def test_presets_have_the_means_that_they_document(name: str, means: tuple[float, float]) -> None:
    for is_output, mean in enumerate(means):
        rng = Random(5)
        lengths = PRESETS[name][is_output]
        assert statistics.fmean(lengths.draw(rng) for _ in range(40_000)) == pytest.approx(
            mean, rel=0.03
        )


@pytest.mark.parametrize(
    "text",
    [
        *("", "0", "9-3", "0-5", "-1", "1.5", "zipf", "99999999", "lognormal:50:1:10"),
        *("lognormal:0:1:1:9", "lognormal:a:1:1:9", "lognormal:nan:1:1:9", "lognormal:5:-1:1:9"),
    ],
)
def test_lengths_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"lengths must be|lognormal needs"):
        parse_lengths(text, is_output=False)


# ---- workloads ---------------------------------------------------------------------------------


def test_the_same_parameters_make_the_same_requests_in_any_number_of_processes() -> None:
    for workload in ("random", "shared-prefix", "multi-turn"):
        one, other = (
            Workload(config(workload=workload, num_requests=20, processes=n)) for n in (1, 7)
        )
        assert [one.job(i) for i in range(one.num_jobs)] == [
            other.job(i) for i in reversed(range(other.num_jobs))
        ][::-1]
        changed = Workload(config(workload=workload, num_requests=20, seed=1))
        assert changed.job(3) != one.job(3)


def test_token_ids_are_of_the_vocabulary() -> None:
    for vocab_size in (2, 150, 1000):
        workload = Workload(config(vocab_size=vocab_size))
        ids = {i for n in range(50) for i in workload.job(n).turns[0].prompt}
        assert 0 <= min(ids) <= max(ids) < vocab_size


def test_groups_share_their_prefix_and_nothing_else() -> None:
    workload = Workload(
        config(workload="shared-prefix", prefix_length=64, prefix_groups=3, prompt_lengths="16")
    )
    prompts = [workload.job(i).turns[0].prompt for i in range(60)]
    assert {len(prompt) for prompt in prompts} == {80}
    assert len({tuple(prompt[:64]) for prompt in prompts}) == 3
    assert len({tuple(prompt[64:]) for prompt in prompts}) == 60


def test_a_text_prompt_has_a_word_per_token() -> None:
    workload = Workload(config(as_text=True, prompt_lengths="12", workload="shared-prefix"))
    prompt = workload.job(0).turns[0].prompt
    assert isinstance(prompt, str)
    assert len(prompt.split()) == 1024 + 12


def test_poisson_arrivals_come_at_their_rate() -> None:
    workload = Workload(config(arrivals="poisson", rate=20.0, num_requests=4000))
    times = [workload.arrival_s(i) for i in range(4000)]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(200, rel=0.05)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.stdev(gaps) == pytest.approx(0.05, rel=0.1)


def test_the_burst_is_the_published_one() -> None:
    workload = Workload(config(workload="burst-256", arrivals="burst"))
    turns = [workload.job(i).turns[0] for i in range(256)]
    assert workload.num_requests == 256
    assert sum(len(turn.prompt) for turn in turns) == 142_827
    assert sum(turn.max_tokens for turn in turns) == 133_966
    # As numbers of one generator, in this order.
    rng = Random(0)
    assert turns[0].prompt == [rng.randint(0, 10_000) for _ in range(rng.randint(100, 1024))]


def test_the_decode_rows_are_those_of_the_worker_benchmark() -> None:
    workload = Workload(config(workload="decode-rows", arrivals="burst", batch=64))
    turns = [workload.job(i).turns[0] for i in range(64)]
    assert {len(turn.prompt) for turn in turns} == {960}
    assert {turn.max_tokens for turn in turns} == {128 + 8 + 8}


def test_a_trace_is_read_line_by_line(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    lines = [
        {"at_s": 0, "prompt_tokens": 5, "output_tokens": 3},
        {"at_s": 0.5, "token_ids": [1, 2], "output_tokens": 4, "prefix": "a", "prefix_tokens": 6},
        {"at_s": 2, "token_ids": [3], "output_tokens": 5, "prefix": "a", "prefix_tokens": 6},
        {"at_s": 2, "prompt": "hello there", "output_tokens": 1},
    ]
    trace.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    values = {"workload": "trace", "arrivals": "trace", "trace": str(trace), "num_requests": 100}
    workload = Workload(config(**values))
    jobs = [workload.job(i) for i in range(workload.num_jobs)]
    assert [job.at_s for job in jobs] == [0, 0.5, 2, 2]
    assert [job.turns[0].max_tokens for job in jobs] == [3, 4, 5, 1]
    assert [len(job.turns[0].prompt) for job in jobs] == [5, 8, 7, 11]
    assert jobs[1].turns[0].prompt[:6] == jobs[2].turns[0].prompt[:6]
    assert Workload(config(**values | {"num_requests": 2})).num_jobs == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("x", "line 2: Expecting value"),
        ("[]", "line 2: must be a JSON object"),
        ('{"prompt_tokens": 5}', "output_tokens must be a whole number"),
        ('{"prompt_tokens": 0, "output_tokens": 1}', "prompt_tokens must be a whole number"),
        ('{"output_tokens": 1}', "exactly one of"),
        ('{"prompt": "a", "prompt_tokens": 1, "output_tokens": 1}', "exactly one of"),
        ('{"prompt": "", "output_tokens": 1}', "prompt must be a text"),
        ('{"token_ids": [], "output_tokens": 1}', "token_ids must be a list"),
        ('{"token_ids": [1.5], "output_tokens": 1}', "token_ids must be a list"),
        ('{"at_s": -1, "prompt_tokens": 1, "output_tokens": 1}', "at_s must be seconds"),
        ('{"at_s": 0, "prompt_tokens": 1, "output_tokens": 1}', "must not go back"),
        ('{"prompt_tokens": 1, "output_tokens": 1, "seed": 1}', "unknown seed; known: at_s"),
        (
            '{"prompt": "a", "output_tokens": 1, "prefix": "p", "prefix_tokens": 2}',
            "prefix is of token ids",
        ),
    ],
)
def test_a_bad_line_of_a_trace_is_named(tmp_path: Path, line: str, message: str) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"at_s": 9, "prompt_tokens": 5, "output_tokens": 3}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        Workload(config(workload="trace", trace=str(trace)))


# ---- flags -------------------------------------------------------------------------------------


def test_a_workload_of_fixed_shape_sets_what_it_is() -> None:
    got = flags("--workload", "decode-rows", "--batch", "8", "--via", "batch")
    assert (got.arrivals, got.temperature, got.ignore_eos) == ("burst", 0.6, True)
    assert (got.num_requests, got.batch, got.via) == (8, 8, "batch")
    assert flags("--workload", "burst-256").num_requests == 256
    assert flags("--rate", "3").arrivals == "poisson"
    assert flags("--rate", "3").concurrency == 0


def test_no_run_finds_the_prefixes_of_another_unless_told_so() -> None:
    assert flags().cache_salt != flags().cache_salt
    assert flags("--cache-salt", "mine").cache_salt == "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--workload burst-256 --requests 5", "--requests: --workload burst-256 sets that"),
        ("--workload burst-256 --temperature 0", "--temperature: "),
        ("--batch 4", "--batch belongs to"),
        ("--arrivals poisson", "--rate belongs to --arrivals poisson"),
        ("--arrivals closed --rate 3", "--rate belongs to --arrivals poisson"),
        ("--concurrency 0", "at least 1 in a closed loop"),
        ("--workload trace", "needs --trace"),
        ("--trace x.jsonl", "needs --trace"),
        ("--arrivals trace", "needs --workload trace"),
        ("--workload multi-turn --via batch", "needs --via stream"),
        ("--via batch --slo-ttft-ms 5", "no times of tokens"),
        ("--prompt-len 0", "lengths must be"),
        ("--requests 0", r"--requests must be in \[1"),
        ("--processes 1000", "--processes must be in"),
        ("--duration-s -1", "--duration-s must be finite"),
        ("--timeout-s 0", "--timeout-s must be positive"),
        ("--rate nan", "--rate must be finite"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(arguments: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flags(*arguments.split())


def test_parameters_travel_between_processes() -> None:
    one = config(workload="shared-prefix", slo_itl_ms=2.5, as_text=True)
    assert BenchConfig.from_json(json.loads(json.dumps(one.to_json()))) == one


# ---- numbers -----------------------------------------------------------------------------------


def record(index: int, **values: Any) -> RequestRecord:
    given = {
        "sent_s": 1.0,
        "first_s": 1.1,
        "last_s": 2.1,
        "end_s": 2.2,
        "prompt_tokens": 10,
        "output_tokens": 11,
        "num_messages": 11,
        **values,
    }
    return RequestRecord(index, **given)


def test_percentiles_are_nearest_ranks() -> None:
    got = spread([i / 1000 for i in range(1, 101)])
    assert (got["p50"], got["p90"], got["p99"], got["max"], got["n"]) == (50, 90, 99, 100, 100)
    assert spread([])["p50"] is None
    assert spread([0.5])["p99"] == 500


def test_the_histogram_is_within_its_error() -> None:
    gaps, rng = Gaps(), Random(1)
    values = sorted(rng.lognormvariate(-4, 1) for _ in range(5000))
    for value in values:
        gaps.add(value)
    for percent in (1, 50, 90, 99, 100):
        exact = values[max(1, math.ceil(5000 * percent / 100)) - 1]
        assert gaps.percentile(percent) == pytest.approx(exact, rel=0.004)
    assert gaps.mean() == pytest.approx(statistics.fmean(values), rel=0.004)
    gaps.add(0.0)
    assert gaps.percentile(0) == pytest.approx(1e-6)
    assert math.isnan(Gaps().percentile(50))


def test_outcomes_of_processes_add_up() -> None:
    parts = []
    for process in (0, 1):
        part = Outcome([record(process)], client_cpu_s=[0.5], wall_s=2.0 + process)
        part.gaps.add(0.1)
        part.tokens_by_second = {1: 5, 2 + process: 6}
        parts.append(Outcome.from_json(json.loads(json.dumps(part.to_json()))))
    parts[0].merge(parts[1])
    total = parts[0]
    assert [r.index for r in total.records] == [0, 1]
    assert total.gaps.count == 2
    assert total.tokens_by_second == {1: 10, 2: 6, 3: 6}
    assert (total.client_cpu_s, total.wall_s) == ([0.5, 0.5], 3.0)


def test_a_summary_counts_what_went_well_and_what_did_not() -> None:
    slow = record(1, first_s=1.5, last_s=3.5, end_s=3.5)
    failed = record(2, reason="OVERLOADED", first_s=None, last_s=None, output_tokens=0, end_s=1.2)
    outcome = Outcome([record(0), slow, failed], client_cpu_s=[1.0], wall_s=4.0)
    outcome.gaps.add(0.1)
    summary = summarize(config(slo_ttft_ms=200, slo_itl_ms=150), outcome)
    results = summary["results"]
    assert results["requests"]["errors"] == {"OVERLOADED": 1}
    assert (results["requests"]["sent"], results["requests"]["good"]) == (3, 2)
    assert results["output_tok_s"] == pytest.approx(22 / 3.5)
    assert results["total_tok_s"] == pytest.approx(42 / 3.5)
    assert results["ttft_ms"]["p50"] == pytest.approx(100)
    assert results["tpot_ms"]["max"] == pytest.approx(200)
    assert results["goodput"]["share"] == pytest.approx(1 / 3)
    assert not results["client"]["is_the_limit"]
    text = table(json.loads(json.dumps(summary)))
    assert "2 of 3" in text
    assert "OVERLOADED" in text
    assert "within the SLO" in text


def test_a_busy_client_says_that_it_measured_itself() -> None:
    outcome = Outcome([record(0)], client_cpu_s=[0.2, 1.9], wall_s=2.0)
    summary = summarize(config(processes=2), outcome)
    assert summary["results"]["client"]["is_the_limit"]
    assert "IT WAS THE LIMIT" in table(summary)


def test_a_run_without_an_answer_has_no_numbers_but_a_table() -> None:
    outcome = Outcome([record(0, reason="UNAVAILABLE", first_s=None, last_s=None)])
    outcome.records[0].output_tokens = 0
    assert "UNAVAILABLE" in table(summarize(config(), outcome))
    assert "0 of 0" in table(summarize(config(via="batch"), Outcome()))


def test_a_decode_step_is_counted_while_all_rows_decode() -> None:
    # Two rows with a token every 10 ms each; one begins 50 ms later and they are sent in pairs.
    first = record(0, token_times=[(0.0, 1)] + [(0.02 * i, 2) for i in range(1, 20)])
    second = record(1, token_times=[(0.05, 1)] + [(0.05 + 0.02 * i, 2) for i in range(1, 20)])
    got = decode_steps([first, second])
    assert got["step_ms"] == pytest.approx(10, rel=0.07)
    assert got["rows"] == 2
    assert decode_steps([record(0)])["step_ms"] is None


def test_progress_is_a_line_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    progress = Progress(out, 10)
    progress.show(1, 0, 100)
    now[0] += 0.5
    progress.show(5, 1, 200)
    progress.close()
    assert out.getvalue().count("\r") == 3
    assert "[############............] 5/10 requests, 400 tokens/s, 1 failed" in out.getvalue()
    log = StringIO()
    progress = Progress(log, 10, duration_s=40.0)
    now[0] += 10.0
    progress.show(1, 0, 50)
    progress.close()
    assert log.getvalue().startswith("[######....")
    Progress(None, 10).show(1, 1, 1)


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlotUnavailableError, match=r"pip install 'pagewire\[bench\]'"):
        require_matplotlib()


def test_nonsense_is_refused_before_anything_is_sent(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "--server", "127.0.0.1:9", "--rate", "1", "--arrivals", "burst"]
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert "pagewire bench: --rate belongs to" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--server", "127.0.0.1:9"]) == 1
    assert "Nothing answers at 127.0.0.1:9" in capsys.readouterr().err
