"""Kernels run for real where a GPU is, in Triton's interpreter elsewhere (tests/conftest.py)."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """Where the kernels of this process run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(0)
