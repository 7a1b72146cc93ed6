"""Our forward pass against transformers' own, on tiny random models of each architecture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from paged import PagedModel, scattered_tables
from tiny_models import VARIANTS, make_model, prompts, reference_logits

from data_plane.models.loader import load_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_for_any_chunking(
    variant: str, block_size: int, tmp_path: Path
) -> None:
    reference = make_model(variant, tmp_path)
    paged = PagedModel(load_model(tmp_path), block_size=block_size)
    sequences = prompts(70, 33, 16)
    tables = scattered_tables(3, -(-70 // block_size), 64)
    # Chunks around block boundaries, single tokens, and rows that sit a step out.
    schedule = [(40, 1, 0), (1, 31, 15), (22, 1, 1), (1, 0, 0), (6, 0, 0)]
    computed = [0, 0, 0]
    got: list[list[torch.Tensor]] = [[], [], []]
    for counts in schedule:
        active = [index for index, count in enumerate(counts) if count]
        new = [sequences[i][computed[i] : computed[i] + counts[i]] for i in active]
        logits = paged.step(new, [computed[i] for i in active], tables[active])
        for index, rows in zip(active, logits, strict=True):
            got[index].append(rows)
            computed[index] += counts[index]
    assert computed == [70, 33, 16]
    for sequence, rows in zip(sequences, got, strict=True):
        torch.testing.assert_close(
            torch.cat(rows), reference_logits(reference, sequence), atol=2e-4, rtol=2e-4
        )


@pytest.mark.parametrize("variant", ["llama-3-rope", "qwen3"])
def test_greedy_tokens_are_the_same_alone_and_in_a_batch(variant: str, tmp_path: Path) -> None:
    make_model(variant, tmp_path)
    loaded = load_model(tmp_path)
    inputs = prompts(5, 40, 17, 1)
    together = PagedModel(loaded, block_size=16).generate(inputs, 12)
    alone = [PagedModel(loaded, block_size=32).generate([ids], 12)[0] for ids in inputs]
    assert together == alone


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_as_close_to_fp32_as_transformers(dtype: str, tmp_path: Path) -> None:
    reference = make_model("llama-3-rope", tmp_path)
    (sequence,) = prompts(40)
    exact = reference_logits(reference, sequence)
    paged = PagedModel(load_model(tmp_path, dtype=dtype), block_size=16)
    (actual,) = paged.step([sequence], [0], scattered_tables(1, 3, 64))
    same_dtype = reference_logits(reference.to(getattr(torch, dtype)), sequence)
    allowed = 2 * (same_dtype - exact).abs().max() + 1e-3
    assert (actual - exact).abs().max() <= allowed


def test_logits_are_computed_for_the_rows_asked_for_only(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    paged = PagedModel(load_model(tmp_path), block_size=16)
    tables = scattered_tables(2, 3, 64)
    every = paged.step(prompts(20, 30), [0, 0], tables)
    last = paged.step(prompts(20, 30), [0, 0], tables, last_only=True)
    for all_rows, row in zip(every, last, strict=True):
        assert row.shape == (1, 101)
        torch.testing.assert_close(row[0], all_rows[-1])
