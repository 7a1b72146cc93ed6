"""The measurements of real parts measure what they say, in small."""

from __future__ import annotations

import argparse

import pytest

from tests.benchmarks.scale import measured, scenarios
from tests.benchmarks.scale.__main__ import MEASURED, SIMULATED, runs_of
from tests.benchmarks.scale.outcome import Outcome
from tests.benchmarks.scale.simulated_workers import Plan


def test_the_index_holds_every_block() -> None:
    figures = measured.fill_index(5000)
    assert figures["num_blocks"] == 5000
    assert figures["full_bytes_per_block"] >= figures["empty_bytes_per_block"]


def test_the_choice_is_timed_where_hits_are_found_and_where_not() -> None:
    [row] = measured.measure_router(replicas=(3,), prompts=(256,))
    assert row["replicas"] == 3
    assert min(row["hash_us"], row["cached_nowhere_us"], row["cached_everywhere_us"]) > 0


def test_candidates_take_the_prompt_and_find_it() -> None:
    # A candidate that the prompt does not fit would make the choice look free.
    request, engine = measured.request_and_candidate(2048)
    assert engine.fits(request.max_total_tokens, 1)
    assert engine.num_hit_tokens(request) == 2048 - measured.BLOCK_SIZE


@pytest.mark.redis
def test_entries_in_a_real_server_are_counted_and_timed() -> None:
    figures = measured.measure_store(num_scopes=2, num_blocks=600, num_replicas=3)
    assert figures["num_entries"] == 1200
    # 49 bytes of value, a name of one to three digits, and what the server adds.
    assert 50 < figures["bytes_per_entry"] < 400
    # Two for a replica's entries, two for its place among the replicas of its shard.
    assert figures["commands_per_lease"] == 4
    # Two hashes in hexadecimal.
    assert 129 < figures["set_bytes_per_replica"] < 600


def test_every_simulated_table_has_runs() -> None:
    options = argparse.Namespace(replicas=[10], fleet=16, planes=4)
    for table in SIMULATED:
        runs = list(runs_of(table, options))
        assert len({run.label for run in runs}) == len(runs) > 1
    assert not set(SIMULATED) & set(MEASURED)


def test_a_table_row_lines_up_with_its_header() -> None:
    row = scenarios.perform(scenarios.Run("x", scenarios.setup(4, 2, warm_up=20, measured=20)))
    outcome = Outcome(**row["outcome"])
    assert len(scenarios.quality_row("x", outcome)) == len(scenarios.HEADER)
    assert len(scenarios.rates_row("x", outcome)) == len(scenarios.RATES_HEADER)


def test_workers_are_dealt_out_evenly() -> None:
    with pytest.raises(ValueError, match="50 workers"):
        Plan(num_workers=50, num_processes=4)
