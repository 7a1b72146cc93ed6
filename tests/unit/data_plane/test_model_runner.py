"""Steps made by hand on a tiny random model, in fp32, against transformers' greedy search."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from step_driver import GREEDY, PROMPTS, SAMPLED, VOCAB, StepDriver

from data_plane.kv_cache import KVCacheError
from data_plane.model_runner import ModelRunner, RunnerConfig
from data_plane.step_work import RowSampling
from data_plane.stop_check import FINISH_STOP

if TYPE_CHECKING:
    from collections.abc import Callable


def _null_block_is_zero(driver: StepDriver) -> bool:
    # The first block in the torch backend's shape.
    return not any(cache[:, 0].any() for cache in driver.runner._kv_caches)


# Greedy output does not depend on how it is computed.


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("chunk", [None, 1, 15, 16, 17])
def test_greedy_output_is_the_same_for_any_block_size_and_chunking(
    block_size: int, chunk: int | None, make_driver: Callable[..., StepDriver], reference
) -> None:
    driver = make_driver(block_size=block_size)
    rows = [driver.add(row, prompt) for row, prompt in enumerate(PROMPTS)]
    driver.run(66 + 20 if chunk == 1 else 30, chunk=chunk)
    for driven, prompt in zip(rows, PROMPTS, strict=True):
        assert len(driven.output) >= 20
        assert driven.output == reference(prompt, len(driven.output))
    assert _null_block_is_zero(driver)


def test_prefill_and_decode_of_different_rows_share_steps(make_driver, reference) -> None:
    driver = make_driver()
    rows = []
    for row in (5, 2, 7, 0, 3):
        rows.append((driver.add(row, PROMPTS[row]), PROMPTS[row]))
        driver.run(3, chunk=13)
    driver.run(10, chunk=13)
    for driven, prompt in rows:
        assert driven.output == reference(prompt, len(driven.output))
        assert len(driven.output) >= 10


def test_steps_ordered_ahead_of_results_give_the_same_tokens(make_driver, reference) -> None:
    driver = make_driver()
    rows = [driver.add(row, PROMPTS[row]) for row in range(4)]
    driver.run(40, lookahead=3)
    for row, driven in enumerate(rows):
        assert driven.output == reference(PROMPTS[row], 40)


def test_paused_row_goes_on_where_it_was(make_driver, reference) -> None:
    driver = make_driver()
    rows = [driver.add(row, PROMPTS[row]) for row in range(3)]
    driver.run(4)
    for _ in range(3):
        driver.step(paused=[1])
    driver.run(4)
    assert [len(driven.output) for driven in rows] == [11, 8, 11]
    for row, driven in enumerate(rows):
        assert driven.output == reference(PROMPTS[row], len(driven.output))


def test_replay_into_other_rows_and_blocks_continues_the_same_text(make_driver, reference) -> None:
    driver = make_driver()
    for row in range(4):
        driver.add(row, PROMPTS[row + 2])
    driver.run(9)
    replayed = []
    for row in range(4):
        old = driver.remove(row)
        replayed.append(driver.add(7 - row, old.token_ids, num_prompt=old.num_prompt))
    driver.run(11, chunk=23)
    for row, driven in enumerate(replayed):
        assert driven.output == reference(PROMPTS[row + 2], len(driven.output))
        assert len(driven.output) > 15


def test_replay_onto_prefix_hits_computes_only_the_rest(make_driver, reference) -> None:
    driver = make_driver()
    driver.add(0, PROMPTS[4])  # 40 tokens
    driver.run(10)
    old = driver.remove(0, free=False)
    replayed = driver.add(6, old.token_ids, num_prompt=old.num_prompt, hit_blocks=old.block_ids[:3])
    driver.run(5)
    assert replayed.output == reference(PROMPTS[4], len(replayed.output))
    assert len(replayed.output) == 15


def test_row_and_blocks_are_reused_by_the_plan_that_frees_them(make_driver, reference) -> None:
    driver = make_driver(num_blocks=18)
    driver.add(0, PROMPTS[7])
    driver.run(3)
    for _ in range(5):
        # Launched ahead: nothing waits between the last write of the old and the new sequence.
        ahead = driver.launch()
        driver.remove(0)
        driven = driver.add(0, PROMPTS[5])
        last = driver.launch()
        ahead.sampled.clear()
        ahead.pending.wait()
        driver.collect(last)
        driver.run(4, lookahead=2)
        assert driven.output == reference(PROMPTS[5], len(driven.output))


# Forks and copies.


def test_children_forked_with_the_last_prompt_chunk_sample_from_the_parents_logits(
    make_driver,
) -> None:
    alone = []
    for index in range(3):
        driver = make_driver()
        driven = driver.add(0, PROMPTS[3], sampling=SAMPLED, seed=7, sequence_index=index)
        driver.run(12)
        alone.append(driven.output)
    assert len({tuple(output) for output in alone}) == 3

    driver = make_driver()
    other = driver.add(3, PROMPTS[1])
    driver.step()
    rows = [driver.add(5, PROMPTS[3], sampling=SAMPLED, seed=7)]
    driver.step(chunks={5: 9})
    rows += [driver.fork(5, child, sequence_index=i) for i, child in ((1, 2), (2, 6))]
    driver.step()
    assert [len(driven.output) for driven in rows] == [1, 1, 1]
    # 17 tokens: the second block is shared and partly filled, so two of three need a copy.
    driver.copy_block(2, 1)
    driver.copy_block(6, 1)
    driver.run(11)
    assert [driven.output for driven in rows] == alone
    assert len(other.output) == 14


def test_greedy_children_follow_their_parent(make_driver, reference) -> None:
    driver = make_driver()
    rows = [driver.add(1, PROMPTS[2])]
    rows += [driver.fork(1, child, sequence_index=child) for child in (0, 4)]
    driver.run(20)  # 16 tokens fill their block: nothing to copy
    for driven in rows:
        assert driven.output == reference(PROMPTS[2], 20)


def test_fork_of_a_decoding_row_inherits_its_last_token(make_driver, reference) -> None:
    driver = make_driver()
    parent = driver.add(1, PROMPTS[4])
    ahead = [driver.launch() for _ in range(5)]
    child = driver.fork(1, 3, sequence_index=1)
    driver.copy_block(3, 2)
    # The child's input is a token that the host has not seen yet.
    ahead += [driver.launch() for _ in range(6)]
    for ordered in ahead:
        driver.collect(ordered)
    assert parent.output == reference(PROMPTS[4], 11)
    assert child.output == reference(PROMPTS[4], 11)[5:]


def test_fork_with_a_token_continues_from_that_token(make_driver, reference) -> None:
    driver = make_driver()
    parent = driver.add(1, PROMPTS[4])
    driver.run(3)
    token = (parent.token_ids[-1] + 1) % VOCAB
    child = driver.fork(1, 0, sequence_index=1, token=token)
    driver.copy_block(0, 2)
    driver.run(8)
    assert parent.output == reference(PROMPTS[4], 11)
    start = child.token_ids[:-8]
    assert start[-1] == token
    assert child.token_ids[len(start) :] == reference(start, 8)


def test_fork_with_a_token_goes_on_where_its_parent_stopped(make_driver, reference) -> None:
    driver = make_driver()
    stop = reference(PROMPTS[4], 3)[2]
    parent = driver.add(
        1, PROMPTS[4], sampling=RowSampling(temperature=0.0, stop_token_ids=(stop,))
    )
    driver.run(3)
    assert parent.finish_reason == FINISH_STOP
    child = driver.fork(1, 0, sequence_index=1, token=(stop + 1) % VOCAB)
    driver.copy_block(0, 2)
    driver.step()
    assert (parent.counts[-1], child.counts[-1]) == (0, 1)


def test_copied_block_is_independent_of_its_source(make_driver, reference) -> None:
    driver = make_driver()
    parent = driver.add(0, PROMPTS[3])
    driver.run(2)
    child = driver.fork(0, 1, sequence_index=1, token=5)
    driver.copy_block(1, 1)
    shared, copied = parent.block_ids[1], child.block_ids[1]
    assert shared != copied
    driver.run(6)
    caches = driver.runner._kv_caches
    for cache in caches:
        assert torch.equal(cache[:, shared, :2], cache[:, copied, :2])
        assert not torch.equal(cache[:, shared, 2:8], cache[:, copied, 2:8])
    assert parent.output == reference(PROMPTS[3], 8)


# Random draws.


def test_seeded_draws_are_the_same_alone_in_a_batch_and_after_a_replay(make_driver) -> None:
    kinds = [
        RowSampling(temperature=0.7),
        RowSampling(temperature=1.3, top_k=12),
        RowSampling(temperature=1.0, top_p=0.8),
        RowSampling(temperature=1.1, min_p=0.05),
        SAMPLED,
        GREEDY,
    ]
    alone = []
    for i, sampling in enumerate(kinds):
        driver = make_driver()
        driven = driver.add(0, PROMPTS[i], sampling=sampling, seed=2**64 - 1 - i)
        driver.run(16)
        alone.append(driven.output)

    driver = make_driver(block_size=32, seed=1)
    for i, sampling in enumerate(kinds):
        driver.add(7 - i, PROMPTS[i], sampling=sampling, seed=2**64 - 1 - i)
        driver.run(1, chunk=11)
    driver.run(6, chunk=11)
    removed = [driver.remove(7 - i) for i in range(len(kinds))]
    replayed = []
    for i, (old, sampling) in enumerate(zip(removed, kinds, strict=True)):
        assert old.output == alone[i][: len(old.output)]
        assert len(old.output) > 1
        replayed.append(
            driver.add(
                i,
                old.token_ids,
                num_prompt=old.num_prompt,
                sampling=sampling,
                seed=2**64 - 1 - i,
            )
        )
        if i % 3 == 2:
            driver.step()
    driver.run(16, chunk=40)
    for i, driven in enumerate(replayed):
        assert driven.output[:16] == alone[i]


def test_seed_and_sequence_index_key_the_draws(make_driver) -> None:
    driver = make_driver()
    rows = [
        driver.add(0, PROMPTS[3], sampling=SAMPLED, seed=3),
        driver.add(1, PROMPTS[3], sampling=SAMPLED, seed=3),
        driver.add(2, PROMPTS[3], sampling=SAMPLED, seed=4),
        driver.add(4, PROMPTS[3], sampling=SAMPLED, seed=3, sequence_index=1),
    ]
    driver.run(20)
    assert rows[0].output == rows[1].output
    assert len({tuple(driven.output) for driven in rows}) == 3


# What survives, and what is said about it.


def test_generations_are_those_of_the_plan_that_last_handed_a_block_out(make_driver) -> None:
    driver = make_driver()
    generations = driver.runner.generations
    assert generations.dtype == np.int64
    assert not generations.any()
    first = driver.add(0, PROMPTS[4])
    driver.version = 10
    driver.step()
    assert set(generations[first.block_ids]) == {11}
    assert np.count_nonzero(generations) == 3
    hit = driver.add(1, PROMPTS[4], hit_blocks=first.block_ids[:2])
    driver.step()
    assert generations[hit.block_ids].tolist() == [11, 11, 12]
    driver.fork(0, 2, sequence_index=1)
    driver.copy_block(2, 2)
    driver.step()
    assert generations[driver.rows[2].block_ids].tolist() == [11, 11, 13]
    driver.run(8)
    assert generations[first.block_ids].tolist() == [11, 11, 11, 20]
    assert generations[0] == 0


def test_reset_drops_rows_and_keeps_bytes_and_generations(make_driver, reference) -> None:
    driver = make_driver()
    old = driver.add(1, PROMPTS[5])
    driver.run(4)
    caches = [cache.clone() for cache in driver.runner._kv_caches]
    generations = driver.runner.generations.copy()
    driver.runner.reset()
    driver.rows.clear()
    for cache, before in zip(driver.runner._kv_caches, caches, strict=True):
        assert torch.equal(cache, before)
    assert np.array_equal(driver.runner.generations, generations)
    replayed = driver.add(1, old.token_ids, num_prompt=63, hit_blocks=old.block_ids[:4])
    driver.run(5)
    assert replayed.output == reference(PROMPTS[5], len(replayed.output))


def test_warm_up_changes_nothing(make_driver, reference) -> None:
    driver = make_driver()
    driven = driver.add(1, PROMPTS[5])
    driver.run(2)
    caches = [cache.clone() for cache in driver.runner._kv_caches]
    words = driver.runner.row_state.words.clone()
    table = driver.runner.block_table.device_table.clone()
    driver.runner.warm_up()
    for cache, before in zip(driver.runner._kv_caches, caches, strict=True):
        assert torch.equal(cache, before)
    assert torch.equal(driver.runner.row_state.words, words)
    assert torch.equal(driver.runner.block_table.device_table, table)
    driver.run(3)
    assert driven.output == reference(PROMPTS[5], 5)


def test_plan_without_work_is_applied(make_driver, reference) -> None:
    driver = make_driver()
    driver.add(1, PROMPTS[3])
    driver.run(2)
    driver.remove(1)
    output = driver.step()
    assert output.counts.size == output.token_ids.size == output.finished_rows.size == 0


def test_bytes_per_decode_step_do_not_grow_with_the_sequence(make_driver) -> None:
    driver = make_driver()
    driver.add(1, PROMPTS[7], max_total=250)
    driver.run(2)
    table = driver.runner.block_table
    per_step = []
    for _ in range(100):
        before = table.bytes_committed
        driver.step()
        per_step.append(table.bytes_committed - before)
    assert sum(step > 0 for step in per_step) == 6  # one block every 16 tokens
    assert max(per_step) <= 32


def test_runner_refuses_what_the_model_cannot_hold(models) -> None:
    model = models("cpu")
    with pytest.raises(ValueError, match="trained for 256 positions"):
        ModelRunner(
            model, RunnerConfig(max_num_seqs=1, max_num_batched_tokens=16, max_model_len=257)
        )
    with pytest.raises(KVCacheError, match="longest sequence that fits has 48 tokens"):
        ModelRunner(model, RunnerConfig(max_num_seqs=1, max_num_batched_tokens=16, num_blocks=4))
    with pytest.raises(ValueError, match="at least max_num_seqs"):
        RunnerConfig(max_num_seqs=8, max_num_batched_tokens=7)


@pytest.mark.gpu
@pytest.mark.usefixtures("idle_gpu")
@pytest.mark.parametrize("max_num_batched_tokens", [64, 700])
def test_measured_cache_stays_within_the_share_of_the_gpu(
    max_num_batched_tokens: int, models, reference
) -> None:
    model = models("cuda")
    total = torch.cuda.get_device_properties(0).total_memory
    config = RunnerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=max_num_batched_tokens,
        gpu_memory_utilization=0.05,
    )
    free_before, _ = torch.cuda.mem_get_info()
    runner = ModelRunner(model, config)
    runner.warm_up()
    free, _ = torch.cuda.mem_get_info()
    assert total - free <= max(total * 0.05, total - free_before)
    assert runner.num_blocks > 1000
    driver = StepDriver(runner, block_size=16)
    driven = driver.add(3, PROMPTS[4])
    driver.run(5)
    assert driven.output == reference(PROMPTS[4], 5)
