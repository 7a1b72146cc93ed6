"""What a run needs before it can be played: cached blocks that it hits and did not write.

A prefix hit names blocks whose content was computed earlier, perhaps before the part of the
recording that is kept, or by an earlier control plane. But the row that hits them brings its
tokens, and a block's content follows from them. So the run is read once without playing it, and
whatever it will hit is computed on the worker before it begins.

Owns: which blocks those are, and for which tokens. Does not know: messages to a worker.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protos.recorded_rows import read_column
from protos.recording_file import RecordingError

if TYPE_CHECKING:
    from array import array

    from pagewire_client.replay.recording import Run
    from protos.pagewire.v1 import recording_pb2, worker_pb2


@dataclass(slots=True)
class Content:
    """One block's worth of tokens and what came before them.

    Attributes:
        parent: Index of the content before; -1: it begins a sequence.
        depth: Blocks before it.
        tokens: A column of block_size ids.
        blocks: Blocks that must hold it, none if it only leads to others.
    """

    parent: int
    depth: int
    tokens: bytes
    blocks: list[int] = field(default_factory=list[int])


@dataclass(slots=True)
class Life:
    """The time in which one worker's KV memory is followed without interruption.

    Attributes:
        contents: What must be computed before it begins; parents before children.
        content_of: Block to index of its content.
    """

    contents: list[Content] = field(default_factory=list[Content])
    content_of: dict[int, int] = field(default_factory=dict[int, int])


@dataclass(slots=True)
class Survey:
    """A run, read but not played.

    Attributes:
        lives: In order; see `LifeTracker`.
        num_plans: In all of them together.
    """

    lives: list[Life] = field(default_factory=list[Life])
    num_plans: int = 0


class LifeTracker:
    """Says where a new life begins. Both passes over a run use it and agree."""

    def __init__(self, header: recording_pb2.SegmentHeader) -> None:
        self._epoch = header.hello.epoch if header.HasField("welcome") else b""
        self._sent_version = header.version + header.num_plans

    def begins(self, record: recording_pb2.Record) -> bool:
        """Whether this record begins one: other memory, or memory that others wrote meanwhile."""
        if record.HasField("sent"):
            version = record.sent.reset.version or record.sent.plan.version
            self._sent_version = max(self._sent_version, version)
        if not (record.HasField("received") and record.received.HasField("hello")):
            return False
        hello = record.received.hello
        if hello.epoch == self._epoch and hello.applied_version <= self._sent_version:
            return False
        self._epoch, self._sent_version = hello.epoch, hello.applied_version
        return True


def survey_run(run: Run) -> Survey:
    """Read a run from front to back.

    Raises:
        RecordingError: It is damaged, contradicts itself, or hits what cannot be there.
    """
    survey = Survey()
    tracker = LifeTracker(run.header)
    writes = _Writes(run.header.hello.kv_geometry.block_size)
    if run.header.HasField("welcome"):
        survey.lives.append(writes.life)
        for row in run.rows():
            writes.known.update(read_column(row.added.block_ids, "block_ids"))
    for record in run.events():
        if tracker.begins(record):
            writes = _Writes(record.received.hello.kv_geometry.block_size)
            survey.lives.append(writes.life)
        event = record.WhichOneof("event")
        if event == "sent":
            if record.sent.HasField("plan"):
                survey.num_plans += 1
                writes.plan(record.sent.plan)
            elif record.sent.HasField("reset"):
                writes.lose_unconfirmed()
        elif event == "received" and record.received.HasField("step_result"):
            writes.confirm(record.received.step_result.version)
        elif event == "stream_ended":
            writes.lose_unconfirmed()
    return survey


class _Writes:
    """Which blocks a life has written, as far as it was read."""

    def __init__(self, block_size: int) -> None:
        self.life = Life()
        self.known: set[int] = set()
        self._lost: dict[int, int] = {}  # block: version of the plan that never counted
        self._unconfirmed: deque[tuple[int, array[int]]] = deque()
        self._block_bytes = block_size * 4
        self._indices: dict[tuple[int, bytes], int] = {}

    def plan(self, plan: worker_pb2.Plan) -> None:
        handed_out = read_column(plan.appended_block_ids, "appended_block_ids")
        for added in plan.added_rows:
            blocks = read_column(added.block_ids, "block_ids")
            num_hits = added.num_hit_blocks
            if not 0 <= num_hits * self._block_bytes <= len(added.token_ids) or num_hits > len(
                blocks
            ):
                raise RecordingError(
                    f"plan {plan.version}, row {added.row}: {num_hits} prefix hits, more than it "
                    "has blocks or tokens"
                )
            self._hit(added, blocks[:num_hits], plan.version)
            handed_out.extend(blocks[num_hits:])
        for block in handed_out:
            self.known.add(block)
            self._lost.pop(block, None)
        self._unconfirmed.append((plan.version, handed_out))

    def confirm(self, version: int) -> None:
        while self._unconfirmed and self._unconfirmed[0][0] <= version:
            self._unconfirmed.popleft()

    def lose_unconfirmed(self) -> None:
        """What these plans wrote never counted: nobody may hit it."""
        for version, blocks in self._unconfirmed:
            for block in blocks:
                self.known.discard(block)
                self._lost[block] = version
        self._unconfirmed.clear()

    def _hit(self, added: worker_pb2.AddedRow, blocks: array[int], version: int) -> None:
        if all(block in self.known for block in blocks):
            return
        index = -1
        for position, block in enumerate(blocks):
            begin = position * self._block_bytes
            tokens = added.token_ids[begin : begin + self._block_bytes]
            index = self._content(index, position, tokens)
            if block in self.known:
                continue
            if block in self._lost:
                raise RecordingError(
                    f"plan {version}, row {added.row}: a prefix hit on block {block}, which plan "
                    f"{self._lost[block]} handed out but never filled, as its step never counted. "
                    "This is a fault of the control plane that was recorded"
                )
            if (before := self.life.content_of.setdefault(block, index)) != index:
                first = self.life.contents[before].tokens
                raise RecordingError(
                    f"plan {version}, row {added.row}: a prefix hit on block {block} for "
                    f"{_some(tokens)}, but an earlier hit on it was for {_some(first)}, and no "
                    "plan wrote it in between. This is a fault of the control plane that was "
                    "recorded"
                )
            if block not in self.life.contents[index].blocks:
                self.life.contents[index].blocks.append(block)

    def _content(self, parent: int, depth: int, tokens: bytes) -> int:
        key = (parent, tokens)
        index = self._indices.get(key)
        if index is None:
            index = self._indices[key] = len(self.life.contents)
            self.life.contents.append(Content(parent, depth, tokens))
        return index


def _some(tokens: bytes) -> str:
    values = read_column(tokens[: len(tokens) // 4 * 4], "tokens")
    return f"tokens {', '.join(map(str, values[:4]))}, ..."
