"""The random numbers are Philox, the distributions are right, and a draw is nobody else's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from data_plane.sampler import NO_TOKEN, SamplingBatch, gumbel_noise, philox_4x32, sample

VOCAB = 1000


def make_batch(num_rows: int, **changes: Any) -> SamplingBatch:
    values: dict[str, Any] = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 1234,
        "sequence_index": 0,
        "position": torch.arange(num_rows),
        **changes,
    }
    dtypes = {"temperature": torch.float32, "top_p": torch.float32, "min_p": torch.float32}
    return SamplingBatch(
        **{
            name: torch.as_tensor(value).expand(num_rows).to(dtypes.get(name, torch.int64))
            for name, value in values.items()
        }
    )


def peaked_logits(num_rows: int, vocab_size: int = VOCAB, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * 4


def reference_keep(logits: torch.Tensor, top_k: int, top_p: float, min_p: float) -> list[int]:
    """The ids that may be drawn, as plain sorting and adding says; temperature already applied."""
    probs = logits.double().softmax(-1)
    ids = [i for i in range(len(logits)) if probs[i] >= min_p * probs.max()]
    ids.sort(key=lambda i: (-float(logits[i]), i))
    ids = ids[:top_k] if top_k else ids
    if top_p >= 1:
        return sorted(ids)
    total = float(probs[ids].sum())
    kept: list[int] = []
    mass = 0.0
    for token in ids:
        kept.append(token)
        mass += float(probs[token])
        if mass >= top_p * total:
            break
    return sorted(kept)


def chi_square(counts: np.ndarray, probs: np.ndarray) -> tuple[float, int]:
    """Statistic and degrees of freedom; rare tokens are pooled until each bin expects 5."""
    total = counts.sum()
    order = np.argsort(-probs)
    counts, expected = counts[order], probs[order] * total
    common = int((expected >= 5).sum())
    counts = np.append(counts[:common], counts[common:].sum())
    expected = np.append(expected[:common], expected[common:].sum())
    if expected[-1] < 1e-9:
        assert counts[-1] == 0, "a token without probability was drawn"
        counts, expected = counts[:-1], expected[:-1]
    return float(((counts - expected) ** 2 / expected).sum()), len(expected) - 1


def critical_value(dof: int) -> float:
    """Chi-square quantile at 99.99 %. Source: Wilson and Hilferty, 1931."""
    return dof * (1 - 2 / (9 * dof) + 3.719 * (2 / (9 * dof)) ** 0.5) ** 3


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (
            [0xFFFFFFFF] * 4,
            [0xFFFFFFFF] * 2,
            [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        ),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_vectors(
    counter: list[int], key: list[int], expected: list[int]
) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    k0, k1 = (torch.tensor([word]) for word in key)
    assert [int(word) for word in philox_4x32((c0, c1, c2, c3), (k0, k1))] == expected


def test_noise_uses_seed_position_sequence_and_token_as_written_down() -> None:
    seed, position, index, token = -0x123456789ABCDEF, 77, 3, 4 * 25 + 2
    batch = make_batch(1, seed=seed, position=position, sequence_index=index)
    words = philox_4x32(
        (
            torch.tensor([25]),
            torch.tensor([position]),
            torch.tensor([index]),
            torch.tensor([0]),
        ),
        (torch.tensor([seed & 0xFFFFFFFF]), torch.tensor([(seed >> 32) & 0xFFFFFFFF])),
    )
    uniform = (float(words[2]) + 0.5) / 2**32
    expected = -np.log(-np.log1p(-uniform))
    noise = gumbel_noise(torch.tensor([[token]]), batch)
    assert float(noise) == pytest.approx(expected, rel=1e-5)


def test_noise_is_finite_at_both_ends() -> None:
    from data_plane.sampler import _to_gumbel

    noise = _to_gumbel(torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1]))
    assert noise.isfinite().all()
    assert (noise.diff() <= 0).all()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_plain_draws_follow_the_softmax(temperature: float) -> None:
    num_draws, logits = 20_000, peaked_logits(1, 50)
    tokens = sample(logits.expand(num_draws, -1), make_batch(num_draws, temperature=temperature))
    counts = np.bincount(tokens.numpy(), minlength=50)
    statistic, dof = chi_square(counts, (logits[0].double() / temperature).softmax(-1).numpy())
    assert statistic < critical_value(dof)


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 9, "top_p": 0.7, "min_p": 0.01},
    ],
)
def test_filtered_draws_follow_the_renormalized_softmax(filters: dict[str, Any]) -> None:
    num_draws, logits = 4_000, peaked_logits(1, 600, seed=3) / 2
    tokens = sample(logits.expand(num_draws, -1), make_batch(num_draws, **filters))
    kept = reference_keep(
        logits[0], filters.get("top_k", 0), filters.get("top_p", 1.0), filters.get("min_p", 0.0)
    )
    probs = torch.zeros(600, dtype=torch.float64)
    probs[kept] = logits[0].double()[kept].softmax(-1)
    statistic, dof = chi_square(np.bincount(tokens.numpy(), minlength=600), probs.numpy())
    assert statistic < critical_value(dof)


@pytest.mark.parametrize("vocab_size", [7, 512, 513, 1000, 9000])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (1, 1.0, 0.0),
        (40, 1.0, 0.0),
        (700, 1.0, 0.0),
        (0, 0.5, 0.0),
        (0, 0.999, 0.0),
        (0, 1e-6, 0.0),
        (0, 1.0, 0.02),
        (600, 0.9, 0.001),
        (10**6, 0.99, 0.0),
    ],
)
def test_only_tokens_that_the_filters_keep_are_drawn(
    vocab_size: int, top_k: int, top_p: float, min_p: float
) -> None:
    # Small logits: nearly flat, so that the kept set reaches past the shortlist.
    for scale in (0.05, 1.0):
        logits = peaked_logits(1, vocab_size, seed=1) * scale
        tokens = sample(
            logits.expand(40, -1), make_batch(40, top_k=top_k, top_p=top_p, min_p=min_p)
        )
        assert set(tokens.tolist()) <= set(reference_keep(logits[0], top_k, top_p, min_p))


def test_ties_at_the_edge_of_top_k_go_to_the_lowest_ids() -> None:
    logits = torch.zeros(1, 5000)
    tokens = sample(logits.expand(300, -1), make_batch(300, top_k=3))
    assert set(tokens.tolist()) == {0, 1, 2}
    logits[0, 4000] = 1.0
    tokens = sample(logits.expand(300, -1), make_batch(300, top_k=3))
    assert set(tokens.tolist()) == {0, 1, 4000}


def test_greedy_takes_the_lowest_of_equal_maxima() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, [17, 500]] = 3.0
    assert sample(logits, make_batch(2, temperature=0.0)).tolist() == [17, 0]


def test_very_low_temperature_is_greedy_and_does_not_overflow() -> None:
    logits = peaked_logits(50) * 100
    tokens = sample(logits, make_batch(50, temperature=1e-30))
    assert torch.equal(tokens, logits.argmax(-1))


def test_a_draw_is_the_same_in_any_batch() -> None:
    logits = peaked_logits(12)
    batch = make_batch(
        12,
        temperature=torch.tensor([0.0, 0.7, 1.0, 1.5] * 3),
        top_k=torch.tensor([0, 5, 0] * 4),
        top_p=torch.tensor([1.0, 1.0, 0.9, 0.5] * 3),
        seed=torch.arange(12) * 7919 - 20,
        sequence_index=torch.arange(12) % 2,
    )
    together = sample(logits, batch)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    assert torch.equal(sample(logits[order], batch.select(order)), together[order])
    for row in range(12):
        index = torch.tensor([row])
        assert torch.equal(sample(logits[index], batch.select(index)), together[index])


@pytest.mark.parametrize(
    "change",
    [{"seed": 1235}, {"seed": 1234 + (1 << 40)}, {"position": 5}, {"sequence_index": 1}],
)
def test_each_part_of_the_key_changes_the_draws(change: dict[str, Any]) -> None:
    tokens = torch.arange(400)[None, :]
    first = gumbel_noise(tokens, make_batch(1))
    second = gumbel_noise(tokens, make_batch(1, **change))
    assert not (first == second).any()


def test_neighbouring_positions_and_tokens_are_independent() -> None:
    noise = gumbel_noise(torch.arange(2000)[None, :].expand(200, -1), make_batch(200)).double()
    centred = noise - noise.mean()
    for shifted in (centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1]):
        # Standard error of a mean of 400 000 products of unit-variance terms is 0.0016.
        assert abs(float(shifted.mean()) / float(centred.var())) < 0.01


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "nothing"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_row_without_a_usable_logit_gives_no_token_and_spoils_no_other(
    bad: float | str, temperature: float
) -> None:
    logits = peaked_logits(3)
    expected = sample(logits, make_batch(3, temperature=temperature))
    if bad == "nothing":
        logits[1] = float("-inf")
    else:
        logits[1, 321] = bad
    tokens = sample(logits, make_batch(3, temperature=temperature))
    assert tokens.tolist() == [int(expected[0]), NO_TOKEN, int(expected[2])]


def test_forbidden_token_is_never_drawn_and_logits_stay_as_they_are() -> None:
    logits = torch.full((300, 8), float("-inf"))
    logits[:, [2, 5]] = 1.0
    before = logits.clone()
    for filters in ({}, {"top_p": 0.99}, {"top_k": 6}):
        assert set(sample(logits, make_batch(300, **filters)).tolist()) == {2, 5}
    assert torch.equal(logits, before)


def test_empty_batch_gives_nothing() -> None:
    assert sample(torch.empty(0, VOCAB), make_batch(0)).shape == (0,)
