"""One replica's recording on disk: segments, their rotation, and the rows that each begins with.

Runs on the recorder's thread: it may take as long as the disk does.

Owns: files and their bound. A segment begins with everything a replay must know that came before
it, so the oldest ones can go without making the others useless. Where that is not known (messages
were lost, or it does not fit), nothing is written until a Reset makes all rows empty.

Does not know: queues, the event loop.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protos.pagewire.v1 import recording_pb2, worker_pb2
from protos.recorded_rows import RecordedRows
from protos.recording_file import (
    DIRECTORY_PREFIX,
    MAX_PAYLOAD_BYTES,
    RecordingError,
    frame,
    list_segments,
    preamble,
    segment_name,
    segment_number,
)

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger(__name__)

# Of the bound: a segment's records, and what it may begin with.
_SEGMENTS = 8
_WRITE_BYTES = 256 * 1024


@dataclass(slots=True, kw_only=True)
class RecordingCounts:
    """What the recorder's thread did, for metrics; written by that thread only."""

    bytes_written: int = 0
    num_failures: int = 0
    num_pauses: int = 0


@dataclass(slots=True)
class _StreamState:
    """What a replay must know of a stream in whose midst a segment begins."""

    hello: worker_pb2.Hello
    welcome: worker_pb2.Welcome | None = None
    rows: RecordedRows = field(default_factory=RecordedRows)
    is_known: bool = False  # the rows are those of the worker


class ReplicaFiles:
    """The segments of one replica, the newest open for writing.

    Every method may raise OSError; the files then end behind the last whole record.
    """

    def __init__(
        self,
        directory: Path,
        header: recording_pb2.SegmentHeader,
        *,
        max_bytes: int,
        counts: RecordingCounts,
    ) -> None:
        """Nothing is written before the first record.

        Args:
            directory: Of all recordings.
            header: What all segments of this recording have in common.
            max_bytes: Of all segments, those of earlier processes included.
            counts: Shared by all replicas.
        """
        self.directory = directory / (DIRECTORY_PREFIX + header.replica_id)
        self._header = header
        self._max_bytes = max_bytes
        self._counts = counts
        self._kept: dict[Path, int] = {}
        self._number = 0
        self._file: int | None = None
        self._path: Path | None = None
        self._size = 0
        self._rotate_at = 0
        self._buffer = bytearray()
        self._ends: list[int] = []  # of the records in the buffer, counted from the file's begin
        self._hello: worker_pb2.Hello | None = None
        self._stream: _StreamState | None = None
        self._is_waiting = False  # for a Reset

    def open(self) -> None:
        """Make the directory and see what earlier processes left there."""
        self.directory.mkdir(mode=0o700, exist_ok=True)
        self._kept = {path: path.stat().st_size for path in list_segments(self.directory)}
        self._number = max((segment_number(path.name) or 0 for path in self._kept), default=0) + 1

    def append(self, record: recording_pb2.Record) -> None:
        """Write a record, or remember what it means for the state if nothing can be written."""
        event = record.WhichOneof("event")
        self._begin_stream(record, event)
        if self._is_waiting:
            self._try_to_begin_again(record, event)
        if not self._is_waiting:
            self._write(record)
        self._follow(record, event)
        if self._file is not None and self._size >= self._rotate_at:
            self._rotate(record.offset_us)

    def lose(
        self, num_missing: int, offset_us: int, hello: bytes | None, welcome: bytes | None
    ) -> None:
        """Messages were left out: go on with the next Reset, or the next Hello.

        Args:
            num_missing: How many.
            offset_us: Of the first that is there again.
            hello: Of the stream that is attached now; None: none is.
            welcome: Likewise, a ControlMessage.
        """
        if self._file is not None:
            self._write_ended(offset_us, num_missing)
            self._close()
        self._number += 1  # so that a reader sees that something is missing
        self._is_waiting = True
        self._stream = None
        if hello is not None and welcome is not None:
            self._hello = worker_pb2.WorkerMessage.FromString(hello).hello
            message = worker_pb2.ControlMessage.FromString(welcome)
            self._stream = _StreamState(self._hello, message.welcome)

    def flush(self) -> None:
        """Give the system what was appended."""
        if self._file is None or not self._buffer:
            return
        data, self._buffer = self._buffer, bytearray()
        ends, self._ends = self._ends, []
        begin, written = self._size - len(data), 0
        try:
            while written < len(data):
                written += _write_some(self._file, memoryview(data)[written:])
        except OSError:
            # Half a record would look as if the process had been killed.
            whole = max((end for end in ends if end <= begin + written), default=begin)
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, whole)
            raise
        self._counts.bytes_written += len(data)

    def end(self, offset_us: int) -> None:
        """The process ends in good order."""
        if self._file is not None:
            self._write_ended(offset_us, 0)
            self._close()

    def abandon(self) -> None:
        """Let go of the open file after a failure."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None
        self._buffer.clear()
        self._ends.clear()

    # What a record means.

    def _begin_stream(self, record: recording_pb2.Record, event: str | None) -> None:
        if event == "received" and record.received.HasField("hello"):
            self._hello = record.received.hello
            self._stream = _StreamState(self._hello)

    def _follow(self, record: recording_pb2.Record, event: str | None) -> None:
        stream = self._stream
        if stream is None:
            return
        try:
            if event == "sent":
                _follow_sent(stream, record.sent)
            elif event == "received" and record.received.HasField("step_result"):
                result = record.received.step_result
                # Anything else is left over from before a Reset, or will be answered with one.
                if stream.is_known and stream.rows.next_result == (result.version, result.step):
                    stream.rows.confirm(result)
            elif event == "stream_ended":
                self._stream = None
        except RecordingError as error:
            stream.is_known = False
            logger.info("rows unknown until a reset: replica=%s cause=%s", self._id, error)

    @property
    def _id(self) -> str:
        return self._header.replica_id

    # Segments.

    def _try_to_begin_again(self, record: recording_pb2.Record, event: str | None) -> None:
        is_hello = event == "received" and record.received.HasField("hello")
        is_reset = (
            event == "sent"
            and record.sent.HasField("reset")
            and self._stream is not None
            and self._stream.welcome is not None
        )
        if is_hello or is_reset:
            self._is_waiting = False
            self._close()

    def _rotate(self, offset_us: int) -> None:
        """Begin a new segment if the state is one that it can begin with."""
        stream = self._stream
        if stream is None or (stream.is_known and stream.rows.is_between_plans):
            self._begin_segment(offset_us)
        elif self._size >= self._max_bytes // 2:
            self._pause(offset_us, "the rows are not known", num_missing=0)

    def _begin_segment(self, offset_us: int) -> None:
        """Open the next file and write what the state is."""
        frames = self._state_frames()
        size = sum(map(len, frames))
        if size > self._max_bytes // _SEGMENTS:
            self._pause(offset_us, f"its rows take {size} bytes", num_missing=0)
            return
        self._close()
        self._path = self.directory / segment_name(self._number)
        self._file = os.open(
            self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        self._number += 1
        self._size = 0
        for data in frames:
            self._put(data)
        self._rotate_at = self._size + self._max_bytes // _SEGMENTS

    def _state_frames(self) -> list[bytes]:
        assert self._hello is not None
        header = recording_pb2.SegmentHeader()
        header.CopyFrom(self._header)
        header.segment = self._number
        header.hello.CopyFrom(self._hello)
        stream = self._stream
        records: list[recording_pb2.Record] = []
        if stream is not None and stream.welcome is not None:
            header.welcome.CopyFrom(stream.welcome)
            if stream.is_known:
                header.version = stream.rows.version
                records += [recording_pb2.Record(row=row) for row in stream.rows.snapshot()]
                header.num_rows = len(records)
                header.num_plans = len(stream.rows.unconfirmed)
                records += [
                    recording_pb2.Record(sent=worker_pb2.ControlMessage(plan=plan))
                    for plan in stream.rows.unconfirmed
                ]
        return [
            preamble() + frame(header.SerializeToString()),
            *(frame(record.SerializeToString()) for record in records),
        ]

    def _write(self, record: recording_pb2.Record) -> None:
        payload = record.SerializeToString()
        if len(payload) > min(self._max_bytes // 2, MAX_PAYLOAD_BYTES):
            self._pause(record.offset_us, f"a message has {len(payload)} bytes", num_missing=1)
            return
        if self._file is None:
            self._begin_segment(record.offset_us)
        if self._file is not None:
            self._put(frame(payload))

    def _pause(self, offset_us: int, cause: str, *, num_missing: int) -> None:
        """Write nothing more until a Reset: what comes could not be replayed."""
        logger.warning(
            "recording pauses until a reset: replica=%s cause=%s; raise --record-max-mb",
            self._id,
            cause,
        )
        self._counts.num_pauses += 1
        if self._file is not None:
            self._write_ended(offset_us, num_missing)
            self._close()
        self._number += 1
        self._is_waiting = True
        if self._stream is not None:
            self._stream.is_known = False

    def _write_ended(self, offset_us: int, num_missing: int) -> None:
        ended = recording_pb2.RecordingEnded(num_missing=num_missing)
        record = recording_pb2.Record(offset_us=offset_us, recording_ended=ended)
        self._put(frame(record.SerializeToString()))

    def _put(self, data: bytes) -> None:
        self._make_room(len(data))
        self._buffer += data
        self._size += len(data)
        self._ends.append(self._size)
        if len(self._buffer) >= _WRITE_BYTES:
            self.flush()

    def _make_room(self, size: int) -> None:
        total = sum(self._kept.values()) + self._size + size
        for path in list(self._kept):
            if total <= self._max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= self._kept.pop(path)

    def _close(self) -> None:
        if self._file is None or self._path is None:
            return
        self.flush()
        os.close(self._file)
        self._file = None
        self._kept[self._path] = self._size


def remove_recording(directory: Path) -> None:
    """Remove one replica's recording; what else lies in its directory stays."""
    for path in list_segments(directory):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        directory.rmdir()


def _write_some(descriptor: int, data: memoryview) -> int:
    return os.write(descriptor, data)


def _follow_sent(stream: _StreamState, message: worker_pb2.ControlMessage) -> None:
    kind = message.WhichOneof("message")
    if kind == "welcome":
        stream.welcome = message.welcome
    elif kind == "reset":
        stream.rows.reset(message.reset.version)
        stream.is_known = True
    elif kind == "plan" and stream.is_known:
        stream.rows.order(message.plan)
