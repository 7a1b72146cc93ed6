"""Which files make a recording, and what must be computed before it can be played."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from pagewire_client.replay.recording import Recording, open_recording
from pagewire_client.replay.restore import blocks_plans, rows_plans
from pagewire_client.replay.survey import survey_run
from recorded_messages import (
    BLOCK_SIZE,
    ENDED,
    Record,
    added,
    column,
    header,
    hello,
    opened,
    opening,
    plan,
    received,
    result,
    sent,
    start,
    write,
)

from protos.pagewire.v1 import recording_pb2, worker_pb2
from protos.recorded_rows import RecordedRows, read_column
from protos.recording_file import RecordingError, preamble, segment_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


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
        for ordered in plans:
            ordered.base_version, ordered.version = self.rows.version, self.rows.version + 1
            assert sum(read_column(ordered.chunk_num_tokens, "")) <= hello().max_num_batched_tokens
            held = {b for s in self.rows for b in s.blocks}
            held -= {
                block
                for row in read_column(ordered.removed_rows, "")
                if (sequence := self.rows.get(row)) is not None
                for block in sequence.blocks
            }
            for row in ordered.added_rows:
                blocks = list(read_column(row.block_ids, ""))
                tokens = list(read_column(row.token_ids, ""))
                assert not held & set(blocks[row.num_hit_blocks :])
                for index in range(row.num_hit_blocks):
                    assert self.blocks[blocks[index]] == tokens[: (index + 1) * BLOCK_SIZE]
                held |= set(blocks)
            self.rows.order(ordered)
            probe = RecordedRows()
            probe.restore(self.rows.version, list(self.rows.snapshot()))
            probe.unconfirmed.append(ordered)
            probe._apply(ordered)
            sampled = [s.row for s in probe._advance(ordered)]
            self.rows.take(
                worker_pb2.StepResult(
                    version=ordered.version,
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
