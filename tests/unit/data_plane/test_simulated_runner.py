"""A device that is not there: its tokens, its stops, its clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pytest
from scripted_control_plane import added_row, plan

from data_plane.row_table import RowTable
from data_plane.simulated_profile import SimulationProfile
from data_plane.simulated_runner import SimulatedRunner
from protos.pagewire.v1 import worker_pb2

if TYPE_CHECKING:
    from data_plane.simulated_runner import SimulatedStep
    from data_plane.step_work import StepOutput

STOP, LENGTH = 1, 2
VOCAB, EOS, BLOCK = 1000, 7, 4
POOL = np.array([i for i in range(VOCAB) if i != EOS], np.int32)
PROMPT = [11, 12, 13, 14, 15]


@dataclass
class Clock:
    """Time that passes only when somebody sleeps or a test says so."""

    now_s: float = 100.0
    slept_s: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds


class Bench:
    """A simulated device behind the real row table, fed with plans."""

    def __init__(self, profile: SimulationProfile | None = None) -> None:
        self.clock = Clock()
        self.runner = SimulatedRunner(
            profile or SimulationProfile(name="test", step_us=1000.0),
            max_num_seqs=8,
            num_blocks=128,
            token_pool=POOL,
            clock=self.clock,
            sleep=self.clock.sleep,
        )
        self.table = RowTable(
            max_num_seqs=8,
            num_blocks=128,
            max_model_len=64,
            block_size=BLOCK,
            max_num_batched_tokens=256,
            vocab_size=VOCAB,
        )
        self._next_block = 1

    def launch(self, **fields: object) -> SimulatedStep:
        message = plan(self.table.applied_version + 1, **fields)
        (work,) = self.table.apply(message.plan)
        return self.runner.launch(work)

    def step(self, **fields: object) -> StepOutput:
        return self.launch(**fields).wait()

    def row(self, row: int, tokens: list[int] = PROMPT, **changes: object) -> worker_pb2.AddedRow:
        """A row with blocks for 24 tokens."""
        first, self._next_block = self._next_block, self._next_block + 6
        sampling = changes.pop("sampling", {})
        added = added_row(row, tokens, list(range(first, first + 6)), **changes)  # type: ignore[arg-type]
        added.ClearField("eos_token_ids")
        added.eos_token_ids = np.array([EOS], "<i4").tobytes()
        for name, value in {"temperature": 0.0, **sampling}.items():  # type: ignore[dict-item]
            if name == "stop_token_ids":
                added.sampling.stop_token_ids[:] = value
            else:
                setattr(added.sampling, name, value)
        return added

    def start(self, *rows: worker_pb2.AddedRow) -> StepOutput:
        """Add rows and compute their whole prompts."""
        numbers = [added.row for added in rows]
        counts = [len(added.token_ids) // 4 - added.num_computed_tokens for added in rows]
        return self.step(added_rows=list(rows), chunk_rows=numbers, chunk_num_tokens=counts)

    def sequence(self, row: worker_pb2.AddedRow, steps: int) -> list[int]:
        tokens = self.start(row).token_ids.tolist()
        while len(tokens) < steps:
            tokens += self.step().token_ids.tolist()
        return tokens


def test_a_request_gives_the_same_tokens_in_any_row_and_company() -> None:
    alone = Bench()
    expected = alone.sequence(alone.row(0), 6)
    crowd = Bench()
    got = crowd.start(crowd.row(1, [1, 2, 3]), crowd.row(5)).token_ids.tolist()[1:]
    for _ in range(5):
        got += crowd.step().token_ids.tolist()[1:]
    assert got == expected
    assert len(set(expected)) > 1


def test_a_replayed_sequence_goes_on_where_it_was() -> None:
    first, second = Bench(), Bench()
    expected = first.sequence(first.row(0), 8)
    replayed = second.row(3, PROMPT + expected[:3], num_prompt_tokens=len(PROMPT))
    assert second.sequence(replayed, 5) == expected[3:]


def test_a_prompt_computed_in_chunks_gives_the_same_tokens() -> None:
    whole, chunked = Bench(), Bench()
    expected = whole.sequence(whole.row(0), 4)
    nothing = chunked.step(added_rows=[chunked.row(0)], chunk_rows=[0], chunk_num_tokens=[3])
    assert nothing.token_ids.size == nothing.counts.size == 0
    got = chunked.step(chunk_rows=[0], chunk_num_tokens=[2]).token_ids.tolist()
    while len(got) < 4:
        got += chunked.step().token_ids.tolist()
    assert got == expected


def test_the_seed_counts_only_where_tokens_are_drawn() -> None:
    def tokens(**changes: object) -> list[int]:
        bench = Bench()
        return bench.sequence(bench.row(0, **changes), 6)

    assert tokens(seed=1) == tokens(seed=2)
    drawn = {"sampling": {"temperature": 0.5}}
    assert tokens(seed=1, **drawn) != tokens(seed=2, **drawn)
    assert tokens(seed=1, **drawn) == tokens(seed=1, **drawn)
    assert tokens(sequence_index=1) != tokens(sequence_index=0)
    assert tokens(tokens=[*PROMPT[:-1], 99]) != tokens()


def test_a_row_ends_at_its_length() -> None:
    bench = Bench()
    bench.start(bench.row(2, max_total_tokens=len(PROMPT) + 2))
    last = bench.step()
    assert last.finished_rows.tolist() == [2]
    assert last.finish_reasons.tolist() == [LENGTH]


def test_end_of_sequence_comes_by_its_own_chance_only() -> None:
    always = SimulationProfile(name="short", step_us=1.0, mean_output_tokens=1.0)
    bench = Bench(always)
    output = bench.start(bench.row(0), bench.row(1, sampling={"ignore_eos": True}))
    assert output.finished_rows.tolist() == [0]
    assert output.finish_reasons.tolist() == [STOP]
    assert output.token_ids[0] == EOS
    assert output.token_ids[1] != EOS
    patient = Bench(always)
    tokens = patient.sequence(patient.row(0, sampling={"min_tokens": 3}), 4)
    assert EOS not in tokens[:3]
    assert tokens[3] == EOS


def test_the_mean_length_is_what_the_profile_says() -> None:
    bench = Bench(SimulationProfile(name="mean", step_us=1.0, mean_output_tokens=8.0))
    ends = 0
    for seed in range(50):
        bench.step(
            added_rows=[
                bench.row(0, seed=seed, sampling={"temperature": 1.0}, max_total_tokens=24)
            ],
            chunk_rows=[0],
            chunk_num_tokens=[len(PROMPT)],
        )
        tokens = [0]
        while bench.runner._active[0]:
            tokens += bench.step().token_ids.tolist()
        ends += tokens[-1] == EOS
        bench.step(removed_rows=[0])
        bench._next_block = 1
    # 19 tokens at a chance of 1 in 8 each: 92 of 100 end before their length.
    assert 38 <= ends <= 50


def test_stop_ids_end_a_row_but_not_before_its_minimum() -> None:
    free = Bench()
    tokens = free.sequence(free.row(0), 6)
    bench = Bench()
    output = bench.start(bench.row(0, sampling={"stop_token_ids": [tokens[0], 5]}))
    assert output.token_ids.tolist() == tokens[:1]
    assert output.finish_reasons.tolist() == [STOP]
    late = Bench()
    sampling = {"stop_token_ids": [tokens[0], tokens[2]], "min_tokens": 2}
    got = late.sequence(late.row(0, sampling=sampling), 3)
    assert got[0] not in (tokens[0], tokens[2])
    assert got[1:] == tokens[1:3]
    assert not late.runner._active[0]


def test_a_stopped_row_says_nothing_and_costs_nothing() -> None:
    bench = Bench(
        SimulationProfile(
            name="rows", step_us=100.0, row_us=10.0, kv_token_us=1.0, mean_output_tokens=1.0
        )
    )
    bench.start(bench.row(0), bench.row(1, sampling={"ignore_eos": True}))
    output = bench.step()
    assert output.counts.tolist() == [0, 1]
    assert output.token_ids.size == 1
    assert output.finished_rows.size == 0
    assert output.device_time_us == 100 + 10 + len(PROMPT) + 1


def test_a_fork_has_tokens_of_its_own() -> None:
    bench = Bench()
    bench.start(bench.row(0))
    fork = worker_pb2.Fork(parent_row=0, child_row=1, sequence_index=1, token=-1)
    # What both hold in part must be copied before the child writes it.
    copy = worker_pb2.BlockCopies(
        src=_column(2), dst=_column(100), row=_column(1), index=_column(1)
    )
    parent, child = bench.step(forks=[fork], block_copies=copy).token_ids.tolist()
    other = Bench()
    expected = other.sequence(other.row(0, sequence_index=1), 2)
    assert child == expected[1]
    assert parent != child


def test_a_reset_forgets_rows_and_keeps_generations() -> None:
    bench = Bench()
    bench.start(bench.row(0))
    bench.runner.reset()
    assert not bench.runner._active.any()
    assert bench.runner.generations[1:7].tolist() == [1] * 6


def test_steps_queue_behind_each_other_and_only_waiting_sleeps() -> None:
    bench = Bench()
    steps = [
        bench.launch(added_rows=[bench.row(0)], chunk_rows=[0], chunk_num_tokens=[5]),
        bench.launch(),
        bench.launch(),
    ]
    assert bench.clock.slept_s == []
    assert bench.clock.now_s == 100.0
    ends_s = []
    for step in steps:
        step.wait()
        ends_s.append(round(bench.clock.now_s - 100.0, 6))
    assert ends_s == [0.001, 0.002, 0.003]
    assert bench.runner.counters.num_waits == 0
    assert bench.runner.counters.busy_us == 3000


def test_a_step_that_comes_late_is_counted_as_a_wait() -> None:
    bench = Bench()
    bench.start(bench.row(0))
    bench.clock.now_s += 0.004
    bench.step()
    counters = bench.runner.counters
    assert counters.num_waits == 1
    assert counters.waited_us == pytest.approx(4000)
    assert counters.longest_wait_us == pytest.approx(4000)
    assert counters.num_tokens == counters.num_steps == 2


def test_a_device_without_work_does_not_wait() -> None:
    bench = Bench()
    bench.start(bench.row(0))
    bench.step(removed_rows=[0], added_rows=[bench.row(1)], chunk_rows=[1], chunk_num_tokens=[5])
    bench.clock.now_s += 60.0
    bench.step(removed_rows=[1], added_rows=[bench.row(0)], chunk_rows=[0], chunk_num_tokens=[5])
    assert bench.runner.counters.num_waits == 0


def test_a_step_takes_what_the_profile_says() -> None:
    profile = SimulationProfile(
        name="all",
        step_us=1000.0,
        row_us=100.0,
        kv_token_us=10.0,
        prefill_step_us=5000.0,
        prefill_token_us=50.0,
        prefill_pair_us=1.0,
    )
    bench = Bench(profile)
    first = bench.start(bench.row(0))
    assert first.device_time_us == 1000 + 100 + 5000 + 50 * 5 + (1 + 2 + 3 + 4 + 5)
    # One row decodes over six tokens while another computes the last three of its prompt.
    added = bench.row(1, [1, 2, 3, 4, 5, 6, 7], num_computed_tokens=4, num_hit_blocks=1)
    second = bench.start(added)
    assert second.device_time_us == 1000 + 200 + 10 * 6 + 5000 + 50 * 3 + (5 + 6 + 7)
    third = bench.step()
    assert third.device_time_us == 1000 + 200 + 10 * (7 + 8)


def _column(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()
