"""Inputs of a step from device state: against the plain loop, with poisoned outputs."""

from __future__ import annotations

import pytest
import torch

from kernels.row_layout import RowLayout
from kernels.step_reference import prepare_step_ref

BLOCK_SIZE, NUM_ROWS, MAX_BLOCKS = 4, 6, 300
LAST_TOKEN, LENGTH, ACTIVE = 0, 1, 2
LAYOUT = RowLayout(LAST_TOKEN, LENGTH, ACTIVE, *range(3, 11))


def _case(
    device: torch.device,
    requests: list[tuple[int, int, int]],  # row, start or -1, tokens
    num_padded_tokens: int,
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    state = torch.randint(0, 1000, (NUM_ROWS + 1, 5), dtype=torch.int32, generator=generator)
    state[:, LENGTH] = torch.tensor([17, 3, 30, 0, 64, 1, 0])
    # Row 2 has stopped, without a token; row 6 is padding.
    state[2, LAST_TOKEN] = -1
    state[:, ACTIVE] = torch.tensor([1, 1, 0, 1, 1, 1, 0])
    table = torch.randint(
        1, 1 << 20, (NUM_ROWS + 1, MAX_BLOCKS), dtype=torch.int32, generator=generator
    )
    counts = torch.tensor([count for _, _, count in requests])
    known = torch.randint(0, 1000, (num_padded_tokens,), dtype=torch.int32, generator=generator)
    starts = torch.tensor([start for _, start, _ in requests], dtype=torch.int32)
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    for req, start in enumerate(starts.tolist()):
        if start < 0:
            known[int(offsets[req])] = -1
    num_reqs = len(requests)
    tensors = {
        "state": state,
        "block_table": table,
        "rows": torch.tensor([row for row, _, _ in requests], dtype=torch.int32),
        "starts": starts,
        "query_start_loc": offsets,
        "known_tokens": known,
        "token_ids": torch.full((num_padded_tokens,), -77),
        "positions": torch.full((num_padded_tokens,), -77),
        "slot_mapping": torch.full((num_padded_tokens,), -77),
        "seq_lens": torch.full((num_reqs,), -77, dtype=torch.int32),
    }
    return {name: tensor.to(device) for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("requests", "num_padded_tokens"),
    [
        ([(0, -1, 1), (2, -1, 1), (4, -1, 1), (6, -1, 1)], 4),
        ([(1, 3, 7), (2, -1, 1), (3, 0, 5), (4, -1, 1), (5, 6, 0), (6, 0, 0)], 32),
        ([(3, 0, 1100)], 1104),
        ([(6, 0, 0), (6, 0, 0)], 16),
    ],
    ids=["decode", "mixed", "long", "padding"],
)
def test_prepare_step_equals_reference(
    requests: list[tuple[int, int, int]], num_padded_tokens: int, device: torch.device
) -> None:
    from kernels.prepare_step import prepare_step

    options = {
        "layout": LAYOUT,
        "block_size": BLOCK_SIZE,
    }
    actual = _case(device, requests, num_padded_tokens)
    expected = _case(torch.device("cpu"), requests, num_padded_tokens)
    prepare_step(**actual, **options)  # pyright: ignore
    prepare_step_ref(**expected, **options)  # pyright: ignore
    for name, tensor in expected.items():
        assert torch.equal(actual[name].cpu(), tensor), name
    assert (actual["token_ids"] >= 0).all()


def test_prepare_step_refuses_shapes_that_do_not_match(device: torch.device) -> None:
    from kernels.prepare_step import prepare_step

    case = _case(device, [(0, -1, 1), (1, -1, 1)], 2)
    case["starts"] = case["starts"][:1]
    with pytest.raises(ValueError, match="2 rows need as many starts"):
        prepare_step(**case, layout=LAYOUT, block_size=BLOCK_SIZE)
