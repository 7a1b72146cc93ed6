"""A TCP link of chosen length between two processes of one machine.

Owns: delay, jitter and bandwidth of each direction, and cutting the link or silencing one or both
of its directions. Does not know what travels.

Bytes are delayed, not held up: what is written while earlier bytes are on their way follows them at
once, as on a real line. Only `bandwidth` slows a stream down.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

_CHUNK_BYTES = 64 * 1024
# More than this on its way stops the sender, as a full window would.
_MAX_IN_FLIGHT_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """One direction of a link.

    Attributes:
        delay_s: Travel time of every byte.
        jitter_s: Up to this much more, drawn per chunk; never changes the order.
        bandwidth: Bytes per second; None: unlimited.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    bandwidth: float | None = None

    def __post_init__(self) -> None:
        if self.delay_s < 0 or self.jitter_s < 0:
            raise ValueError(f"delay and jitter must not be negative, got {self}")
        if self.bandwidth is not None and self.bandwidth <= 0:
            raise ValueError(f"bandwidth must be positive or None, got {self.bandwidth}")


class _Direction:
    """Carries bytes from one socket to another, each chunk at its time."""

    def __init__(self, link: Link, *, towards_target: bool) -> None:
        self._link = link
        self._towards_target = towards_target
        self._chunks: deque[tuple[float, bytes]] = deque()
        self._changed = asyncio.Condition()
        self._line_free_at = 0.0
        self._last_due = 0.0
        self.in_flight_bytes = 0

    def _due(self, num_bytes: int) -> float:
        config = self._link.upstream if self._towards_target else self._link.downstream
        now = asyncio.get_running_loop().time()
        sent = max(now, self._line_free_at)
        if config.bandwidth is not None:
            sent += num_bytes / config.bandwidth
        self._line_free_at = sent
        jitter = self._link.random.uniform(0, config.jitter_s) if config.jitter_s else 0.0
        # Never before what was sent earlier, even if the delay has become shorter meanwhile.
        self._last_due = max(self._last_due, sent + config.delay_s + jitter)
        return self._last_due

    async def take_in(self, reader: asyncio.StreamReader) -> None:
        while True:
            data = await reader.read(_CHUNK_BYTES)
            async with self._changed:
                while self.in_flight_bytes > _MAX_IN_FLIGHT_BYTES:
                    await self._changed.wait()
                self._chunks.append((self._due(len(data)), data))
                self.in_flight_bytes += len(data)
                self._changed.notify_all()
            if not data:
                return

    async def hand_out(self, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while True:
            async with self._changed:
                while not self._chunks:
                    await self._changed.wait()
                due, data = self._chunks[0]
            if (wait_s := due - loop.time()) > 0:
                await asyncio.sleep(wait_s)
            await self._link.wait_until_thawed(towards_target=self._towards_target)
            if data:
                writer.write(data)
                await writer.drain()
            elif writer.can_write_eof():
                writer.write_eof()
            async with self._changed:
                self._chunks.popleft()
                self.in_flight_bytes -= len(data)
                self._changed.notify_all()
            if not data:
                return


class Link:
    """Listens on a port of its own and carries every connection to the target. A context manager.

    Attributes:
        upstream: From whoever connects to the target; may be replaced at any time.
        downstream: From the target back.
        random: Source of the jitter.
    """

    def __init__(
        self,
        target_port: int,
        *,
        target_host: str = "127.0.0.1",
        upstream: LinkConfig | None = None,
        downstream: LinkConfig | None = None,
        seed: int = 0,
    ) -> None:
        self.upstream = upstream or LinkConfig()
        self.downstream = downstream or LinkConfig()
        self.random = random.Random(seed)
        self._target = (target_host, target_port)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._directions: set[_Direction] = set()
        self._upstream_thawed, self._downstream_thawed = asyncio.Event(), asyncio.Event()
        self._is_up = True
        self.thaw()

    @property
    def port(self) -> int:
        if self._server is None:
            raise RuntimeError("the link is not open")
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def in_flight_bytes(self) -> int:
        """Bytes on their way now, both directions."""
        return sum(direction.in_flight_bytes for direction in self._directions)

    def set_round_trip(self, round_trip_s: float) -> None:
        """Make both directions half of that long; bytes on their way keep their time."""
        self.upstream = self.downstream = LinkConfig(delay_s=round_trip_s / 2)

    def freeze(self, *, upstream: bool = True, downstream: bool = True) -> None:
        """Deliver nothing any more, as a cut that neither side is told about.

        Args:
            upstream: Silence this direction; otherwise it stays as it is.
            downstream: Likewise.
        """
        if upstream:
            self._upstream_thawed.clear()
        if downstream:
            self._downstream_thawed.clear()

    def thaw(self) -> None:
        self._upstream_thawed.set()
        self._downstream_thawed.set()

    async def cut(self, *, refuse_new: bool = False) -> None:
        """End all connections at once.

        Args:
            refuse_new: End new ones too, until `mend`; otherwise they are still taken.
        """
        self._is_up = not refuse_new
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def mend(self) -> None:
        """Take new connections again."""
        self._is_up = True

    async def wait_until_thawed(self, *, towards_target: bool) -> None:
        await (self._upstream_thawed if towards_target else self._downstream_thawed).wait()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._server is not None:
            self._server.close()
            # A connection that was on its way in may still be handed over.
            await self.cut(refuse_new=True)
            self._server = None

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._is_up:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._carry(reader, writer))
        self._connections.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._connections.discard(task)
            # A task that is cancelled before it has begun closes nothing.
            writer.transport.abort()

        task.add_done_callback(ended)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        there, back = _Direction(self, towards_target=True), _Direction(self, towards_target=False)
        self._directions |= {there, back}
        is_whole = False
        try:
            target_reader, target_writer = await asyncio.open_connection(*self._target)
            writers.append(target_writer)
            # The first failure of a direction ends the connection as a whole.
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(there.take_in(reader))
                tasks.create_task(there.hand_out(target_writer))
                tasks.create_task(back.take_in(target_reader))
                tasks.create_task(back.hand_out(writer))
            is_whole = True
        except* OSError:
            pass
        finally:
            self._directions -= {there, back}
            for each in writers:
                if not is_whole:
                    # A cut line delivers nothing more, not even what a buffer still holds.
                    each.transport.abort()
                each.close()
                with contextlib.suppress(OSError):
                    await each.wait_closed()
