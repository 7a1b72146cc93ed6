"""Fixtures that several kinds of test share. Markers are declared in pyproject.toml."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

# Before any test imports transformers or torch: no test may reach a model hub, and two test
# processes with a full thread pool each would only fight over the cores.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")


def _has_gpu() -> bool:
    """Asks the driver; torch is not imported for tests that do without it."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
    except OSError:
        return False


# Triton decides when it is imported, its own library included, whether kernels are interpreted, and
# transformers may import it before any test of a kernel does.
if not _has_gpu():
    os.environ["TRITON_INTERPRET"] = "1"

REPO_ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The demo model (SmolLM2-135M-Instruct, fp32), converted on first use and kept."""
    from demo.model import ensure_demo_model

    return ensure_demo_model(REPO_ROOT / ".pagewire" / "models", progress=print)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what starts whole systems in one test process; GPU tests skip where no GPU is.

    `make test-gpu` fails without a GPU instead of skipping.
    """
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            # One system at a time: two of them on two cores run into each other's time limits.
            if "e2e" in item.path.parts:
                item.add_marker(pytest.mark.xdist_group("e2e"))
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device: make test-gpu"))
