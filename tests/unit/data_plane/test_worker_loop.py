"""Which event loop a worker process runs on."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import pytest

from data_plane.__main__ import run_on_loop

if TYPE_CHECKING:
    import types


async def _kind() -> str:
    return type(asyncio.get_running_loop()).__module__.partition(".")[0]


@pytest.mark.parametrize("expected", ["uvloop", "asyncio"])
def test_a_worker_uses_uvloop_where_it_is_installed(
    expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if expected == "asyncio":
        missing: types.ModuleType | None = None
        monkeypatch.setitem(sys.modules, "uvloop", missing)
    else:
        pytest.importorskip("uvloop")
    assert run_on_loop(_kind()) == expected
