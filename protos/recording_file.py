"""The file format of recordings: one segment is a preamble and frames, each with a checksum.

    segment  = "PAGEWREC" format_version:u32 frame*
    frame    = length:u32 crc32(length as u32):u32 crc32(payload):u32 payload      (little-endian)

The first payload is a SegmentHeader, all others are Records (`recording.proto`). A crash can leave
part of a frame at the end, which is cut; anything else that does not check is damage.

Owns: frames, file names, what a reader accepts from a stranger. Does not know: what records mean.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from google.protobuf.message import DecodeError

from protos.pagewire.v1 import recording_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAGIC = b"PAGEWREC"
FORMAT_VERSION = 1
SUFFIX = ".pwrec"
# Before a replica's id, which may be "..".
DIRECTORY_PREFIX = "replica-"

_PREAMBLE = struct.Struct("<8sI")
_FRAME = struct.Struct("<III")
_LENGTH = struct.Struct("<I")
_NAME = re.compile(r"(\d{8,18})" + re.escape(SUFFIX))
# Above what a worker takes as one message, and then some for what is around it.
MAX_PAYLOAD_BYTES = (64 << 20) + 4096
# Of a payload, everything but columns of ids. Parsing turns two bytes of such into a hundred, so
# this and not the length bounds what a hostile record can make a reader allocate.
_MAX_STRUCTURE_BYTES = 4 << 20


class RecordingError(Exception):
    """A recording that cannot be read or cannot be what it says. The message is for people."""


class EmptySegmentError(RecordingError):
    """A file that was cut off before its header: nothing is in it."""


def preamble() -> bytes:
    """What a segment begins with."""
    return _PREAMBLE.pack(MAGIC, FORMAT_VERSION)


def frame(payload: bytes) -> bytes:
    """A payload as it stands in the file.

    Raises:
        RecordingError: It is longer than a reader accepts.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise RecordingError(f"a record of {len(payload)} bytes; at most {MAX_PAYLOAD_BYTES}")
    length = _LENGTH.pack(len(payload))
    return _FRAME.pack(len(payload), zlib.crc32(length), zlib.crc32(payload)) + payload


def segment_name(number: int) -> str:
    """The file name of a segment."""
    return f"{number:08d}{SUFFIX}"


def segment_number(name: str) -> int | None:
    """The number in a file name; None if it is no segment's."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def list_segments(directory: Path) -> list[Path]:
    """Segments of one replica, oldest first.

    Raises:
        OSError: The directory cannot be read.
    """
    numbered = [(segment_number(path.name), path) for path in directory.iterdir()]
    return [path for _, path in sorted((n, path) for n, path in numbered if n is not None)]


@dataclass(slots=True)
class SegmentReader:
    """One segment, read front to back with one record in memory.

    Attributes:
        path: The file.
        header: Read by `open_segment`.
        torn_bytes: After the last record: bytes of an unfinished frame that were left out.
    """

    path: Path
    header: recording_pb2.SegmentHeader
    torn_bytes: int = 0

    def records(self) -> Iterator[recording_pb2.Record]:
        """The records, in order.

        Raises:
            RecordingError: The file is damaged, and where.
        """
        with _open(self.path) as file:
            frames = _Frames(self.path, file)
            next(frames)  # the header
            for payload in frames:
                record = recording_pb2.Record()
                _parse(record, payload, frames)
                yield record
            self.torn_bytes = frames.torn_bytes


def open_segment(path: Path) -> SegmentReader:
    """Read a segment's header.

    Raises:
        EmptySegmentError: It was cut off before its header.
        RecordingError: It is no segment, or none that this version reads.
    """
    with _open(path) as file:
        frames = _Frames(path, file)
        payload = next(frames, None)
        if payload is None:
            raise EmptySegmentError(f"{path}: nothing is in it; it was cut off as it was begun")
        header = recording_pb2.SegmentHeader()
        _parse(header, payload, frames)
    if len(header.recording_id) != 16 or not header.HasField("hello"):
        raise RecordingError(f"{path}: its header is none: no recording_id of 16 bytes or no hello")
    return SegmentReader(path, header)


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise RecordingError(f"cannot read {path}: {error.strerror}") from None


class _Frames:
    """Payloads of the frames of an open file."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.offset = 0
        self.torn_bytes = 0
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self._read_preamble()

    def _read_preamble(self) -> None:
        data = self._read(_PREAMBLE.size)
        if len(data) < _PREAMBLE.size:
            if (MAGIC + _LENGTH.pack(FORMAT_VERSION)).startswith(data):
                return  # an empty file: cut off in its first moment
            raise RecordingError(f"{self.path} is no recording of Pagewire")
        magic, version = _PREAMBLE.unpack(data)
        if magic != MAGIC:
            raise RecordingError(f"{self.path} is no recording of Pagewire")
        if version != FORMAT_VERSION:
            raise RecordingError(
                f"{self.path} has format version {version}, this pagewire reads version "
                f"{FORMAT_VERSION}. Use the pagewire version that wrote it"
            )

    def __iter__(self) -> _Frames:
        return self

    def __next__(self) -> bytes:
        begin = self.offset
        head = self._read(_FRAME.size)
        if len(head) < _FRAME.size:
            return self._end(begin)
        length, length_check, check = _FRAME.unpack(head)
        if zlib.crc32(head[: _LENGTH.size]) != length_check:
            # A file system may give a crashed writer zeros for what it had not written yet.
            if not any(head) and self._rest_is_zero():
                return self._end(begin)
            raise self.damaged(begin, "the length of a record does not match its checksum")
        if length > MAX_PAYLOAD_BYTES:
            raise self.damaged(begin, f"a record of {length} bytes; at most {MAX_PAYLOAD_BYTES}")
        if length > self._size - self.offset:
            return self._end(begin)
        payload = self._read(length)
        if len(payload) < length:
            return self._end(begin)
        if zlib.crc32(payload) != check:
            if self.offset == self._size or self._rest_is_zero():
                return self._end(begin)
            raise self.damaged(begin, "a record does not match its checksum")
        if length > _MAX_STRUCTURE_BYTES:
            self._check_structure(payload, begin)
        return payload

    def damaged(self, offset: int, problem: str) -> RecordingError:
        return RecordingError(
            f"{self.path} is damaged at byte {offset} of {self._size}: {problem}. To replay what "
            f"comes before, cut a copy of it there: truncate -s {offset} FILE"
        )

    def _read(self, size: int) -> bytes:
        try:
            data = self._file.read(size)
        except OSError as error:
            raise RecordingError(f"cannot read {self.path}: {error.strerror}") from None
        self.offset += len(data)
        return data

    def _end(self, begin: int) -> bytes:
        self.torn_bytes = self._size - begin
        raise StopIteration

    def _rest_is_zero(self) -> bool:
        while data := self._read(1 << 20):
            if data.count(0) != len(data):
                return False
        return True

    def _check_structure(self, payload: bytes, begin: int) -> None:
        try:
            size = len(payload) - _id_bytes(memoryview(payload), _BULK)
        except (ValueError, IndexError):
            raise self.damaged(begin, "a record is no message") from None
        if size > _MAX_STRUCTURE_BYTES:
            raise self.damaged(
                begin,
                f"a record has {size} bytes beside its ids; at most {_MAX_STRUCTURE_BYTES}",
            )


def _parse(
    message: recording_pb2.Record | recording_pb2.SegmentHeader, payload: bytes, frames: _Frames
) -> None:
    try:
        message.ParseFromString(payload)
    except DecodeError:
        raise frames.damaged(
            frames.offset - len(payload), "a record is no message of its kind"
        ) from None


# Field numbers on the way to columns of ids; None: the field is such a column. A Record's are
# `sent` (a ControlMessage, its Plan, AddedRows with token_ids and block_ids) and `row`.
_Fields = dict[int, "_Fields | None"]
_ADDED: _Fields = {2: None, 9: None}
_PLAN: _Fields = {4: None, 5: _ADDED, 8: None, 9: None, 10: None, 11: None, 12: None}
_BULK: _Fields = {2: {3: _PLAN}, 5: {1: _ADDED}}


def _id_bytes(data: memoryview, fields: _Fields) -> int:
    """Bytes of a message that are columns of ids, found without parsing it.

    Once more than _MAX_STRUCTURE_BYTES are none it looks no further.

    Raises:
        ValueError, IndexError: It is none.
    """
    total, at = 0, 0
    while at < len(data):
        if at - total > _MAX_STRUCTURE_BYTES:
            break  # the answer is known, and looking at millions of fields takes seconds
        key, at = _varint(data, at)
        wire_type = key & 7
        if wire_type == 2:
            length, at = _varint(data, at)
            if length > len(data) - at:
                raise ValueError("a field that ends behind its message")
            if key >> 3 in fields:
                inner = fields[key >> 3]
                total += length if inner is None else _id_bytes(data[at : at + length], inner)
            at += length
        elif wire_type == 0:
            _, at = _varint(data, at)
        elif wire_type in (1, 5):
            at += 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"wire type {wire_type}")
    return total


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("a number of more than 10 bytes")
