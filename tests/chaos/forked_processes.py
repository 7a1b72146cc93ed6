"""Children that a zygote forks, for whoever expects a `ProcessGroup`.

Owns: the conversation with the zygotes. Does not know what the children are for.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, cast

from demo.processes import ManagedProcess, ProcessGroup

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from demo.processes import Registry

_POLL_S = 0.01


class Zygote:
    """One zygote process, started and preloaded when it is made."""

    def __init__(self, module: str, model_dir: Path, *, cwd: Path, env: Mapping[str, str]) -> None:
        paths = [env.get("PYTHONPATH", ""), str(cwd / "tests")]
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "chaos.zygote", module, str(model_dir)],
            cwd=cwd,
            env={**env, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._pending = b""
        self._codes: dict[int, int] = {}

    def fork(self, argv: Sequence[str], log_path: Path) -> int:
        """Start a child; gives its pid.

        Raises:
            RuntimeError: The zygote is gone.
        """
        stdin = self._popen.stdin
        assert stdin is not None
        request = json.dumps({"argv": list(argv), "log": str(log_path)})
        stdin.write(request.encode() + b"\n")
        stdin.flush()
        while True:
            for message in self._read(is_waiting=True):
                if "pid" in message:
                    return message["pid"]

    def code_of(self, pid: int) -> int | None:
        """The exit code of a child; None while it runs."""
        for _ in self._read(is_waiting=False):
            pass
        return self._codes.get(pid)

    def _read(self, *, is_waiting: bool) -> list[dict[str, int]]:
        stdout = self._popen.stdout
        assert stdout is not None
        os.set_blocking(stdout.fileno(), is_waiting)
        messages: list[dict[str, int]] = []
        while True:
            try:
                data = os.read(stdout.fileno(), 65536)
            except BlockingIOError:
                return messages
            if not data:
                raise RuntimeError(f"the zygote ended with code {self._popen.wait()}")
            *lines, self._pending = (self._pending + data).split(b"\n")
            for line in lines:
                message: dict[str, int] = json.loads(line)
                if "ended" in message:
                    self._codes[message["ended"]] = message["code"]
                messages.append(message)
            if is_waiting:
                return messages

    def close(self) -> None:
        """End it, and with it whatever it has forked."""
        stdin, stdout = self._popen.stdin, self._popen.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.close()
        self._popen.wait()
        stdout.close()


class _Child:
    """As much of a Popen as a `ManagedProcess` uses."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self.pid = pid
        self._zygote = zygote

    def poll(self) -> int | None:
        return self._zygote.code_of(self.pid)

    def send_signal(self, number: int) -> None:
        # The zygote has reaped it by then, but its pid is not anybody else's so soon.
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        ends_at = float("inf") if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > ends_at:
                raise subprocess.TimeoutExpired([], timeout or 0.0)
            time.sleep(_POLL_S)
        return code


class ForkedProcess(ManagedProcess):
    """A child of a zygote."""

    def __init__(self, name: str, argv: Sequence[str], *, zygote: Zygote, log_path: Path) -> None:
        self.name = name
        self.argv = list(argv)
        self.log_path = log_path
        self.is_expected_to_end = False
        self.started_at = time.monotonic()
        log_path.parent.mkdir(parents=True, exist_ok=True)
        # Not yet opened by the child when somebody first looks for it.
        log_path.touch()
        child: Any = _Child(zygote, zygote.fork(argv[2:], log_path))
        self._popen = cast("subprocess.Popen[bytes]", child)


class ForkingGroup(ProcessGroup):
    """A group whose `python -m MODULE` are forked where a zygote is there for the module.

    Attributes:
        zygotes: By module; others are started as usual.
        forks: Whether that is wanted.
    """

    def __init__(
        self,
        zygotes: Mapping[str, Zygote],
        *,
        log_dir: Path,
        cwd: Path,
        env: Mapping[str, str],
        registry: Registry | None = None,
        grace_s: float = 10.0,
    ) -> None:
        super().__init__(log_dir=log_dir, cwd=cwd, env=env, registry=registry, grace_s=grace_s)
        self.zygotes = dict(zygotes)
        self.forks = True

    def start(
        self, name: str, argv: Sequence[str], *, env: Mapping[str, str] | None = None
    ) -> ManagedProcess:
        zygote = self.zygotes.get(argv[2]) if argv[1:2] == ["-m"] else None
        if zygote is None or not self.forks or env:
            return super().start(name, argv, env=env)
        process = ForkedProcess(name, argv, zygote=zygote, log_path=self._log_dir / f"{name}.log")
        self.processes.append(process)
        if self._registry is not None:
            self._registry.add(name, process.pid)
        return process
