"""Reading recordings of all kinds, hostile ones included, and the words of the command."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pagewire_client import cli
from pagewire_client.replay.comparison import refusal, worker_flags
from pagewire_client.replay.recording import Recording, open_recording
from pagewire_client.replay.restore import blocks_plans, rows_plans
from pagewire_client.replay.survey import survey_run

from protos.pagewire.v1 import recording_pb2, worker_pb2
from protos.recorded_rows import RecordedRows, read_column
from protos.recording_file import RecordingError, frame, preamble, segment_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parents[3]
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


# Which files belong together.


def test_segments_in_a_row_are_one_run_and_repeat_nothing(tmp_path: Path) -> None:
    write(tmp_path, header(1), [*opening(), start(2, added(0, [7, 8], [1]))])
    row = recording_pb2.RecordedRow(added=added(0, [7, 8, 9], [1]), num_known_tokens=2)
    continuing = header(
        2, welcome=worker_pb2.Welcome(num_blocks=64), version=2, num_rows=1, num_plans=1
    )
    write(tmp_path, continuing, [Record(row=row), plan(3), plan(4)])
    [run] = open_recording(tmp_path).runs
    versions = [r.sent.plan.version for r in run.events() if r.sent.HasField("plan")]
    # The 3 that the second begins with is of the first, which was not written that far here.
    assert versions == [2, 4]
    # By itself it begins with it.
    [run] = open_recording(tmp_path / segment_name(2)).runs
    assert [r.sent.plan.version for r in run.events()] == [3, 4]
    assert run.rows() == [row]


def test_what_is_missing_between_segments_is_told(tmp_path: Path) -> None:
    write(tmp_path, header(1), opening())
    write(tmp_path, header(3), opening())
    write(tmp_path, header(4, recording=2), opening())
    (tmp_path / segment_name(5)).write_bytes(preamble())  # cut off as it was begun
    runs = open_recording(tmp_path).runs
    assert [run.notes for run in runs] == [
        [],
        ["messages before it are missing"],
        ["another start of the control plane"],
    ]


def test_a_directory_with_several_replicas_asks_which(tmp_path: Path) -> None:
    write(tmp_path / "replica-a", header(1), opening())
    assert len(open_recording(tmp_path).runs) == 1
    write(tmp_path / "replica-b", header(1), opening())
    with pytest.raises(RecordingError, match=r"2 replicas.*\n.*replica-a\n.*replica-b"):
        open_recording(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecordingError, match="holds no recording"):
        open_recording(tmp_path / "empty")


@pytest.mark.parametrize(
    "records",
    [
        [plan(2)],
        [sent(reset=worker_pb2.Reset(version=1))],
        [*opening()[:2], plan(2)],
        [*opening(), received(hello=hello())],
        [ENDED],
        [*opening(), ENDED, result(2)],
        [Record()],
        [*opening(), Record(row=recording_pb2.RecordedRow())],
        opening(version=(1 << 62) + 1),
    ],
)
def test_an_order_that_no_stream_has_is_refused(tmp_path: Path, records: list[Record]) -> None:
    with pytest.raises(RecordingError):
        survey_run(opened(tmp_path, *records).runs[0])


# Cached blocks.


def lives(recording: Recording) -> list[dict[int, list[int]]]:
    """Per life: block to the tokens before and in it."""
    found: list[dict[int, list[int]]] = []
    for life in survey_run(recording.runs[0]).lives:
        blocks: dict[int, list[int]] = {}
        for block, index in life.content_of.items():
            tokens: list[int] = []
            while index >= 0:
                content = life.contents[index]
                tokens = [*read_column(content.tokens, ""), *tokens]
                index = content.parent
            blocks[block] = tokens
        found.append(blocks)
    return found


def test_blocks_that_are_hit_and_were_not_written_are_found_with_their_tokens(
    tmp_path: Path,
) -> None:
    tokens = list(range(10, 19))
    recording = opened(
        tmp_path,
        *opening(applied_version=0),
        start(2, added(0, tokens, [5, 6, 7], num_hits=2)),
        result(2, 99),
        # Block 7 was handed out by plan 2, 8 was not.
        start(3, added(1, [*tokens[:8], 30, 31, 32, 33, 40], [5, 6, 8, 9], num_hits=3)),
        result(3, 98, 97),
        ENDED,
        # The same memory: what was written in it still is.
        *opening(version=9, applied_version=3),
        start(10, added(0, tokens, [5, 6, 10], num_hits=2)),
        result(10, 1),
        ENDED,
        # Another memory.
        *opening(epoch=2),
        start(2, added(0, tokens, [5, 7], num_hits=1)),
    )
    assert lives(recording) == [
        {5: tokens[:4], 6: tokens[:8], 8: [*tokens[:8], 30, 31, 32, 33]},
        {5: tokens[:4]},
    ]


def test_memory_that_others_wrote_in_between_is_another_life(tmp_path: Path) -> None:
    tokens = list(range(5))
    recording = opened(
        tmp_path,
        *opening(),
        start(2, added(0, tokens, [1, 2])),
        result(2, 9),
        ENDED,
        *opening(version=51, applied_version=50),
        start(52, added(0, tokens, [1, 3], num_hits=1)),
    )
    assert lives(recording) == [{}, {1: tokens[:4]}]


def test_a_hit_on_a_block_whose_plan_never_counted_is_a_fault_of_the_control_plane(
    tmp_path: Path,
) -> None:
    tokens = list(range(5))
    recording = opened(
        tmp_path,
        *opening(),
        start(2, added(0, tokens, [1, 2])),
        sent(reset=worker_pb2.Reset(version=3)),
        start(4, added(0, tokens, [1, 3], num_hits=1)),
    )
    with pytest.raises(RecordingError, match="row 0: a prefix hit on block 1, which plan 2"):
        survey_run(recording.runs[0])


def test_two_contents_of_one_block_are_a_fault_of_the_control_plane(tmp_path: Path) -> None:
    recording = opened(
        tmp_path,
        *opening(),
        start(2, added(0, [1, 2, 3, 4, 5], [1, 2], num_hits=1)),
        start(3, added(1, [6, 2, 3, 4, 5], [1, 3], num_hits=1)),
    )
    with pytest.raises(RecordingError, match=r"plan 3, row 1: .*block 1 for tokens 6.*tokens 1"):
        survey_run(recording.runs[0])


class Checker:
    """What a worker checks of the plans that restore a state, and the tokens it then has."""

    def __init__(self) -> None:
        self.blocks: dict[int, list[int]] = {}  # content, with everything before it
        self.rows = RecordedRows()
        self.rows.reset(0)

    def run(self, plans: Iterator[worker_pb2.Plan]) -> list[int]:
        """Rows that sampled in the last one."""
        sampled: list[int] = []
        for plan in plans:
            plan.base_version, plan.version = self.rows.version, self.rows.version + 1
            assert sum(read_column(plan.chunk_num_tokens, "")) <= hello().max_num_batched_tokens
            held = {b for s in self.rows for b in s.blocks}
            held -= {
                block
                for row in read_column(plan.removed_rows, "")
                if (sequence := self.rows.get(row)) is not None
                for block in sequence.blocks
            }
            for row in plan.added_rows:
                blocks = list(read_column(row.block_ids, ""))
                tokens = list(read_column(row.token_ids, ""))
                assert not held & set(blocks[row.num_hit_blocks :])
                for index in range(row.num_hit_blocks):
                    assert self.blocks[blocks[index]] == tokens[: (index + 1) * BLOCK_SIZE]
                held |= set(blocks)
            self.rows.order(plan)
            probe = RecordedRows()
            probe.restore(self.rows.version, list(self.rows.snapshot()))
            probe.unconfirmed.append(plan)
            probe._apply(plan)
            sampled = [s.row for s in probe._advance(plan)]
            self.rows.take(
                worker_pb2.StepResult(
                    version=plan.version,
                    counts=b"\1" * len(sampled),
                    token_ids=column(*[50 + row for row in sampled]),
                )
            )
            for sequence in self.rows:
                for index in range(sequence.num_computed // BLOCK_SIZE):
                    end = (index + 1) * BLOCK_SIZE
                    self.blocks[sequence.blocks[index]] = list(sequence.tokens[:end])
        return sampled


def test_cached_blocks_are_computed_in_chunks_and_shared_beginnings_once(tmp_path: Path) -> None:
    base = list(range(10, 34))  # six blocks
    recording = opened(
        tmp_path,
        *opening(),
        start(2, added(0, [*base, 1], [1, 2, 3, 4, 5, 6, 7], num_hits=6)),
        result(2, 9),
        start(3, added(1, [*base[:8], 90, 91, 92, 93, 1], [1, 2, 8, 9], num_hits=3)),
        result(3, 9, 9),
        # Its first two blocks were written in the recording, the third before.
        start(4, added(2, [60, 61, 62, 63, 64, 65, 66, 67, 1], [10, 11, 12])),
        result(4, 9, 9, 9),
        start(
            5,
            added(
                3,
                [60, 61, 62, 63, 64, 65, 66, 67, 70, 71, 72, 73, 1],
                [10, 11, 13, 14],
                num_hits=3,
            ),
        ),
    )
    wanted = lives(recording)[0]
    assert set(wanted) == {1, 2, 3, 4, 5, 6, 8, 13}
    [life] = survey_run(recording.runs[0]).lives
    checker = Checker()
    checker.run(blocks_plans(life, hello(), 64))
    assert {block: checker.blocks[block] for block in wanted} == wanted


def test_rows_come_back_where_they_were_and_decode_from_their_last_token() -> None:
    def row(number: int, tokens: list[int], blocks: list[int], **fields: int) -> object:
        message = added(number, tokens, blocks)
        message.num_prompt_tokens = 2
        return recording_pb2.RecordedRow(added=message, num_known_tokens=len(tokens), **fields)

    shared = [10, 11, 12, 13, 14, 15, 16, 17]
    decoding = row(4, [*shared, 20, 54], [1, 2, 3])
    decoding.num_known_tokens, decoding.num_computed_tokens = 8, 9
    short = row(5, [3, 4, 55], [4])
    short.num_known_tokens, short.num_computed_tokens = 2, 2
    prefilling = row(1, [*shared, *range(30, 60)], [1, 2, *range(5, 12)], num_computed_tokens=28)
    untouched = row(0, [1, 2, 3], [20])
    # A row that stopped long ago: the plans went on counting.
    stopped = row(2, [8, 9, 52], [21, 22], num_computed_tokens=7, finish_reason=1)
    stopped.num_known_tokens = 2
    rows = [decoding, short, prefilling, untouched, stopped]
    checker = Checker()
    sampled = checker.run(rows_plans(rows, hello()))
    assert sampled == [2, 4, 5]
    for recorded in rows:
        sequence = checker.rows.get(recorded.added.row)
        assert sequence is not None
        assert sequence.tokens.tobytes() == recorded.added.token_ids
        assert sequence.blocks.tobytes() == recorded.added.block_ids
        if recorded is not stopped:
            assert sequence.num_computed == recorded.num_computed_tokens


def test_paused_rows_are_paused_again() -> None:
    recorded = recording_pb2.RecordedRow(
        added=added(0, [1, 2, 50], [1]), num_known_tokens=2, num_computed_tokens=2, paused=True
    )
    recorded.added.num_prompt_tokens = 2
    checker = Checker()
    checker.run(rows_plans([recorded], hello()))
    sequence = checker.rows.get(0)
    assert sequence is not None
    assert sequence.is_paused
    assert list(sequence.tokens) == [1, 2, 50]


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
