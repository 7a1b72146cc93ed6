"""A recording as a sequence of events, whatever files they lie in.

Owns: which files belong together, where something is missing, and that events come in an order
that a stream can have. Does not know: what plans do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protos.recording_file import (
    DIRECTORY_PREFIX,
    EmptySegmentError,
    RecordingError,
    SegmentReader,
    list_segments,
    open_segment,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from protos.pagewire.v1 import recording_pb2, worker_pb2

# What the control plane accepts of a worker, and so all that a Hello can say.
_MAX_NUM_BLOCKS = 1 << 21
_MAX_BLOCK_SIZE = 1 << 16
_MAX_VERSION = 1 << 62


@dataclass(slots=True)
class Run:
    """Segments that follow each other without a gap: they are played in one go.

    Attributes:
        segments: At least one.
        notes: For people: what is missing before it, a torn end.
    """

    segments: list[SegmentReader]
    notes: list[str] = field(default_factory=list[str])

    @property
    def header(self) -> recording_pb2.SegmentHeader:
        """Of the first segment: the state in which the run begins."""
        return self.segments[0].header

    def rows(self) -> list[recording_pb2.RecordedRow]:
        """The rows with which it begins.

        Raises:
            RecordingError: There are fewer than the header says, or the file is damaged.
        """
        rows: list[recording_pb2.RecordedRow] = []
        if not self.header.num_rows:
            return rows
        for record in self.segments[0].records():
            if not record.HasField("row"):
                break
            rows.append(record.row)
            if len(rows) == self.header.num_rows:
                return rows
        raise RecordingError(
            f"{self.segments[0].path}: {len(rows)} rows at its beginning, its header says "
            f"{self.header.num_rows}"
        )

    def events(self) -> Iterator[recording_pb2.Record]:
        """What happened, without the rows and without what segments repeat.

        Raises:
            RecordingError: Damage, or an order that no stream can have.
        """
        order = _Order(self.header)
        for index, segment in enumerate(self.segments):
            header = segment.header
            num_left_out = header.num_rows + (header.num_plans if index else 0)
            for number, record in enumerate(segment.records()):
                if number < num_left_out:
                    continue
                if record.HasField("recording_ended"):
                    continue
                order.check(record, segment, number)
                yield record
            if segment.torn_bytes and index + 1 < len(self.segments):
                raise RecordingError(
                    f"{segment.path} ends in the midst of a record, but the next segment goes on "
                    f"from there: it was cut. Replay {self.segments[index + 1].path} by itself"
                )


class _Order:
    """Hello, Welcome, Reset, then plans and results."""

    def __init__(self, header: recording_pb2.SegmentHeader) -> None:
        self._has_stream = header.HasField("welcome")
        self._has_welcome = self._has_stream
        self._has_reset = self._has_stream and header.version > 0

    def check(self, record: recording_pb2.Record, segment: SegmentReader, number: int) -> None:
        event = record.WhichOneof("event")
        kind = ""
        if event == "sent":
            kind = record.sent.WhichOneof("message") or ""
        elif event == "received":
            kind = record.received.WhichOneof("message") or ""
        version = 0
        if kind in ("reset", "plan"):
            version = record.sent.reset.version or record.sent.plan.version
        if not (self._is_in_order(event, kind) and 0 <= version <= _MAX_VERSION):
            raise RecordingError(
                f"{segment.path}, record {number + 1}: {kind or event or 'an unknown event'} has "
                "no place here"
            )
        if event == "received" and kind == "hello":
            _check_hello(record.received.hello, f"{segment.path}, record {number + 1}")

    def _is_in_order(self, event: str | None, kind: str) -> bool:
        if event == "stream_ended":
            was_open = self._has_stream
            self._has_stream = self._has_welcome = self._has_reset = False
            return was_open
        if (event, kind) == ("received", "hello"):
            was_open, self._has_stream = self._has_stream, True
            return not was_open
        if (event, kind) == ("sent", "welcome"):
            is_first, self._has_welcome = not self._has_welcome, True
            return self._has_stream and is_first
        if (event, kind) == ("sent", "reset"):
            self._has_reset = True
            return self._has_welcome
        if event == "sent":
            return self._has_reset if kind == "plan" else self._has_welcome
        # A worker can send nonsense, unknown kinds included; its stream ends with that.
        return event == "received" and self._has_welcome


@dataclass(slots=True)
class Recording:
    """Everything of one replica.

    Attributes:
        path: As given.
        runs: Oldest first.
    """

    path: Path
    runs: list[Run]

    @property
    def header(self) -> recording_pb2.SegmentHeader:
        """Of the newest segment, for what all have in common."""
        return self.runs[-1].segments[-1].header


def open_recording(path: Path) -> Recording:
    """Find the segments of a recording and put them in order.

    Args:
        path: A segment, the directory of a replica, or a --record directory with one replica.

    Raises:
        RecordingError: There is no recording, or several; or one that cannot be read.
    """
    paths = _segments(path)
    runs: list[Run] = []
    last: recording_pb2.SegmentHeader | None = None
    for segment_path in paths:
        try:
            segment = open_segment(segment_path)
        except EmptySegmentError:
            continue
        header = segment.header
        where = f"{segment_path}"
        _check_hello(header.hello, where)
        if not 0 <= header.version <= _MAX_VERSION or header.num_rows < 0 or header.num_plans < 0:
            raise RecordingError(f"{where}: a number in its header is out of range")
        if last is None:
            runs.append(Run([segment]))
        elif header.recording_id != last.recording_id:
            runs.append(Run([segment], ["another start of the control plane"]))
        elif header.segment != last.segment + 1:
            runs.append(Run([segment], ["messages before it are missing"]))
        else:
            runs[-1].segments.append(segment)
        last = header
    if not runs:
        raise RecordingError(f"{path}: nothing is recorded in it")
    return Recording(path, runs)


def _segments(path: Path) -> list[Path]:
    try:
        if not path.is_dir():
            return [path]
        if segments := list_segments(path):
            return segments
        replicas = sorted(
            replica
            for replica in path.iterdir()
            if replica.name.startswith(DIRECTORY_PREFIX) and list_segments(replica)
        )
    except OSError as error:
        raise RecordingError(f"cannot read {path}: {error.strerror}") from None
    if len(replicas) == 1:
        return list_segments(replicas[0])
    if not replicas:
        raise RecordingError(f"{path} holds no recording: no replica attached while it was written")
    lines = "\n".join(f"  pagewire replay {replica}" for replica in replicas[:20])
    raise RecordingError(f"{path} holds {len(replicas)} replicas; replay one of them:\n{lines}")


def _check_hello(hello: worker_pb2.Hello, where: str) -> None:
    block_size = hello.kv_geometry.block_size
    if not (
        len(hello.epoch) == 16
        and len(hello.model_fingerprint) == 32
        and 2 <= hello.num_blocks <= _MAX_NUM_BLOCKS
        and 1 <= block_size <= _MAX_BLOCK_SIZE
        and not block_size & (block_size - 1)
        and 1 <= hello.max_num_seqs <= hello.max_num_batched_tokens
        and hello.max_model_len >= 2
        and 0 <= hello.applied_version <= _MAX_VERSION
    ):
        raise RecordingError(f"{where}: a Hello that no worker can have sent")
