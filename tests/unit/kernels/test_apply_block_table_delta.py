from __future__ import annotations

import itertools

import pytest
import torch

from kernels.apply_block_table_delta import apply_block_table_delta
from kernels.reference import apply_block_table_delta_ref

POISON = -7


def _delta(segments: list[tuple[int, int, int]], generator: torch.Generator):
    """(row, first column, number of ids) -> the op's columns, with random ids."""
    device = generator.device
    counts = [count for _, _, count in segments]

    def column(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    ids = torch.randint(
        1, 2**31 - 1, (sum(counts),), dtype=torch.int32, device=device, generator=generator
    )
    return (
        column([row for row, _, _ in segments]),
        column([first for _, first, _ in segments]),
        column([0, *itertools.accumulate(counts)]),
        ids,
    )


@pytest.mark.parametrize("apply", [apply_block_table_delta, apply_block_table_delta_ref])
def test_delta_writes_its_entries_and_nothing_else(apply, device: torch.device) -> None:
    table = torch.full((3, 5), POISON, dtype=torch.int32, device=device)

    def column(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    apply(table, column(2, 0), column(1, 4), column(0, 3, 4), column(11, 12, 13, 21))
    p = POISON
    assert table.tolist() == [[p, p, p, p, 21], [p, p, p, p, p], [p, 11, 12, 13, p]]


@pytest.mark.parametrize(
    "segments",
    [
        [],
        [(0, 0, 0)],
        [(3, 0, 1)],
        [(0, 0, 127), (1, 5, 128), (2, 7, 129)],
        [(6, 299, 1), (6, 0, 2), (0, 0, 300)],
        [(row, row, 1) for row in range(7)],
    ],
)
def test_delta_equals_its_reference_on_a_strided_table(
    segments: list[tuple[int, int, int]], device: torch.device, generator: torch.Generator
) -> None:
    memory = torch.full((7, 310), POISON, dtype=torch.int32, device=device)
    expected_memory = memory.clone()
    delta = _delta(segments, generator)
    apply_block_table_delta(memory[:, 5:305], *delta)
    apply_block_table_delta_ref(expected_memory[:, 5:305], *delta)
    # The columns outside the view are guards: the whole memory is compared.
    assert torch.equal(memory, expected_memory)
    assert (memory != POISON).sum() == sum(count for _, _, count in segments)


def test_delta_refuses_columns_of_different_length(
    device: torch.device, generator: torch.Generator
) -> None:
    table = torch.zeros(2, 4, dtype=torch.int32, device=device)
    rows, columns, offsets, ids = _delta([(0, 0, 1), (1, 0, 1)], generator)
    with pytest.raises(ValueError, match="2 rows need"):
        apply_block_table_delta(table, rows, columns[:1], offsets, ids)
    with pytest.raises(ValueError, match="not contiguous"):
        apply_block_table_delta(table.t(), rows, columns, offsets, ids)
