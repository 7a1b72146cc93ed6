"""Recordings written record by record: the messages of a small replica, and files of them."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from pagewire_client.replay.recording import Recording, open_recording

from protos.pagewire.v1 import recording_pb2, worker_pb2
from protos.recording_file import frame, preamble, segment_name

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

BLOCK_SIZE = 4


def column(*values: int) -> bytes:
    return array("i", values).tobytes()


def hello(epoch: int = 1, applied_version: int = 0) -> worker_pb2.Hello:
    return worker_pb2.Hello(
        protocol_version=1,
        worker_id="w0",
        replica_id="r0",
        tp_size=1,
        epoch=bytes([epoch]) * 16,
        applied_version=applied_version,
        model_fingerprint=bytes(32),
        kv_geometry=worker_pb2.KvGeometry(
            num_layers=1, num_kv_heads=1, head_size=8, dtype="float32", block_size=BLOCK_SIZE
        ),
        num_blocks=64,
        max_num_seqs=8,
        max_model_len=128,
        max_num_batched_tokens=16,
    )


Record = recording_pb2.Record


def received(**message: object) -> Record:
    return Record(received=worker_pb2.WorkerMessage(**message))  # type: ignore[arg-type]


def sent(**message: object) -> Record:
    return Record(sent=worker_pb2.ControlMessage(**message))  # type: ignore[arg-type]


def opening(version: int = 1, **identity: int) -> list[Record]:
    return [
        received(hello=hello(**identity)),
        sent(welcome=worker_pb2.Welcome(term=1, num_blocks=64, lookahead=2)),
        sent(reset=worker_pb2.Reset(version=version)),
    ]


def plan(version: int, **fields: object) -> Record:
    message = worker_pb2.Plan(base_version=version - 1, version=version, num_steps=1, **fields)  # type: ignore[arg-type]
    return sent(plan=message)


def added(
    row: int, tokens: Sequence[int], blocks: Sequence[int], *, num_hits: int = 0
) -> worker_pb2.AddedRow:
    return worker_pb2.AddedRow(
        row=row,
        token_ids=column(*tokens),
        num_prompt_tokens=len(tokens),
        max_total_tokens=100,
        block_ids=column(*blocks),
        num_hit_blocks=num_hits,
        num_computed_tokens=num_hits * BLOCK_SIZE,
    )


def start(version: int, row: worker_pb2.AddedRow) -> Record:
    """A plan that adds a row and computes all of it."""
    count = len(row.token_ids) // 4 - row.num_computed_tokens
    return plan(
        version, added_rows=[row], chunk_rows=column(row.row), chunk_num_tokens=column(count)
    )


def result(version: int, *tokens: int) -> Record:
    return received(
        step_result=worker_pb2.StepResult(
            version=version, counts=b"\1" * len(tokens), token_ids=column(*tokens)
        )
    )


ENDED = Record(stream_ended=recording_pb2.StreamEnded())


def header(number: int = 1, recording: int = 1, **fields: object) -> recording_pb2.SegmentHeader:
    return recording_pb2.SegmentHeader(
        recording_id=bytes([recording]) * 16,
        segment=number,
        hello=hello(),
        replica_id="r0",
        **fields,  # type: ignore[arg-type]
    )


def write(directory: Path, head: recording_pb2.SegmentHeader, records: Sequence[Record]) -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / segment_name(head.segment)
    frames = [frame(m.SerializeToString()) for m in (head, *records)]
    path.write_bytes(preamble() + b"".join(frames))
    return path


def opened(tmp_path: Path, *records: Record) -> Recording:
    return open_recording(write(tmp_path, header(), records))
