"""Choosing a backend: by name, by capability, and the messages when none fits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from data_plane.attention import base
from data_plane.attention.base import AttentionSpec, BackendError, BackendInfo, select_backend


def make_spec(**changes: Any) -> AttentionSpec:
    values: dict[str, Any] = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 64,
        "scale": 0.125,
        "dtype": torch.float32,
        "block_size": 16,
        "device": torch.device("cpu"),
    }
    return AttentionSpec(**{**values, **changes})


def test_the_preferred_backend_that_fits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = BackendInfo(
        name="narrow",
        module="not_there",
        device_types=("cpu",),
        dtypes=(torch.float32,),
        head_sizes=(128,),
        block_sizes=(64,),
    )
    monkeypatch.setattr(base, "_BACKENDS", (narrow, *base.backend_infos()))
    assert select_backend(make_spec()).name == "torch"
    with pytest.raises(BackendError, match="narrow: head_size 64 is not one of 128"):
        select_backend(make_spec(), "narrow")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": torch.device("cuda")}, "device 'cuda' is not one of cpu"),
        ({"dtype": torch.float16}, r"dtype torch\.float16 is not one of torch\.float32"),
        ({"head_size": 96}, "head_size 96 is not one of 64"),
        ({"block_size": 8}, "block_size 8 is not one of 16, 32"),
        ({"sliding_window": 100}, "no sliding window .the model has one of 100 tokens"),
    ],
)
def test_every_refusal_says_what_is_wrong(
    changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = BackendInfo(
        name="small",
        module="not_there",
        device_types=("cpu",),
        dtypes=(torch.float32,),
        head_sizes=(64,),
        block_sizes=(16, 32),
    )
    assert info.refusal(make_spec()) is None
    monkeypatch.setattr(base, "_BACKENDS", (info,))
    with pytest.raises(BackendError, match=f"no attention backend can serve .*small: {reason}"):
        select_backend(make_spec(**changes))


def test_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BackendError, match="unknown attention backend 'magic'; known: auto, "):
        select_backend(make_spec(), "magic")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, "multiple of num_kv_heads, got 5 and 2"),
        ({"block_size": 24}, "block_size must be a power of two, got 24"),
    ],
)
def test_impossible_spec_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_spec(**changes)
