"""Recordings of strangers, and the words of the command."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from pagewire_client import cli
from pagewire_client.replay.comparison import refusal, worker_flags
from pagewire_client.replay.recording import open_recording
from pagewire_client.replay.restore import blocks_plans, rows_plans
from pagewire_client.replay.survey import survey_run
from recorded_messages import (
    ENDED,
    Record,
    added,
    column,
    header,
    hello,
    opening,
    plan,
    received,
    result,
    sent,
    start,
    write,
)

from protos.pagewire.v1 import recording_pb2, worker_pb2
from protos.recorded_rows import RecordedRows
from protos.recording_file import RecordingError, frame, preamble, segment_name

ROOT = Path(__file__).resolve().parents[3]


# Strangers' files.


def good_records() -> list[Record]:
    records = [*opening(), start(2, added(0, [7, 8, 9, 10, 11], [1, 2])), result(2, 5)]
    records += [start(3, added(1, [7, 8, 9, 10, 1], [1, 3], num_hits=1)), result(3, 5, 6)]
    for version in range(4, 12):
        records += [plan(version), result(version, 1, 2)]
    records += [
        plan(12, removed_rows=column(0), appended_rows=column(1), appended_counts=column(1),
             appended_block_ids=column(9)),
        received(nack=worker_pb2.Nack(version=12)),
        sent(reset=worker_pb2.Reset(version=13)),
        ENDED,
    ]  # fmt: skip
    return records


def read_everything(path: Path) -> None:
    """Both passes, without a worker."""
    for run in open_recording(path).runs:
        survey = survey_run(run)
        for life in survey.lives:
            for _ in blocks_plans(life, run.header.hello, run.header.hello.num_blocks):
                pass
        rows = RecordedRows()
        restored = run.rows()
        rows.restore(run.header.version, restored)
        for _ in rows_plans(restored, run.header.hello):
            pass
        for record in run.events():
            if record.sent.HasField("reset"):
                rows.reset(record.sent.reset.version)
            elif record.sent.HasField("plan"):
                rows.order(record.sent.plan)
            elif record.received.HasField("step_result"):
                rows.take(record.received.step_result)


def test_mutated_recordings_with_right_checksums_are_errors_and_nothing_else(
    tmp_path: Path,
) -> None:
    rng = random.Random(1)
    start_row = recording_pb2.RecordedRow(
        added=added(0, [7, 8, 9], [1]), num_known_tokens=2, num_computed_tokens=2
    )
    middle = header(1, welcome=worker_pb2.Welcome(num_blocks=64), version=1, num_rows=1)
    variants = [
        [header(), *good_records()],
        [middle, Record(row=start_row), plan(2), result(2, 3), *good_records()[3:4]],
    ]
    path = tmp_path / segment_name(1)
    num_errors = 0
    for number in range(4000):
        payloads = [m.SerializeToString() for m in variants[number % 2]]
        for _ in range(rng.randrange(1, 4)):
            index = rng.randrange(len(payloads))
            data = bytearray(payloads[index])
            if not data:
                continue
            at = rng.randrange(len(data))
            kind = rng.randrange(4)
            if kind == 0:
                data[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                data[at] = rng.choice((0, 1, 127, 128, 255))
            elif kind == 2:
                del data[at : at + rng.randrange(1, 5)]
            else:
                other = rng.choice(payloads)
                data[at:at] = other[: rng.randrange(1, 20)]
            payloads[index] = bytes(data)
        path.write_bytes(preamble() + b"".join(map(frame, payloads)))
        try:
            read_everything(path)
        except RecordingError:
            num_errors += 1
    assert num_errors > 1000


_SMALL_MEMORY = """
import resource, sys
from pagewire_client import cli
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
sys.exit(cli.main(["replay", sys.argv[1], "--quiet"]))
"""


def test_a_hostile_recording_takes_no_memory(tmp_path: Path) -> None:
    # Fifty million rows in one plan, each of two bytes.
    rows = b"\x2a\x00" * (25 << 20)
    payload = b"\x12" + varint(len(rows) + 5) + b"\x1a" + varint(len(rows)) + rows
    records = b"".join(frame(m.SerializeToString()) for m in (header(), *opening()))
    path = tmp_path / segment_name(1)
    path.write_bytes(preamble() + records + frame(payload))
    done = subprocess.run(
        [sys.executable, "-c", _SMALL_MEMORY, str(path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "beside its ids" in done.stderr
    assert "Traceback" not in done.stderr


def varint(value: int) -> bytes:
    data = bytearray()
    while value > 127:
        data.append(value & 127 | 128)
        value >>= 7
    return bytes([*data, value])


# Words.


def test_errors_of_the_command_are_sentences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("hello, I am a text file")
    for args, words in (
        ([str(tmp_path / "missing")], "cannot read"),
        ([str(tmp_path / "text")], "no recording of Pagewire"),
        ([str(tmp_path)], "holds no recording"),
        ([str(tmp_path), "--port", "99999"], "--port must be in [0, 65535]"),
        ([str(tmp_path), "--step-timeout-s", "0"], "--step-timeout-s must be positive"),
    ):
        assert cli.main(["replay", *args]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("pagewire: ")
        assert words in captured.err


def test_a_worker_that_cannot_start_is_shown_with_its_last_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, header(), opening())
    command = "sh -c 'echo my last words; exit 3' --"
    assert cli.main(["replay", str(tmp_path), "--model", "m", "--worker-command", command]) == 2
    text = capsys.readouterr().err
    assert "the worker ended with exit code 3" in text
    assert "my last words" in text
    assert "--num-blocks 64 --max-num-seqs 8" in text
    args = ["--model", "m", "--worker-command", "/nowhere/to/be/found"]
    assert cli.main(["replay", str(tmp_path), *args]) == 2
    assert "cannot start /nowhere/to/be/found" in capsys.readouterr().err


def test_a_refusal_names_values_and_remedy() -> None:
    recorded, worker = hello(), hello()
    assert refusal(worker, recorded, model="m", version="1") is None
    worker.protocol_version = 2
    text = refusal(worker, recorded, model="m", version="2026.12.0")
    assert text is not None
    assert "protocol version 2" in text
    assert "2026.12.0" in text
    worker = hello()
    worker.kv_geometry.dtype = "bfloat16"
    assert "--dtype float32" in (refusal(worker, recorded, model="m", version="1") or "")
    recorded.kv_geometry.dtype = "fp8_e4m3"
    with pytest.raises(RecordingError, match="no CPU worker"):
        worker_flags(recorded)
