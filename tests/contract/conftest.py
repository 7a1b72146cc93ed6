"""A real Valkey server for the contract tests that need one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from valkey_process import ValkeyProcess


@pytest.fixture
async def valkey(tmp_path: Path) -> AsyncIterator[ValkeyProcess]:
    # Here, because a worker's packages, which attention backends are tested with, have no client.
    from valkey_process import ValkeyProcess

    server = ValkeyProcess(tmp_path)
    await server.start()
    yield server
    await server.kill()
