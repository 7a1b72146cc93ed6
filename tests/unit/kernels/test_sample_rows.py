"""The device's draw against the CPU's: same tokens, same stops, same state."""

from __future__ import annotations

import pytest
import torch

from data_plane import row_state as rs
from data_plane.device_step import REASON_SHIFT
from data_plane.sampler import NO_TOKEN, PURPOSE_TOKEN, SamplingBatch, sample
from data_plane.stop_check import FINISH_ERROR, finish_reasons, mask_stop_ids
from kernels.sample_rows import new_sample_scratch, sample_rows

POISON = -7
NUM_ROWS = 12


class Rows:
    """State of rows as `RowState` keeps it; every row active, greedy, far from its limits."""

    def __init__(self, generator: torch.Generator) -> None:
        device = generator.device
        self.words = torch.zeros((NUM_ROWS, rs.NUM_WORDS), dtype=torch.int32, device=device)
        self.stop_ids = torch.full(
            (NUM_ROWS, rs.MAX_STOP_IDS), -1, dtype=torch.int32, device=device
        )
        self.words[:, rs.LENGTH] = torch.arange(NUM_ROWS, device=device) * 97 + 5
        self.words[:, rs.ACTIVE] = 1
        self.words[:, rs.MAX_TOTAL] = 100_000
        self.words[:, rs.SEQUENCE_INDEX] = torch.arange(NUM_ROWS, device=device) % 3
        self.set_floats(rs.TOP_P, 1.0)
        bits = torch.randint(-(2**31), 2**31 - 1, (NUM_ROWS, 2), generator=generator, device=device)
        self.words[:, rs.SEED : rs.SEED + 2] = bits.int()

    def set_floats(self, column: int, value: float | torch.Tensor) -> None:
        self.words.view(torch.float32)[:, column] = value


def _cpu(logits: torch.Tensor, rows: torch.Tensor, state: Rows):
    """Results and state after the step, computed with the worker's own code on the CPU."""
    logits = logits.float().cpu().clone()
    rows = rows.cpu().long()
    words, stop_ids = state.words.cpu().clone(), state.stop_ids.cpu()
    picked, ids = words[rows], stop_ids[rows]
    floats = picked.view(torch.float32)
    index = picked[:, rs.LENGTH]
    mask_stop_ids(logits, ids, index, picked[:, rs.MIN_TOTAL])
    batch = SamplingBatch(
        temperature=floats[:, rs.TEMPERATURE],
        top_k=picked[:, rs.TOP_K],
        top_p=floats[:, rs.TOP_P],
        min_p=floats[:, rs.MIN_P],
        seed=picked.view(torch.int64)[:, rs.SEED // 2],
        sequence_index=picked[:, rs.SEQUENCE_INDEX],
        position=index,
    )
    tokens = sample(logits, batch).int()
    live = picked[:, rs.ACTIVE] > 0
    reasons = finish_reasons(tokens, ids, index, picked[:, rs.MAX_TOTAL])
    reasons = reasons.masked_fill(~live, 0)
    produced = live & (tokens != NO_TOKEN)
    words[rows[live], rs.LAST_TOKEN] = tokens[live]
    words[rows[live], rs.ACTIVE] = (reasons == 0)[live].int()
    return torch.stack((tokens, (reasons << REASON_SHIFT) + produced.int()), dim=1), words


def _run(
    logits: torch.Tensor,
    rows: torch.Tensor,
    state: Rows,
    *,
    is_filtered: bool,
    tile: int,
) -> torch.Tensor:
    count, vocab_size = logits.shape
    guarded = torch.full((count + 2, 2), POISON, dtype=torch.int32, device=logits.device)
    scratch = new_sample_scratch(
        max_num_samples=count, vocab_size=vocab_size, device=logits.device, tile=tile
    )
    sample_rows(
        logits.clone(),
        rows,
        state.words,
        state.stop_ids,
        layout=rs.LAYOUT,
        purpose=PURPOSE_TOKEN,
        is_filtered=is_filtered,
        scratch=scratch,
        results=guarded[1:-1],
    )
    assert (guarded[[0, -1]] == POISON).all()
    return guarded[1:-1]


def _check(
    logits: torch.Tensor, rows: torch.Tensor, state: Rows, *, is_filtered: bool, tile: int = 64
) -> torch.Tensor:
    expected, words = _cpu(logits, rows, state)
    results = _run(logits, rows, state, is_filtered=is_filtered, tile=tile)
    assert results.tolist() == expected.tolist()
    assert torch.equal(state.words.cpu(), words)
    return results


def _logits(
    generator: torch.Generator, count: int, vocab_size: int, *, ties: bool = False
) -> torch.Tensor:
    shape = (count, vocab_size + 3)
    logits = torch.randn(*shape, generator=generator, device=generator.device) * 3
    # Rounded logits have many equals, as a bf16 model's have.
    return (logits.round() if ties else logits)[:, :vocab_size]


def _all_rows(generator: torch.Generator) -> torch.Tensor:
    return torch.randperm(NUM_ROWS, generator=generator, device=generator.device).int()


@pytest.fixture
def state(generator: torch.Generator) -> Rows:
    return Rows(generator)


@pytest.mark.parametrize("is_filtered", [False, True])
@pytest.mark.parametrize("vocab_size", [3, 64, 200])
@pytest.mark.parametrize("ties", [False, True])
def test_greedy_and_random_rows_draw_what_the_cpu_draws(
    vocab_size: int, ties: bool, is_filtered: bool, state: Rows, generator: torch.Generator
) -> None:
    temperature = torch.tensor([0.0, 0.2, 1.0, 3.0] * 3, device=generator.device)
    state.set_floats(rs.TEMPERATURE, temperature)
    logits = _logits(generator, NUM_ROWS, vocab_size, ties=ties)
    _check(logits[:6], _all_rows(generator)[:6], state, is_filtered=is_filtered)


@pytest.mark.parametrize("is_filtered", [False, True])
def test_a_draw_keeps_its_precision_at_any_scale(
    is_filtered: bool, state: Rows, generator: torch.Generator
) -> None:
    state.set_floats(rs.TEMPERATURE, 1e-4)
    logits = _logits(generator, 3, 100) * 1e-4 + 1000.0
    _check(logits, _all_rows(generator)[:3], state, is_filtered=is_filtered)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (1, 1.0, 0.0),
        (5, 1.0, 0.0),
        (0, 0.5, 0.0),
        (0, 0.01, 0.0),
        (7, 0.7, 0.0),
        (0, 1.0, 0.1),
        (20, 0.9, 0.05),
        (150, 0.999, 0.0),
        (1000, 0.5, 1.0),
    ],
)
def test_filtered_rows_draw_what_the_cpu_draws(
    top_k: int,
    top_p: float,
    min_p: float,
    ties: bool,
    state: Rows,
    generator: torch.Generator,
) -> None:
    state.words[:, rs.TOP_K] = top_k
    state.set_floats(rs.TOP_P, top_p)
    state.set_floats(rs.MIN_P, min_p)
    state.set_floats(
        rs.TEMPERATURE, torch.tensor([0.0, 1.0, 0.5, 2.0] * 3, device=generator.device)
    )
    logits = _logits(generator, NUM_ROWS, 200, ties=ties)
    # Masked tokens have no rank, even if that leaves fewer than top_k.
    logits[3, 2:] = -torch.inf
    # In one tile, and with every pass cut into several.
    tile = 64 if ties else 256
    _check(logits[:5], _all_rows(generator)[:5], state, is_filtered=True, tile=tile)


@pytest.mark.parametrize("is_filtered", [False, True])
def test_rows_stop_by_id_length_and_error(
    is_filtered: bool, state: Rows, generator: torch.Generator
) -> None:
    logits = _logits(generator, NUM_ROWS, 200)
    rows = torch.arange(NUM_ROWS, dtype=torch.int32, device=logits.device)
    likeliest = logits.argmax(-1).int()
    state.stop_ids[0, :3] = torch.stack((likeliest[0] + 1, likeliest[0], likeliest[0] - 1))
    state.stop_ids[1, 0] = -2 - likeliest[1]  # disarmed: it goes on
    state.words[2, rs.MAX_TOTAL] = state.words[2, rs.LENGTH] + 1
    state.words[3, rs.MAX_TOTAL] = state.words[3, rs.LENGTH] + 2
    state.words[4, rs.MAX_TOTAL] = state.words[4, rs.LENGTH] + 1
    state.stop_ids[4, 0] = likeliest[4]  # both: the stop counts
    logits[5, 7] = float("nan")
    logits[6, 70] = float("inf")
    logits[7] = -torch.inf
    state.words[8, rs.ACTIVE] = 0
    results = _check(logits, rows, state, is_filtered=is_filtered)
    reasons = (results[:, 1] >> REASON_SHIFT).tolist()
    assert reasons[:9] == [1, 0, 2, 0, 1, FINISH_ERROR, FINISH_ERROR, FINISH_ERROR, 0]
    assert (results[:, 1] & 0xFF).tolist() == [1] * 5 + [0] * 4 + [1] * 3


@pytest.mark.parametrize("is_filtered", [False, True])
def test_stop_ids_do_not_come_below_min_tokens(
    is_filtered: bool, state: Rows, generator: torch.Generator
) -> None:
    logits = _logits(generator, NUM_ROWS, 200)
    order = logits.argsort(-1, descending=True).int()
    state.stop_ids[:, :2] = order[:, :2]
    state.stop_ids[:, 2] = -2 - order[:, 2]
    state.words[::2, rs.MIN_TOTAL] = state.words[::2, rs.LENGTH] + 1
    rows = torch.arange(NUM_ROWS, dtype=torch.int32, device=logits.device)
    results = _check(logits, rows, state, is_filtered=is_filtered)
    assert results[::2, 0].tolist() == order[::2, 3].tolist()
    assert results[1::2, 0].tolist() == order[1::2, 0].tolist()


def test_padding_draws_nothing_and_changes_nothing(state: Rows, generator: torch.Generator) -> None:
    state.words[NUM_ROWS - 1] = 0
    logits = _logits(generator, 4, 64)
    rows = torch.full((4,), NUM_ROWS - 1, dtype=torch.int32, device=logits.device)
    before = state.words.clone()
    results = _run(logits, rows, state, is_filtered=False, tile=64)
    assert not results[:, 1].any()
    assert torch.equal(state.words, before)


def test_sample_rows_refuses_what_does_not_fit(state: Rows, generator: torch.Generator) -> None:
    logits = _logits(generator, 4, 64)
    rows = torch.zeros(4, dtype=torch.int32, device=logits.device)
    with pytest.raises(ValueError, match="4 samples, 3 rows"):
        _run(logits, rows[:3], state, is_filtered=False, tile=64)
    scratch = new_sample_scratch(max_num_samples=2, vocab_size=64, device=logits.device)
    with pytest.raises(ValueError, match="do not fit scratch of 2 parts"):
        sample_rows(
            logits,
            rows,
            state.words,
            state.stop_ids,
            layout=rs.LAYOUT,
            purpose=PURPOSE_TOKEN,
            is_filtered=False,
            scratch=scratch,
            results=torch.empty((4, 2), dtype=torch.int32),
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [49152, 151936])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "is_filtered"),
    [
        (0, 1.0, 0.0, False),
        (0, 1.0, 0.0, True),
        (20, 1.0, 0.0, True),
        (0, 0.9, 0.0, True),
        (50, 0.95, 0.0, True),
        (5000, 1.0, 0.0, True),
        (0, 1.0, 0.05, True),
    ],
)
def test_draws_on_the_gpu_are_those_of_the_cpu(
    dtype: torch.dtype,
    vocab_size: int,
    top_k: int,
    top_p: float,
    min_p: float,
    is_filtered: bool,
    state: Rows,
    generator: torch.Generator,
) -> None:
    temperature = torch.tensor([0.0, 0.6, 1.0] * 4, device=generator.device)
    state.set_floats(rs.TEMPERATURE, temperature)
    state.words[:, rs.TOP_K] = top_k
    state.set_floats(rs.TOP_P, top_p)
    state.set_floats(rs.MIN_P, min_p)
    logits = _logits(generator, NUM_ROWS, vocab_size).to(dtype)
    _check(logits, _all_rows(generator), state, is_filtered=is_filtered, tile=4096)
