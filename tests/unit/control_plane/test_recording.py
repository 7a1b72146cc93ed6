"""The recorder over a real disk: rotation, gaps, a full disk, who may read."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from control_plane import recording_files
from control_plane.config import parse_args
from control_plane.recording import MAX_REPLICAS, Recorder, hello_of
from control_plane.recording_config import RecordingConfig, read_recording_flags
from control_plane.replica import read_hello
from protos.pagewire.v1 import recording_pb2, worker_pb2
from protos.recording_file import list_segments, open_segment

if TYPE_CHECKING:
    from control_plane.recording import ReplicaRecording

ROOT = Path(__file__).resolve().parents[3]


def hello(worker_id: str = "w0") -> worker_pb2.Hello:
    return worker_pb2.Hello(
        protocol_version=1,
        worker_id=worker_id,
        replica_id="r0",
        tp_size=1,
        epoch=os.urandom(16),
        model_fingerprint=bytes(32),
        kv_geometry=worker_pb2.KvGeometry(
            num_layers=1, num_kv_heads=1, head_size=8, dtype="float32", block_size=4
        ),
        num_blocks=64,
        max_num_seqs=8,
        max_model_len=128,
        max_num_batched_tokens=256,
        backend="torch",
        device="cpu",
        software_version="1",
    )


class Conversation:
    """A stream's messages as an engine would pass them on; rows decode for ever."""

    def __init__(self, recording: ReplicaRecording) -> None:
        self.recording = recording
        self.version = 0
        self.num_rows = 0

    def attach(self) -> None:
        self.recording.attached(read_hello(hello(), peer="peer"))
        self.recording.sent(
            worker_pb2.ControlMessage(welcome=worker_pb2.Welcome(term=1, num_blocks=64))
        )
        self.reset()

    def reset(self) -> None:
        self.version += 1
        self.num_rows = 0
        message = worker_pb2.ControlMessage(reset=worker_pb2.Reset(version=self.version))
        self.recording.sent(message)

    def step(self, *, num_new_rows: int = 0, confirm: bool = True) -> None:
        self.version += 1
        plan = worker_pb2.Plan(base_version=self.version - 1, version=self.version, num_steps=1)
        for _ in range(num_new_rows):
            plan.added_rows.add(
                row=self.num_rows,
                token_ids=bytes(4),
                num_prompt_tokens=1,
                max_total_tokens=1 << 30,
                block_ids=(self.num_rows + 1).to_bytes(4, "little"),
            )
            plan.chunk_rows += self.num_rows.to_bytes(4, "little")
            plan.chunk_num_tokens += (1).to_bytes(4, "little")
            self.num_rows += 1
        self.recording.sent(worker_pb2.ControlMessage(plan=plan))
        if confirm:
            self.confirm(self.version)

    def confirm(self, version: int) -> None:
        result = worker_pb2.StepResult(
            version=version, counts=b"\x01" * self.num_rows, token_ids=b"\x07\0\0\0" * self.num_rows
        )
        self.recording.received(worker_pb2.WorkerMessage(step_result=result))


def recorder(directory: Path, **changes: int) -> Recorder:
    recorder = Recorder(RecordingConfig(directory=directory, **changes), deployment="test")
    recorder.start()
    return recorder


def events(path: Path) -> list[str]:
    """One word per record."""
    words: list[str] = []
    for record in open_segment(path).records():
        event = record.WhichOneof("event") or ""
        if event in ("sent", "received"):
            event = getattr(record, event).WhichOneof("message")
        words.append(event)
    return words


def segments(directory: Path) -> list[Path]:
    return list_segments(directory / "replica-r0")


def test_everything_is_written_in_order_with_times(tmp_path: Path) -> None:
    writer = recorder(tmp_path)
    stream = Conversation(writer.observe("r0", "smol"))
    stream.attach()
    stream.step(num_new_rows=2)
    stream.recording.received(worker_pb2.WorkerMessage(heartbeat=worker_pb2.Heartbeat()))
    stream.recording.ended(None)
    writer.close()
    [path] = segments(tmp_path)
    assert events(path) == [
        *("hello", "welcome", "reset", "plan", "step_result", "heartbeat"),
        *("stream_ended", "recording_ended"),
    ]
    segment = open_segment(path)
    offsets = [record.offset_us for record in segment.records()]
    assert offsets == sorted(offsets)
    header = segment.header
    assert (header.deployment, header.model, header.replica_id) == ("test", "smol", "r0")
    assert header.hello.worker_id == "w0"
    assert writer.counts.bytes_written == path.stat().st_size


def test_hello_is_what_the_facts_were_read_from() -> None:
    message = hello()
    assert hello_of(read_hello(message, peer="peer")) == message


def test_only_the_owner_can_read_it(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "recordings"
    config = read_recording_flags(directory, None)
    assert config is not None
    assert directory.stat().st_mode & 0o777 == 0o700
    writer = recorder(directory)
    Conversation(writer.observe("r0", "smol")).attach()
    writer.close()
    [path] = segments(directory)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_replica_called_dot_dot_stays_below_the_directory(tmp_path: Path) -> None:
    writer = (
        recorder(tmp_path / "recordings") if (tmp_path / "recordings").mkdir() is None else None
    )
    assert writer is not None
    Conversation(writer.observe("..", "smol")).attach()
    writer.close()
    assert [p.name for p in tmp_path.iterdir()] == ["recordings"]
    assert [p.name for p in (tmp_path / "recordings").iterdir()] == ["replica-.."]


def test_rotation_keeps_the_newest_within_the_bound_and_each_begins_with_its_rows(
    tmp_path: Path,
) -> None:
    limit = 64 << 10
    writer = recorder(tmp_path, max_bytes=limit)
    stream = Conversation(writer.observe("r0", "smol"))
    stream.attach()
    stream.step(num_new_rows=1, confirm=False)
    for _ in range(1500):
        # One plan is always unconfirmed.
        stream.step(confirm=False)
        stream.confirm(stream.version - 1)
    stream.confirm(stream.version)
    writer.close()
    paths = segments(tmp_path)
    assert len(paths) >= 4
    assert sum(path.stat().st_size for path in paths) <= limit
    last = open_segment(paths[-1])
    assert [r.sent.plan.version for r in last.records() if r.sent.HasField("plan")][-1] == (
        stream.version
    )
    numbers = [open_segment(path).header.segment for path in paths]
    assert numbers == list(range(numbers[0], numbers[0] + len(paths)))
    for path in paths:
        segment = open_segment(path)
        header, records = segment.header, list(segment.records())
        assert header.num_rows == 1
        # Two between a plan and the result of the one before; where files end is up to timestamps.
        assert header.num_plans in (1, 2)
        assert header.HasField("welcome")
        assert [r.HasField("row") for r in records[:2]] == [True, False]
        assert records[1].sent.plan.version == header.version + 1
        row = records[0].row
        # Of version 3, whose chunk sampled the first one, up to the confirmed one.
        num_tokens = 1 + header.version - 1
        assert len(row.added.token_ids) == 4 * num_tokens
        assert (row.num_known_tokens, row.num_computed_tokens) == (1, num_tokens - 1)


def test_what_an_earlier_process_left_counts_and_goes_first(tmp_path: Path) -> None:
    limit = 64 << 10
    for _ in range(3):
        writer = recorder(tmp_path, max_bytes=limit)
        stream = Conversation(writer.observe("r0", "smol"))
        stream.attach()
        stream.step(num_new_rows=3)
        for _ in range(400):
            stream.step()
        writer.close()
    paths = segments(tmp_path)
    assert sum(path.stat().st_size for path in paths) <= limit
    ids = [open_segment(path).header.recording_id for path in paths]
    assert len(set(ids)) == 2


def test_rows_that_do_not_fit_pause_the_recording_until_a_reset(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = recorder(tmp_path, max_bytes=16 << 10)
    stream = Conversation(writer.observe("r0", "smol"))
    stream.attach()
    stream.step(num_new_rows=8)
    for _ in range(400):
        stream.step()
    stream.reset()
    stream.step(num_new_rows=1)
    writer.close()
    assert writer.counts.num_pauses == 1
    assert "recording pauses until a reset" in caplog.text
    paths = segments(tmp_path)
    assert events(paths[-2])[-1] == "recording_ended"
    assert events(paths[-1]) == ["reset", "plan", "step_result", "recording_ended"]
    header = open_segment(paths[-1]).header
    assert header.segment > open_segment(paths[-2]).header.segment + 1
    assert header.HasField("welcome")
    assert header.num_rows == 0


def test_a_message_that_does_not_fit_pauses_the_recording(tmp_path: Path) -> None:
    writer = recorder(tmp_path, max_bytes=16 << 10)
    stream = Conversation(writer.observe("r0", "smol"))
    stream.attach()
    plan = worker_pb2.Plan(base_version=1, version=2, num_steps=1)
    plan.added_rows.add(token_ids=bytes(10_000))
    stream.recording.sent(worker_pb2.ControlMessage(plan=plan))
    stream.recording.sent(worker_pb2.ControlMessage(heartbeat=worker_pb2.Heartbeat()))
    writer.close()
    assert writer.counts.num_pauses == 1
    [path] = segments(tmp_path)
    assert events(path) == ["hello", "welcome", "reset", "recording_ended"]
    assert list(open_segment(path).records())[-1].recording_ended.num_missing == 1


def test_nonsense_of_a_worker_is_recorded_and_harms_nothing(tmp_path: Path) -> None:
    writer = recorder(tmp_path, max_bytes=16 << 10)
    stream = Conversation(writer.observe("r0", "smol"))
    stream.attach()
    stream.step(num_new_rows=2, confirm=False)
    result = worker_pb2.StepResult(version=2, counts=b"\x05", token_ids=b"123")
    stream.recording.received(worker_pb2.WorkerMessage(step_result=result))
    stream.recording.received(worker_pb2.WorkerMessage())
    stream.reset()
    stream.step(num_new_rows=1)
    writer.close()
    assert writer.counts.num_failures == 0
    assert events(segments(tmp_path)[0])[3:] == [
        *("plan", "step_result", None, "reset", "plan", "step_result", "recording_ended"),
    ]


class SlowDisk:
    """Writes wait for a gate."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        self.is_writing = threading.Event()

        def write(descriptor: int, data: memoryview) -> int:
            self.is_writing.set()
            self.gate.wait()
            return os.write(descriptor, data)

        monkeypatch.setattr(recording_files, "_write_some", write)


def test_a_slow_disk_blocks_nobody_and_leaves_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = SlowDisk(monkeypatch)
    writer = recorder(tmp_path, max_backlog_bytes=20_000)
    stream = Conversation(writer.observe("r0", "smol"))
    stream.attach()
    assert disk.is_writing.wait(30)
    stream.step(num_new_rows=1)
    for _ in range(500):
        stream.step()
    assert writer.num_gaps == 1
    assert writer.num_missing > 500
    assert writer.num_active == 0
    assert caplog.text.count("recording has a gap") == 1
    num_missing = writer.num_missing
    disk.gate.set()
    # Once there is room again the next Reset, and only that, ends the gap.
    while not writer.has_room(10_000):
        os.sched_yield()
    stream.step()
    stream.reset()
    stream.step(num_new_rows=2)
    writer.close()
    assert writer.num_missing == num_missing + 2
    first, second = segments(tmp_path)
    ended = list(open_segment(first).records())[-1].recording_ended
    assert ended.num_missing == writer.num_missing
    assert events(second) == ["reset", "plan", "step_result", "recording_ended"]
    headers = [open_segment(path).header for path in (first, second)]
    assert headers[1].segment > headers[0].segment + 1
    assert headers[1].HasField("welcome")


def test_a_gap_can_end_with_a_new_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SlowDisk(monkeypatch)
    writer = recorder(tmp_path, max_backlog_bytes=5_000)
    stream = Conversation(writer.observe("r0", "smol"))
    stream.attach()
    assert disk.is_writing.wait(30)
    stream.step(num_new_rows=1)
    for _ in range(100):
        stream.step()
    stream.recording.ended(None)
    disk.gate.set()
    while not writer.has_room(3_000):
        os.sched_yield()
    stream.attach()
    writer.close()
    assert events(segments(tmp_path)[-1]) == ["hello", "welcome", "reset", "recording_ended"]


_FULL_DISK = """
import resource, signal, sys
from pathlib import Path
sys.path[:0] = ["tests/unit/control_plane"]
from test_recording import Conversation, events, recorder, segments
directory = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
writer = recorder(directory, max_bytes=1 << 30)
stream = Conversation(writer.observe("r0", "smol"))
stream.attach()
stream.step(num_new_rows=1)
while not stream.recording.is_stopped:
    stream.step()
stream.step()
writer.close()
assert writer.counts.num_failures == 1
assert writer.num_active == 0
[path] = segments(directory)
assert path.stat().st_size <= 20_000
assert len(events(path)) > 100
print("fine")
"""


def test_a_full_disk_ends_the_recording_behind_a_whole_record(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FULL_DISK, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "fine\n", done.stderr
    assert "recording stopped: replica=r0 error=File too large" in done.stderr
    [path] = segments(tmp_path)
    reader = open_segment(path)
    list(reader.records())
    assert reader.torn_bytes == 0


def test_replicas_that_ended_longest_ago_make_room(tmp_path: Path) -> None:
    writer = recorder(tmp_path)
    for index in range(MAX_REPLICAS + 5):
        recording = writer.observe(f"r{index}", "smol")
        Conversation(recording).attach()
        if index:
            recording.ended(None)
    writer.close()
    names = {path.name for path in tmp_path.iterdir()}
    assert len(names) == MAX_REPLICAS
    assert "replica-r0" in names  # attached still
    assert f"replica-r{MAX_REPLICAS + 4}" in names


def test_a_directory_that_cannot_be_written_is_refused_at_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    model = tmp_path / "model"
    model.mkdir()
    with pytest.raises(SystemExit) as exit_:
        parse_args(["--model", str(model), "--record", str(tmp_path / "file")])
    assert exit_.value.code == 2
    assert "--record: cannot write into" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--record-max-mb must be at least 8"):
        read_recording_flags(tmp_path, 7)
    with pytest.raises(ValueError, match="--record-max-mb needs --record"):
        read_recording_flags(None, 100)
    assert parse_args(["--model", str(model)]).recording is None


def test_help_says_that_prompts_are_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "PROMPTS AND ANSWERS ARE IN IT" in text
    assert "--record DIR" in text


def test_ended_says_why(tmp_path: Path) -> None:
    from control_plane.errors import ProtocolError

    writer = recorder(tmp_path)
    stream = Conversation(writer.observe("r0", "smol"))
    stream.attach()
    stream.recording.ended(ProtocolError("STEP_TIMEOUT", "too long"))
    writer.close()
    [path] = segments(tmp_path)
    assert [
        r.stream_ended.reason
        for r in open_segment(path).records()
        if r.WhichOneof("event") == "stream_ended"
    ] == ["STEP_TIMEOUT"]
    assert isinstance(open_segment(path).header, recording_pb2.SegmentHeader)
