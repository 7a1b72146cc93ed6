"""A link in a process of its own: it competes with nobody's event loop for its delays.

Owns: the process and what is said to it. It prints the port that it listens on; each line it reads
is a round trip in milliseconds, which it answers with the one that it has measured over an echo.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Self

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from demo.link import Link, LinkConfig  # noqa: E402 - needs the path

_ECHOES = 20


class LinkProcess:
    """The link as its user sees it. An async context manager.

    Attributes:
        port: Where to dial instead of the target.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._process: asyncio.subprocess.Process | None = None
        self.port = 0

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, __file__, str(self._target_port)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        self.port = int(json.loads(await self._line())["port"])
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def set_round_trip(self, milliseconds: float) -> float:
        """Change it; what an echo of a byte now takes, in milliseconds."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{milliseconds}\n".encode())
        return float(json.loads(await self._line())["measured_ms"])

    async def _line(self) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        async with asyncio.timeout(60):
            return await self._process.stdout.readline()


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1):
        writer.write(data)
    writer.close()


async def _measure(config: LinkConfig) -> float:
    """Median round trip of a byte over a link like the other one, in milliseconds."""
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with Link(port, upstream=config, downstream=config) as link:
        reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
        times: list[float] = []
        for _ in range(_ECHOES):
            started_s = time.perf_counter()
            writer.write(b"x")
            await reader.read(1)
            times.append(time.perf_counter() - started_s)
        writer.close()
    server.close()
    return statistics.median(times) * 1e3


async def _serve(target_port: int) -> None:
    async with Link(target_port) as link:
        print(json.dumps({"port": link.port}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            config = LinkConfig(delay_s=float(line) / 2000)
            link.upstream = link.downstream = config
            print(json.dumps({"measured_ms": await _measure(config)}), flush=True)


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
