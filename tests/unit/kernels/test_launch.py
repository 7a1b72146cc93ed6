"""What a GPU gets is what it can do: nobody has all of them to try."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from kernels import launch, linear

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def fresh() -> Iterator[None]:
    for cached in (launch._has_dependent_launch, launch.shared_memory):
        cached.cache_clear()
    yield
    for cached in (launch._has_dependent_launch, launch.shared_memory):
        cached.cache_clear()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("capability", "is_dependent"),
    [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True)],
)
def test_only_gpus_with_dependent_launch_are_asked_for_it(
    capability: tuple[int, int], is_dependent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    options = launch.pdl_options(torch.device("cuda"))
    assert options["PDL"] is is_dependent
    # Triton takes the option itself as a wish for it.
    assert options.get("launch_pdl", False) is is_dependent


def test_nothing_is_asked_of_the_cpu() -> None:
    assert launch.pdl_options(torch.device("cpu")) == {"PDL": False}


@pytest.mark.parametrize("limit_kib", [99, 163, 227])
def test_a_product_takes_no_more_shared_memory_than_there_is(
    limit_kib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "shared_memory", lambda _: limit_kib << 10)
    taken: list[int] = []
    for out_features, in_features in ((1024, 2048), (4096, 4096), (6144, 1024), (28672, 4096)):
        weight = torch.empty(out_features, in_features, dtype=torch.bfloat16, device="meta")
        for num_rows in (1, 5, 16, 17, 32, 64, 128):
            x = torch.empty(num_rows, in_features, dtype=torch.bfloat16, device="meta")
            for gated in (False, True):
                cut = linear._cut_for(x, weight, gated=gated)
                if cut is not None:
                    taken.append(cut.stage_bytes(num_rows))
    assert max(taken) <= limit_kib << 10
    assert taken
