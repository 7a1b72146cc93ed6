"""Real child processes with a log file each: start, watch, stop, kill.

Owns: the children of this process and their order. Does not know what they are.

Starting is synchronous on purpose: between a child's birth and the moment that somebody is
responsible for it, there is no point at which a cancelled task could lose it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType
    from typing import Any

# All calls stay on this machine; where http_proxy is set, gRPC would ask the proxy even for those.
NO_GRPC_PROXY = "localhost,127.0.0.1"
_POLL_S = 0.02
_TAIL_LINES = 20
_DEATH_WAIT_S = 0.3

T = TypeVar("T")


class ProcessDiedError(RuntimeError):
    """A child ended that should be running; the message holds the end of its log."""

    def __init__(self, process: ManagedProcess) -> None:
        code = process.returncode or 0
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        super().__init__(
            f"{process.name} ended {how} after {process.age_s:.1f} s; the end of "
            f"{process.log_path}:\n{process.log_tail() or '(the log is empty)'}"
        )
        self.process = process


class Registry(Protocol):
    """Where running children are noted, so that a later run finds them if this one is killed."""

    def add(self, name: str, pid: int) -> None: ...

    def remove(self, pid: int) -> None: ...


class ManagedProcess:
    """One child process. It leads a session of its own, so a terminal's Ctrl-C reaches only us.

    Attributes:
        name: For people and for the log's file name.
        log_path: Where its stdout and stderr go; starts empty.
        is_expected_to_end: Set before a wanted end, so that it does not count as a death.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        log_path: Path,
        cwd: Path,
        env: Mapping[str, str],
    ) -> None:
        self.name = name
        self.argv = list(argv)
        self.log_path = log_path
        self.is_expected_to_end = False
        self.started_at = time.monotonic()
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("wb") as log:
            self._popen = subprocess.Popen(
                self.argv,
                cwd=cwd,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; -N if signal N ended it."""
        return self._popen.poll()

    @property
    def is_running(self) -> bool:
        return self.returncode is None

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.started_at

    def log_tail(self, lines: int = _TAIL_LINES) -> str:
        text = self.log_path.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, such as SIGSTOP; nothing happens if the process ended."""
        self._popen.send_signal(number)

    def kill(self) -> None:
        """End it with SIGKILL, as a crash would."""
        self.is_expected_to_end = True
        self._popen.kill()

    async def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the end and give the return code.

        Raises:
            TimeoutError: it still runs after `timeout_s`.
        """
        async with asyncio.timeout(timeout_s):
            while True:
                code = self.returncode
                if code is not None:
                    return code
                await asyncio.sleep(_POLL_S)

    async def stop(self, grace_s: float = 10.0, number: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to end and kill it after `grace_s`; gives the return code."""
        self.is_expected_to_end = True
        self._popen.send_signal(number)
        try:
            return await self.wait(grace_s)
        except TimeoutError:
            self._popen.kill()
            return await self.wait()
        except BaseException:
            # Whoever interrupts this wants out now, but not with the child left behind.
            self._popen.kill()
            self._popen.wait()
            raise


class ProcessGroup:
    """Children that start one after the other and stop in the opposite order.

    Use as an async context manager: whatever ends the block, no child outlives it.
    """

    def __init__(
        self,
        *,
        log_dir: Path,
        cwd: Path,
        env: Mapping[str, str],
        registry: Registry | None = None,
        grace_s: float = 10.0,
    ) -> None:
        self._log_dir = log_dir
        self._cwd = cwd
        self._env = dict(env)
        self._registry = registry
        self._grace_s = grace_s
        self.processes: list[ManagedProcess] = []

    def start(
        self, name: str, argv: Sequence[str], *, env: Mapping[str, str] | None = None
    ) -> ManagedProcess:
        process = ManagedProcess(
            name,
            argv,
            log_path=self._log_dir / f"{name}.log",
            cwd=self._cwd,
            env={**self._env, **(env or {})},
        )
        self.processes.append(process)
        if self._registry is not None:
            self._registry.add(name, process.pid)
        return process

    async def stop(self, process: ManagedProcess, number: signal.Signals = signal.SIGTERM) -> int:
        """Stop one child before the others; gives its return code."""
        code = await process.stop(self._grace_s, number)
        self._forget(process)
        return code

    async def run(
        self, name: str, argv: Sequence[str], *, env: Mapping[str, str] | None = None
    ) -> None:
        """Start a child and wait until it has done its work.

        Raises:
            ProcessDiedError: it ended with another code than 0.
        """
        process = self.start(name, argv, env=env)
        process.is_expected_to_end = True
        try:
            code = await process.wait()
        except asyncio.CancelledError:
            await self.stop(process)
            raise
        if code != 0:
            raise ProcessDiedError(process)
        self._forget(process)

    def check(self) -> None:
        """Raise if a child ended that should be running.

        Raises:
            ProcessDiedError: with the end of its log.
        """
        for process in self.processes:
            if not process.is_expected_to_end and not process.is_running:
                raise ProcessDiedError(process)

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` while all children live.

        Raises:
            ProcessDiedError: a child ended first; `work` is cancelled.
        """
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                self.check()
                await asyncio.wait([task], timeout=0.1)
            if not task.cancelled() and task.exception() is not None:
                # A child's death breaks the work before it can be seen: name the cause.
                await asyncio.sleep(_DEATH_WAIT_S)
                self.check()
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def aclose(self) -> None:
        """Stop every child, the last one first."""
        try:
            for process in reversed(list(self.processes)):
                await self.stop(process)
        finally:
            for process in list(self.processes):
                process.kill()
                self._forget(process)

    def _forget(self, process: ManagedProcess) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process._popen.wait(timeout=5)  # pyright: ignore[reportPrivateUsage]
        self.processes.remove(process)
        if self._registry is not None:
            self._registry.remove(process.pid)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


def child_environment(root: Path, base: Mapping[str, str]) -> dict[str, str]:
    """Give the environment in which `python -m control_plane` and its like run from anywhere."""
    paths = [str(root), str(root / "clients" / "python")]
    if base.get("PYTHONPATH"):
        paths.append(base["PYTHONPATH"])
    return {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "no_grpc_proxy": NO_GRPC_PROXY,
        **base,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
    }
