"""One demo at a time per checkout, and nothing left of one that was killed.

Owns: `.pagewire/run/`, a lock and the list of running children. A child is known by its pid *and*
its start time: a pid alone may long belong to somebody else.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_TERM_WAIT_S = 10.0
_KILL_WAIT_S = 5.0


class AlreadyRunningError(RuntimeError):
    """Another demo holds this checkout."""


def start_time_of(pid: int) -> str | None:
    """Give what tells this process from any other that ever had its pid; None if it is gone.

    On Linux the boot's id and the clock ticks since that boot, which no change of the wall clock
    touches.
    """
    if sys.platform == "linux":
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
            boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        except OSError:
            return None
        # The command in parentheses may hold anything; state is the 1st field after it, start
        # time the 20th.
        fields = stat.rpartition(")")[2].split()
        return None if fields[0] in ("Z", "X") else f"{boot_id}:{fields[19]}"
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else repr(process.create_time())
    except psutil.Error:
        return None


class RunDirectory:
    """The lock of a checkout and the children that run under it. A context manager."""

    def __init__(self, path: Path, *, command: str) -> None:
        self._path = path
        self._command = command
        self._lock_fd: int | None = None
        self._children: list[dict[str, Any]] = []

    @property
    def _state_path(self) -> Path:
        return self._path / "processes.json"

    def __enter__(self) -> Self:
        """Take the lock.

        Raises:
            AlreadyRunningError: somebody holds it; the message says who.
        """
        self._path.mkdir(parents=True, exist_ok=True)
        # Never inherited by children: the lock ends with this process, however it ends.
        fd = os.open(self._path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(fd, 200).decode(errors="replace").strip() or "an unknown process"
            os.close(fd)
            raise AlreadyRunningError(
                f"another demo is running in this checkout: {holder}. Stop that one first (Ctrl-C "
                f"in its terminal), or use a second checkout."
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{self._command}, pid {os.getpid()}".encode(), 0)
        self._lock_fd = fd
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._lock_fd is not None:
            os.ftruncate(self._lock_fd, 0)
            os.close(self._lock_fd)
            self._lock_fd = None

    def add(self, name: str, pid: int) -> None:
        self._children.append({"name": name, "pid": pid, "start_time": start_time_of(pid)})
        self._write()

    def remove(self, pid: int) -> None:
        self._children = [child for child in self._children if child["pid"] != pid]
        self._write()

    def end_leftovers(self, report: Callable[[str], None]) -> int:
        """End what an earlier run left behind, the youngest first; gives how many there were."""
        ended = 0
        for child in reversed(self._read()):
            name, pid, start_time = child.get("name"), child.get("pid"), child.get("start_time")
            if not isinstance(pid, int) or pid <= 1 or not isinstance(start_time, str):
                continue
            if end_process(pid, start_time):
                report(f"ended {name} (pid {pid}), left behind by an earlier run")
                ended += 1
        self._write()
        return ended

    def _read(self) -> list[dict[str, Any]]:
        try:
            state: object = json.loads(self._state_path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return []
        if not isinstance(state, list):
            return []
        children = cast("list[object]", state)
        return [cast("dict[str, Any]", child) for child in children if isinstance(child, dict)]

    def _write(self) -> None:
        if not self._children:
            self._state_path.unlink(missing_ok=True)
            return
        # Replaced whole: a crash leaves the old list or the new one, never half of one.
        part = self._state_path.with_suffix(".part")
        part.write_text(json.dumps(self._children, indent=1), encoding="utf-8")
        part.replace(self._state_path)


def end_process(pid: int, start_time: str) -> bool:
    """End exactly that process: SIGTERM, then SIGKILL; gives whether it was there."""
    try:
        # A handle first, then the comparison: what the handle means can no longer change.
        fd = os.pidfd_open(pid)
    except AttributeError:
        return _end_without_pidfd(pid, start_time)
    except OSError:
        return False
    try:
        if start_time_of(pid) != start_time:
            return False
        for number, wait_s in ((signal.SIGTERM, _TERM_WAIT_S), (signal.SIGKILL, _KILL_WAIT_S)):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, number)
            if select.select([fd], [], [], wait_s)[0]:
                break
        return True
    finally:
        os.close(fd)


def _end_without_pidfd(pid: int, start_time: str) -> bool:
    if start_time_of(pid) != start_time:
        return False
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        process.terminate()
        try:
            process.wait(_TERM_WAIT_S)
        except psutil.TimeoutExpired:
            process.kill()
            process.wait(_KILL_WAIT_S)
    return True
