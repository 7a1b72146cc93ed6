"""Both planes leave at once when they are told to while their model is fetched or loaded."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest
from api_harness import until

if TYPE_CHECKING:
    from pathlib import Path


def open_for(fifo: Path, writers: list[int]) -> bool:
    """Open the other end, which succeeds once somebody reads."""
    try:
        writers.append(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("plane", ["control_plane", "data_plane"])
@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGTERM, 0), (signal.SIGINT, 128 + signal.SIGINT)]
)
async def test_a_signal_while_the_model_loads_ends_the_process(
    plane: str, number: signal.Signals, exit_code: int, tmp_path: Path
) -> None:
    # Nobody writes into it, so whoever reads the configuration waits for ever.
    config = tmp_path / "config.json"
    os.mkfifo(config)
    writers: list[int] = []
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", plane, "--model", str(tmp_path)),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        await until(
            lambda: open_for(config, writers), what="it has come to its model", timeout_s=60.0
        )
        ending = asyncio.create_task(process.communicate())
        # Once is not enough if it comes just before the read that then waits for ever: Python
        # notices a signal between system calls only when the next one is interrupted.
        while not ending.done():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
            await asyncio.wait([ending], timeout=1.0)
        _, errors = await ending
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        for writer in writers:
            os.close(writer)
    assert process.returncode == exit_code
    assert "Traceback" not in errors.decode()


@pytest.mark.parametrize("plane", ["control_plane", "data_plane"])
async def test_sighup_while_the_model_loads_is_for_files_that_are_read_later_anyway(
    plane: str, tmp_path: Path
) -> None:
    config, token = tmp_path / "config.json", tmp_path / "token"
    os.mkfifo(config)
    token.write_text("worker-0123456789abcdef\n")
    flag = {"control_plane": "--worker-token-file", "data_plane": "--token-file"}[plane]
    writers: list[int] = []
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", plane, "--model", str(tmp_path), flag, str(token)),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        await until(
            lambda: open_for(config, writers), what="it has come to its model", timeout_s=60.0
        )
        process.send_signal(signal.SIGHUP)
        # It reads on, and fails for another reason.
        writer = writers.pop()
        os.write(writer, b"no JSON")
        os.close(writer)
        _, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 2
    assert "config.json" in errors.decode()
