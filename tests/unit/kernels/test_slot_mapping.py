from __future__ import annotations

import pytest
import torch

from kernels.reference import slot_mapping_ref
from kernels.slot_mapping import slot_mapping

POISON = -7


def _batch(lengths: list[int], starts: list[int], device: torch.device):
    query_start_loc = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    positions = [torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]
    return query_start_loc.int().to(device), torch.cat(positions).to(device)


def _table(num_rows: int, num_columns: int, generator: torch.Generator) -> torch.Tensor:
    device = generator.device
    return torch.randint(
        1,
        2**31 // 64,
        (num_rows, num_columns),
        dtype=torch.int32,
        device=device,
        generator=generator,
    )


def test_slot_mapping_follows_the_table_of_each_row(device: torch.device) -> None:
    table = torch.tensor([[9, 8, 7], [3, 4, 5]], dtype=torch.int32, device=device)
    rows = torch.tensor([1, 0], dtype=torch.int32, device=device)
    query_start_loc, positions = _batch([3, 1], [3, 0], device)
    out = torch.full((4,), POISON, dtype=torch.int64, device=device)
    slot_mapping(table, rows, query_start_loc, positions, block_size=4, out=out)
    assert out.tolist() == [3 * 4 + 3, 4 * 4 + 0, 4 * 4 + 1, 9 * 4 + 0]


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize(
    ("lengths", "starts"),
    [
        ([1], [0]),
        ([0], [5]),
        ([15, 16, 17], [0, 0, 0]),
        ([63, 64, 65], [1, 15, 16]),
        ([1, 1, 1, 1], [14, 15, 16, 17]),
        ([300, 1, 0, 129], [3, 63, 64, 65]),
    ],
)
def test_slot_mapping_equals_its_reference(
    block_size: int,
    lengths: list[int],
    starts: list[int],
    device: torch.device,
    generator: torch.Generator,
) -> None:
    table = _table(8, 32, generator)[:, :30]  # strided rows
    rows = torch.randperm(8, device=device, generator=generator)[: len(lengths)].int()
    query_start_loc, positions = _batch(lengths, starts, device)
    guarded = torch.full((positions.numel() + 6,), POISON, dtype=torch.int64, device=device)
    out = guarded[3:-3]
    expected = torch.empty_like(out)
    slot_mapping(table, rows, query_start_loc, positions, block_size=block_size, out=out)
    slot_mapping_ref(table, rows, query_start_loc, positions, block_size=block_size, out=expected)
    assert torch.equal(out, expected)
    assert (guarded[:3] == POISON).all()
    assert (guarded[-3:] == POISON).all()


@pytest.mark.parametrize("compute", [slot_mapping, slot_mapping_ref])
def test_slot_mapping_masks_padded_rows_and_the_padding_behind_the_last_token(
    compute, device: torch.device, generator: torch.Generator
) -> None:
    table = _table(4, 8, generator)
    rows = torch.tensor([2, -1, 0, -1], dtype=torch.int32, device=device)
    query_start_loc, positions = _batch([1, 1, 2, 1], [5, 0, 7, 0], device)
    positions = torch.cat([positions, torch.full((200,), 10**9, device=device)])
    out = torch.full((positions.numel(),), POISON, dtype=torch.int64, device=device)
    compute(table, rows, query_start_loc, positions, block_size=16, out=out)
    assert [slot >= 0 for slot in out[:5].tolist()] == [True, False, True, True, False]
    assert set(out[[1, 4]].tolist()) == {-1}
    assert (out[5:] == -1).all()


def test_slot_mapping_is_64_bit(device: torch.device) -> None:
    table = torch.tensor([[2**31 - 1]], dtype=torch.int32, device=device)
    rows = torch.zeros(1, dtype=torch.int32, device=device)
    query_start_loc, positions = _batch([1], [63], device)
    out = torch.zeros(1, dtype=torch.int64, device=device)
    slot_mapping(table, rows, query_start_loc, positions, block_size=64, out=out)
    assert out.item() == (2**31 - 1) * 64 + 63


def test_slot_mapping_refuses_shapes_that_do_not_match(device: torch.device) -> None:
    table = torch.ones(2, 4, dtype=torch.int32, device=device)
    rows = torch.zeros(2, dtype=torch.int32, device=device)
    query_start_loc, positions = _batch([2], [0], device)
    out = torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="expected 3"):
        slot_mapping(table, rows, query_start_loc, positions, block_size=16, out=out)
    with pytest.raises(ValueError, match="out has 9"):
        slot_mapping(
            table, rows[:1], query_start_loc, positions, block_size=16, out=out.new_zeros(9)
        )
    with pytest.raises(ValueError, match="not contiguous"):
        slot_mapping(table.t(), rows[:1], query_start_loc, positions, block_size=16, out=out)
