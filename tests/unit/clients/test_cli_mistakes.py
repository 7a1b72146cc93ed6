"""What the command line says of input that it cannot use, and that it is no traceback."""

from __future__ import annotations

import io
import sys

import pytest
from pagewire_client import cli
from pagewire_client.replay.worker_port import WorkerGoneError, WorkerProcess


@pytest.mark.parametrize("command", [["generate", "-"], ["chat"]])
def test_standard_input_that_is_no_text_is_told(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", data)
    # Nobody has to answer: it ends before anything is sent.
    assert cli.main(["--server", "127.0.0.1:9", *command]) == 2
    assert "standard input is no text in utf-8: byte 3" in capsys.readouterr().err


def test_a_worker_command_with_a_quote_that_is_not_closed_is_told() -> None:
    with pytest.raises(WorkerGoneError, match="--worker-command my 'worker: No closing quotation"):
        WorkerProcess("my 'worker", [])
