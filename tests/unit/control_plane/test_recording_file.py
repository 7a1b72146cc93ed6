"""Frames, torn ends and damage, of files written byte by byte."""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING

import pytest

from protos.pagewire.v1 import recording_pb2, worker_pb2
from protos.recording_file import (
    FORMAT_VERSION,
    MAGIC,
    MAX_PAYLOAD_BYTES,
    EmptySegmentError,
    RecordingError,
    frame,
    list_segments,
    open_segment,
    preamble,
    segment_name,
)

if TYPE_CHECKING:
    from pathlib import Path


def header() -> bytes:
    message = recording_pb2.SegmentHeader(
        recording_id=bytes(16), hello=worker_pb2.Hello(worker_id="w")
    )
    return preamble() + frame(message.SerializeToString())


def record(version: int) -> bytes:
    message = recording_pb2.Record(offset_us=version)
    message.sent.reset.version = version
    return frame(message.SerializeToString())


def versions(path: Path) -> tuple[list[int], int]:
    segment = open_segment(path)
    return [r.sent.reset.version for r in segment.records()], segment.torn_bytes


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / segment_name(1)


def test_what_was_written_is_read(path: Path) -> None:
    path.write_bytes(header() + record(1) + record(2))
    assert versions(path) == ([1, 2], 0)


def test_a_torn_end_of_any_length_is_cut(path: Path) -> None:
    whole, torn = header() + record(1), record(2)
    for size in range(len(torn)):
        path.write_bytes(whole + torn[:size])
        assert versions(path) == ([1], size)


def test_zeros_that_a_crash_left_are_cut(path: Path) -> None:
    path.write_bytes(header() + record(1) + bytes(5000))
    assert versions(path) == ([1], 5000)
    # The last frame's length had reached the disk, its end had not.
    torn = bytearray(record(2))
    torn[-3:] = bytes(3)
    path.write_bytes(header() + record(1) + torn + bytes(100))
    assert versions(path) == ([1], len(torn) + 100)


@pytest.mark.parametrize("offset", [0, 4, 8, 12])
def test_a_flipped_byte_with_more_behind_it_is_damage_and_says_where(
    path: Path, offset: int
) -> None:
    data = bytearray(header() + record(1) + record(2) + record(3))
    begin = len(header()) + len(record(1))
    data[begin + offset] ^= 1
    path.write_bytes(data)
    with pytest.raises(RecordingError, match=f"damaged at byte {begin} of {len(data)}"):
        versions(path)


def test_every_flipped_byte_is_noticed(path: Path) -> None:
    data = header() + record(1) + record(2)
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 0x10
        path.write_bytes(changed)
        try:
            read, torn = versions(path)
        except RecordingError:
            continue
        # Only the last record can pass for one that was not finished.
        assert read == [1]
        assert torn == len(record(2))


def test_a_file_cut_off_in_its_header_is_empty(path: Path) -> None:
    for size in range(len(header())):
        path.write_bytes(header()[:size])
        with pytest.raises(EmptySegmentError):
            open_segment(path)


def test_other_files_and_versions_are_refused(path: Path) -> None:
    path.write_bytes(b"PNG or something else")
    with pytest.raises(RecordingError, match="no recording of Pagewire"):
        open_segment(path)
    path.write_bytes(MAGIC + struct.pack("<I", FORMAT_VERSION + 1) + b"whatever follows")
    with pytest.raises(RecordingError, match=f"format version {FORMAT_VERSION + 1}"):
        open_segment(path)
    with pytest.raises(RecordingError, match="cannot read"):
        open_segment(path.parent / "missing")
    with pytest.raises(RecordingError, match="cannot read"):
        open_segment(path.parent)
    path.write_bytes(preamble() + frame(b"") + record(1))
    with pytest.raises(RecordingError, match="its header is none"):
        open_segment(path)


def test_a_length_is_believed_only_up_to_the_limit(path: Path) -> None:
    length = struct.pack("<I", MAX_PAYLOAD_BYTES + 1)
    path.write_bytes(header() + length + struct.pack("<II", zlib.crc32(length), 0) + bytes(100))
    with pytest.raises(RecordingError, match=f"a record of {MAX_PAYLOAD_BYTES + 1} bytes"):
        versions(path)
    with pytest.raises(RecordingError):
        frame(bytes(MAX_PAYLOAD_BYTES + 1))


def test_a_record_that_would_parse_into_gigabytes_is_refused_unparsed(path: Path) -> None:
    # Ten million empty rows: 2 bytes each in the file, a hundred in memory.
    rows = b"\x2a\x00" * 10_000_000
    plan = b"\x1a" + _varint(len(rows)) + rows
    payload = b"\x12" + _varint(len(plan)) + plan
    path.write_bytes(header() + frame(payload) + record(2))
    with pytest.raises(RecordingError, match="beside its ids"):
        versions(path)


def test_a_prompt_of_millions_of_tokens_is_read(path: Path) -> None:
    message = recording_pb2.Record()
    message.sent.plan.added_rows.add(token_ids=bytes(4 * 3_000_000))
    path.write_bytes(header() + frame(message.SerializeToString()))
    [read] = open_segment(path).records()
    assert read == message


def test_bytes_that_are_no_message_are_damage(path: Path) -> None:
    path.write_bytes(header() + frame(b"\xff\xff\xff") + record(2))
    with pytest.raises(RecordingError, match="no message of its kind"):
        versions(path)


def test_segments_are_listed_by_number_and_nothing_else_is(tmp_path: Path) -> None:
    for name in ("00000010.pwrec", "00000009.pwrec", "9.pwrec", "00000001.pwrec.tmp", "notes"):
        (tmp_path / name).touch()
    assert [p.name for p in list_segments(tmp_path)] == ["00000009.pwrec", "00000010.pwrec"]


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 127:
        data.append(value & 127 | 128)
        value >>= 7
    return bytes([*data, value])
