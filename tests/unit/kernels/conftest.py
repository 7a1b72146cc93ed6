"""Kernels run for real where a GPU is, and in Triton's interpreter elsewhere.

Triton decides when a kernel is decorated, that is when its module is imported, and asks once more
when it first launches. So the variable is set around the imports below and around each test of this
folder, and nowhere else: whatever else runs in this process never sees it. A module that another
test imported before is loaded again.
"""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

KERNEL_MODULES = (
    "kernels.apply_block_table_delta",
    "kernels.reshape_and_cache",
    "kernels.slot_mapping",
)


def _load_interpreted(name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        if name in sys.modules:
            importlib.reload(sys.modules[name])
        else:
            importlib.import_module(name)


if not torch.cuda.is_available():
    for module_name in KERNEL_MODULES:
        _load_interpreted(module_name)


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def device() -> torch.device:
    """Where the kernels of this process run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(0)
