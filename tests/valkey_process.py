"""A real Valkey server for tests: on a free port, stopped, killed and started again at will."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import redis.asyncio

from demo import valkey
from demo.ports import any_free_port
from demo.processes import ManagedProcess

if TYPE_CHECKING:
    from pathlib import Path


class ValkeyProcess:
    """One server and its data directory; keeps its port over restarts."""

    def __init__(self, base_dir: Path) -> None:
        self.port = any_free_port()
        self._base_dir = base_dir
        self._process: ManagedProcess | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    async def start(self, **options: str) -> None:
        self._process = ManagedProcess(
            "valkey",
            valkey.server_command(
                port=self.port,
                data_dir=self._base_dir / "data",
                options={name.replace("_", "-"): value for name, value in options.items()},
            ),
            log_path=self._base_dir / "valkey.log",
            cwd=self._base_dir,
            env=os.environ,
        )
        await valkey.wait_until_answering(self.port)

    async def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            await self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Accept connections and answer nothing, as a host that hangs."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def admin(self, **options: object) -> redis.asyncio.Redis:
        return redis.asyncio.Redis(port=self.port, protocol=2, **options)  # type: ignore[arg-type]
