"""A process that has everything imported and forks control planes or workers on demand.

A restart then costs what a process does, not what its imports cost: seconds of CPU each, which on
two cores would be most of a chaos run. A forked process runs `python -m MODULE` in a session of its
own and is killed, stopped and reaped as any other. It dies with its zygote, and that with its
parent.

`python -m chaos.zygote MODULE MODEL_DIR` reads lines of JSON, {"argv": [...], "log": path}, and
answers in the same order {"pid": n}; in between it reports {"ended": pid, "code": n}.

Owns: the forks and their exit codes. Does not know: what they do.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1


def _preload(module: str, model_dir: Path) -> None:
    """Import everything that the module's process imports on its way to serving."""
    main: Any = importlib.import_module(f"{module}.__main__")
    if module == "control_plane":
        main._set_up_libraries(asks_hub=False)
        catalog = importlib.import_module("control_plane.model_catalog")
        importlib.import_module("control_plane.server")
        importlib.import_module("uvloop")
        # The tokenizer library imports the rest when it first reads a tokenizer.
        catalog.load_model(model_dir, "preload")
    else:
        importlib.import_module("data_plane.worker")
        importlib.import_module("data_plane.control_stream")
    gc.collect()
    # Shared with the children for as long as nobody writes there.
    gc.freeze()


def _become(module: str, argv: list[str], log: str) -> NoReturn:
    """Be `python -m MODULE`, in the forked child. Whatever happens, it ends here."""
    code: int = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, nothing), (1, out), (2, out)):
            os.dup2(source, target)
        sys.argv = argv
        # Run again, as the program that it is.
        del sys.modules[f"{module}.__main__"]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _tell(**message: int) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def _report_ends() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        _tell(ended=pid, code=os.waitstatus_to_exitcode(status))


def _wake(number: int, frame: object) -> None:
    """Do nothing: a handler of Python's is what makes the wake-up descriptor readable."""


def main() -> int:
    module, model_dir = sys.argv[1], Path(sys.argv[2])
    _preload(module, model_dir)
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, _wake)
    signal.set_wakeup_fd(wakes)
    pending = b""
    while True:
        readable, _, _ = select.select([0, woken], [], [])
        if woken in readable:
            os.read(woken, 4096)
            _report_ends()
        if 0 not in readable:
            continue
        data = os.read(0, 65536)
        if not data:
            return 0
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if (pid := os.fork()) == 0:
                os.close(woken)
                os.close(wakes)
                _become(module, request["argv"], request["log"])
            _tell(pid=pid)


if __name__ == "__main__":
    sys.exit(main())
