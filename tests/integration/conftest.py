"""What most integration tests serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from control_plane.model_catalog import CatalogModel


@pytest.fixture(scope="session")
def model(model_dir: Path) -> CatalogModel:
    """The demo model as a control plane knows it.

    Borrowed by all tests of the process: one that changes it loads its own.
    """
    # Here, because tests of a worker alone do without the control plane's packages.
    from api_harness import load_catalog_model

    return load_catalog_model(model_dir)
