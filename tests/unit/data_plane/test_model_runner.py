"""Steps made by hand on a tiny random model, in fp32, against transformers' greedy search."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from step_driver import GREEDY, StepDriver

from data_plane.kv_cache import KVCacheError
from data_plane.model_runner import ModelRunner, RunnerConfig
from data_plane.models.loader import LoadedModel, load_model
from data_plane.step_work import RowSampling, StepError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import LlamaForCausalLM

STOP, LENGTH, ERROR = 1, 2, 4
VOCAB = 97
_RANDOM = random.Random(0)
PROMPTS = [
    [_RANDOM.randrange(VOCAB) for _ in range(length)] for length in (1, 15, 16, 17, 40, 63, 64, 65)
]
SAMPLED = RowSampling(temperature=0.9, top_k=40, top_p=0.95)

Reference = "Callable[[list[int], int], list[int]]"


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        # Far from uniform, so that greedy search wanders instead of repeating a token.
        initializer_range=0.4,
        tie_word_embeddings=False,
        dtype="float32",
    )
    path = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def reference(tiny_dir: Path) -> Reference:
    """Greedy continuation by transformers; it never stops early."""
    from transformers import LlamaForCausalLM

    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)
    known: dict[tuple[int, ...], list[int]] = {}

    def continuation(prompt: list[int], num_tokens: int) -> list[int]:
        cached = known.get(tuple(prompt), [])
        if len(cached) < num_tokens:
            out = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                do_sample=False,
                max_new_tokens=num_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
            cached = known[tuple(prompt)] = out[0, len(prompt) :].tolist()
        return cached[:num_tokens]

    return continuation


# How a step treats rows that stopped, and how it is padded: each way gives the same tokens.
MODES = {
    "cpu-skipping": ("cpu", {}),
    "cpu-masking-padded": ("cpu", {"skip_inactive": False, "decode_sizes": (2, 4, 8)}),
    "cuda": ("cuda", {"decode_sizes": (2, 4, 8)}),
}


@pytest.fixture(
    params=[
        "cpu-skipping",
        "cpu-masking-padded",
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def models(tiny_dir: Path) -> Callable[[str], LoadedModel]:
    loaded: dict[str, LoadedModel] = {}

    def load(device: str) -> LoadedModel:
        if device not in loaded:
            loaded[device] = load_model(tiny_dir, dtype="float32", device=device)
        return loaded[device]

    return load


@pytest.fixture
def make_driver(mode: str, models: Callable[[str], LoadedModel]) -> Callable[..., StepDriver]:
    def make(*, block_size: int = 16, num_blocks: int = 120, seed: int = 0) -> StepDriver:
        device, extra = MODES[mode]
        config = RunnerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=512,
            max_model_len=256,
            block_size=block_size,
            num_blocks=num_blocks,
            **extra,
        )
        runner = ModelRunner(models(device), config)
        return StepDriver(runner, block_size=block_size, seed=seed)

    return make


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
    assert parent.finish_reason == STOP
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


# Stops.


def _stop_after(reference, prompt: list[int], count: int) -> int:
    """A token that greedy search emits first as its `count`-th."""
    output = reference(prompt, 40)
    for index in range(count - 1, 40):
        if output[index] not in output[:index]:
            return output[index]
    raise AssertionError("the model repeats itself")


@pytest.mark.parametrize("kind", ["eos", "stop_token_ids"])
def test_row_stops_on_the_device_and_emits_nothing_after_it(
    kind: str, make_driver, reference
) -> None:
    driver = make_driver()
    stop = _stop_after(reference, PROMPTS[4], 4)
    expected = reference(PROMPTS[4], 40)
    expected = expected[: expected.index(stop) + 1]
    if kind == "eos":
        driven = driver.add(1, PROMPTS[4], eos_token_ids=[95, stop])
    else:
        sampling = RowSampling(temperature=0.0, stop_token_ids=(96, stop), ignore_eos=True)
        driven = driver.add(1, PROMPTS[4], sampling=sampling, eos_token_ids=[expected[0]])
    other = driver.add(2, PROMPTS[3])
    driver.run(len(expected) + 4, lookahead=3)
    assert driven.output == expected
    assert driven.finish_reason == STOP
    assert driven.counts == [1] * len(expected) + [0] * 4
    assert other.output == reference(PROMPTS[3], len(expected) + 4)
    assert other.finish_reason == 0


def test_stopped_row_writes_nothing(make_driver, reference) -> None:
    driver = make_driver()
    stop = _stop_after(reference, PROMPTS[4], 2)
    driven = driver.add(1, PROMPTS[4], eos_token_ids=[stop])
    while not driven.finish_reason:
        driver.step()
    before = [cache.clone() for cache in driver.runner._kv_caches]
    words = driver.runner.row_state.words.clone()
    driver.run(20)
    for cache, old in zip(driver.runner._kv_caches, before, strict=True):
        assert torch.equal(cache, old)
    assert torch.equal(driver.runner.row_state.words, words)


def test_ignored_eos_does_not_stop(make_driver, reference) -> None:
    driver = make_driver()
    eos = reference(PROMPTS[4], 1)
    sampling = RowSampling(temperature=0.0, ignore_eos=True)
    driven = driver.add(1, PROMPTS[4], sampling=sampling, eos_token_ids=eos)
    driver.run(10)
    assert driven.output == reference(PROMPTS[4], 10)


def test_row_stops_at_its_length_limit(make_driver, reference) -> None:
    driver = make_driver()
    driven = driver.add(1, PROMPTS[3], max_total=17 + 5)
    single = driver.add(2, PROMPTS[3], max_total=17 + 1)
    driver.run(8)
    assert driven.output == reference(PROMPTS[3], 5)
    assert driven.counts == [1] * 5
    assert single.output == reference(PROMPTS[3], 1)
    assert (driven.finish_reason, single.finish_reason) == (LENGTH, LENGTH)


def test_stop_token_at_the_length_limit_is_a_stop(make_driver, reference) -> None:
    driver = make_driver()
    eos = reference(PROMPTS[3], 1)
    driven = driver.add(1, PROMPTS[3], max_total=18, eos_token_ids=eos)
    driver.step()
    assert driven.finish_reason == STOP


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_masks_eos_and_stop_ids_until_it_is_reached(
    ignore_eos: bool, make_driver, reference
) -> None:
    prompt = PROMPTS[4]
    eos, stop = reference(prompt, 1)[0], (reference(prompt, 1)[0] + 1) % VOCAB
    sampling = RowSampling(
        temperature=0.0, min_tokens=6, stop_token_ids=(stop,), ignore_eos=ignore_eos
    )
    driver = make_driver()
    driven = driver.add(1, prompt, sampling=sampling, eos_token_ids=[eos])
    plain = driver.add(2, prompt)
    driver.run(6)
    assert not {eos, stop} & set(driven.output)
    # From its own tokens on it is greedy search again, whatever the mask did before.
    assert len(driven.output) == 6
    driver.run(1)
    assert driven.output[6] == reference(driven.token_ids[:-1], 1)[0]
    assert plain.output == reference(prompt, 7)


def test_min_tokens_counts_from_the_prompts_end_after_a_replay(make_driver, reference) -> None:
    prompt = PROMPTS[4]
    eos = reference(prompt, 1)
    sampling = RowSampling(temperature=0.0, min_tokens=6)
    driver = make_driver()
    driven = driver.add(1, prompt, sampling=sampling, eos_token_ids=eos)
    driver.run(12)
    expected = driven.output
    assert len(expected) >= 6
    again = make_driver()
    replayed = again.add(
        3, prompt + expected[:4], num_prompt=40, sampling=sampling, eos_token_ids=eos
    )
    again.run(8)
    assert replayed.output == expected


def test_more_stop_ids_than_fit_are_a_step_error(make_driver) -> None:
    driver = make_driver()
    driver.add(1, PROMPTS[3], sampling=RowSampling(stop_token_ids=tuple(range(1000))))
    with pytest.raises(StepError, match="1000 stop and EOS") as failure:
        driver.step()
    assert not failure.value.is_fatal


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_row_with_nan_logits_ends_with_an_error_and_alone(
    sampling: RowSampling, make_driver, reference
) -> None:
    driver = make_driver()
    sick = driver.add(1, PROMPTS[4], sampling=sampling)
    well = driver.add(2, PROMPTS[3])
    driver.run(3)
    for cache in driver.runner._kv_caches:
        cache[:, sick.block_ids[0]] = float("nan")
    driver.run(4)
    assert sick.counts == [1, 1, 1, 0, 0, 0, 0]
    assert sick.finish_reason == ERROR
    assert well.output == reference(PROMPTS[3], 7)
    # The NaNs stay in a freed block; whoever gets it next is not harmed.
    driver.remove(1)
    heir = driver.add(0, PROMPTS[3])
    assert sick.block_ids[0] in heir.block_ids + driver._free
    driver.run(5)
    assert heir.output == reference(PROMPTS[3], 5)


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
    free, _ = torch.cuda.mem_get_info()
    assert total - free <= max(total * 0.05, total - free_before)
    assert runner.num_blocks > 1000
    driver = StepDriver(runner, block_size=16)
    driven = driver.add(3, PROMPTS[4])
    driver.run(5)
    assert driven.output == reference(PROMPTS[4], 5)
