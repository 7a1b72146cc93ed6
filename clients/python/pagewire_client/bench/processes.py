"""A run in this process, or in several that begin at the same moment.

A further process reads one JSON object per line from its standard input (what to do, when to
begin, that it shall stop) and writes one per line: that it is ready, how far it is, its outcome.
It stops when its input ends, so that it does not outlive whoever started it.

Owns: processes, the common start, the interrupt. Does not know: what is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pagewire_client.bench.calls import Access
from pagewire_client.bench.config import BenchConfig
from pagewire_client.bench.load import Load
from pagewire_client.bench.records import Outcome
from protos.tls_files import CLIENT_FLAGS, TlsFiles

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from pagewire_client.bench.progress import Progress

_REPORT_INTERVAL_S = 0.2
# From "all are ready" to the first request.
_HEAD_START_S = 0.5
# A result of a million requests is one line.
_MAX_LINE_BYTES = 1 << 30


class BenchProcessError(RuntimeError):
    """A sending process ended without a result."""


def run_bench(config: BenchConfig, access: Access, progress: Progress) -> Outcome:
    """Run it to its end, or to Ctrl-C, in as many processes as asked for.

    Raises:
        ValueError: A trace, TLS file or token is not what it should be.
        OSError: Likewise.
        BenchProcessError: A process ended without a result.
    """
    if config.processes == 1:
        return run_on_loop(_run_here(Load(config, access), progress))
    return run_on_loop(_run_elsewhere(config, access, progress))


def run_on_loop(work: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Run on a loop that spends little on messages, where one is installed."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


async def _run_here(load: Load, progress: Progress) -> Outcome:
    async def report() -> None:
        while True:
            progress.show(load.num_done, load.num_failed, load.meter.num_tokens)
            await asyncio.sleep(_REPORT_INTERVAL_S)

    with _interrupt(load.stop):
        reporter = asyncio.create_task(report())
        try:
            return await load.run()
        finally:
            reporter.cancel()


@contextlib.contextmanager
def _interrupt(stop: Callable[[], None]) -> Any:
    """Ctrl-C ends the run in order; a second one at once."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        stop()

    loop.add_signal_handler(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


class _Sender:
    """A further process, as its parent sees it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.progress = (0, 0, 0)
        self.outcome: Outcome | None = None
        self.ready = asyncio.Event()

    def say(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def listen(self) -> None:
        """Until it has ended.

        Raises:
            BenchProcessError: Without a result.
        """
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            message = json.loads(line)
            if "progress" in message:
                self.progress = tuple(message["progress"])
            elif "outcome" in message:
                self.outcome = Outcome.from_json(message["outcome"])
            else:
                self.ready.set()
        await self._process.wait()
        if self.outcome is None:
            raise BenchProcessError(
                f"a sending process ended with code {self._process.returncode} and no result; its "
                "message is above"
            )

    async def end(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


async def _run_elsewhere(config: BenchConfig, access: Access, progress: Progress) -> Outcome:
    senders = [await _start(config, access, process) for process in range(config.processes)]
    listeners = [asyncio.create_task(sender.listen()) for sender in senders]

    def stop() -> None:
        for sender in senders:
            sender.say({"stop": True})

    try:
        with _interrupt(stop):
            ready = asyncio.gather(*(sender.ready.wait() for sender in senders))
            await asyncio.wait([ready, *listeners], return_when=asyncio.FIRST_COMPLETED)
            for sender in senders:
                sender.say({"start_at_s": time.monotonic() + _HEAD_START_S})
            left = set(listeners)
            while left:
                done, left = await asyncio.wait(
                    left, timeout=_REPORT_INTERVAL_S, return_when=asyncio.FIRST_EXCEPTION
                )
                for listener in done:
                    listener.result()
                sums = [sum(column) for column in zip(*(s.progress for s in senders), strict=True)]
                progress.show(*sums)
            ready.cancel()
    finally:
        for listener in listeners:
            listener.cancel()
        for sender in senders:
            await sender.end()
    outcome = Outcome()
    for sender in senders:
        if sender.outcome is not None:
            outcome.merge(sender.outcome)
    return outcome


async def _start(config: BenchConfig, access: Access, process: int) -> _Sender:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "pagewire_client.bench"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_MAX_LINE_BYTES,
        # Ctrl-C is the parent's to pass on.
        start_new_session=True,
    )
    sender = _Sender(child)
    tls = None if access.tls is None else asdict(access.tls)
    if tls is not None:
        tls = {name: None if tls[name] is None else str(tls[name]) for name in _TLS_NAMES}
    sender.say(
        {
            "config": config.to_json(),
            "process": process,
            "server": access.server,
            "tls": tls,
            # Through the pipe: no list of processes shows it.
            "token": access.token,
        }
    )
    return sender


_TLS_NAMES = ("ca", "cert", "key")


async def serve_parent() -> Outcome:
    """A further process's whole life.

    Raises:
        ValueError: A trace, TLS file or token is not what it should be.
        OSError: Likewise.
    """
    lines = _parents_lines()
    order = await anext(lines)
    tls = order["tls"]
    access = Access(
        server=order["server"],
        tls=None if tls is None else TlsFiles(**tls, flags=CLIENT_FLAGS),
        token=order["token"],
    )
    load = Load(BenchConfig.from_json(order["config"]), access, process=order["process"])
    start: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    async def obey() -> None:
        async for line in lines:
            if "start_at_s" in line and not start.done():
                start.set_result(line["start_at_s"])
            elif "stop" in line:
                break
        # Told to stop, or nobody is left to tell.
        load.stop()
        if not start.done():
            start.set_result(time.monotonic())

    async def when_all_are_ready() -> float:
        _tell({"ready": True})
        return await start

    async def report() -> None:
        while True:
            await asyncio.sleep(_REPORT_INTERVAL_S)
            _tell({"progress": [load.num_done, load.num_failed, load.meter.num_tokens]})

    tasks = [asyncio.create_task(obey()), asyncio.create_task(report())]
    try:
        return await load.run(when_all_are_ready)
    finally:
        for task in tasks:
            task.cancel()


async def _parents_lines() -> AsyncIterator[dict[str, Any]]:
    reader = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield json.loads(line)


def _tell(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Serve the process that started this one."""
    try:
        outcome = run_on_loop(serve_parent())
    except (ValueError, OSError) as error:
        sys.stderr.write(f"pagewire bench: {error}\n")
        return 2
    _tell({"outcome": outcome.to_json()})
    return 0
