"""When rows of a ModelRunner stop, and what they leave alone afterwards."""

from __future__ import annotations

import pytest
import torch
from step_driver import GREEDY, PROMPTS, SAMPLED, VOCAB

from data_plane.step_work import RowSampling, StepError

STOP, LENGTH, ERROR = 1, 2, 4


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
