"""Plans that bring a worker into the state in which a run begins.

KV memory is not recorded: what it held is computed again from tokens, first the cached blocks that
the run will hit (`blocks_plans`), then, after a Reset, the sequences in their rows (`rows_plans`).

Owns: these plans. Does not know: whether they work; the player sends them and looks at the results.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from protos.pagewire.v1 import inference_pb2, recording_pb2, worker_pb2
from protos.recorded_rows import read_column, write_column
from protos.recording_file import RecordingError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagewire_client.replay.survey import Content, Life

ERROR = int(inference_pb2.FINISH_REASON_ERROR)


def blocks_plans(life: Life, hello: worker_pb2.Hello, num_blocks: int) -> Iterator[worker_pb2.Plan]:
    """Compute cached blocks in row 0; versions are not set.

    Raises:
        RecordingError: They cannot all have been there at once.
    """
    if any(not 1 <= block < num_blocks for block in life.content_of):
        raise RecordingError("a prefix hit on a block that the worker does not have")
    done: set[int] = set()
    is_occupied = False
    # The longest first: on the way to it most others are computed too.
    for index in sorted(range(len(life.contents)), key=lambda i: -life.contents[i].depth):
        for block in life.contents[index].blocks:
            if block in done:
                continue
            path = _path(life.contents, index)
            table = _table(path, block, life, done, num_blocks)
            num_hits = 0
            while num_hits < len(table) and table[num_hits] in done:
                num_hits += 1
            tokens = array("i")
            for content in path:
                tokens.extend(read_column(content.tokens, "tokens"))
            added = worker_pb2.AddedRow(
                num_prompt_tokens=1,
                sampling=inference_pb2.SamplingParams(temperature=0.0),
                max_total_tokens=len(tokens) + 2,
            )
            # One token more than is computed, so that nothing is sampled.
            added.token_ids = write_column(tokens + array("i", [0]))
            added.block_ids = write_column(array("i", table))
            added.num_hit_blocks = num_hits
            added.num_computed_tokens = num_hits * hello.kv_geometry.block_size
            plans = _prefill(added, len(tokens), hello.max_num_batched_tokens)
            for number, plan in enumerate(plans):
                if number == 0 and is_occupied:
                    plan.removed_rows = write_column(array("i", [0]))
                yield plan
            is_occupied = True
            # A block that nobody asked for holds other tokens next time.
            done.update(b for b in table if b in life.content_of)


def _path(contents: list[Content], index: int) -> list[Content]:
    path: list[Content] = []
    while index >= 0:
        path.append(contents[index])
        index = contents[index].parent
    path.reverse()
    return path


def _table(
    path: list[Content], last: int, life: Life, done: set[int], num_blocks: int
) -> list[int]:
    """A block for each content of the path: one that shall hold it, else one nobody asked for."""
    spare = (block for block in range(num_blocks - 1, 0, -1) if block not in life.content_of)
    table: list[int] = []
    for content in path[:-1]:
        wanted = [block for block in content.blocks if block not in done] or content.blocks
        block = wanted[0] if wanted else next(spare, None)
        if block is None:
            raise RecordingError("more blocks are hit than the worker has")
        table.append(block)
    return [*table, last]


def rows_plans(
    rows: list[recording_pb2.RecordedRow], hello: worker_pb2.Hello
) -> Iterator[worker_pb2.Plan]:
    """Put sequences into their rows; versions are not set.

    Decoding rows come without their last token and sample it again in the last plan: so the device
    has it where it belongs, and a row that had stopped stops again.

    Raises:
        RecordingError: A row cannot have been like that.
    """
    block_size = hello.kv_geometry.block_size
    done: set[int] = set()
    last_chunks: dict[bool, list[int]] = {True: [], False: []}  # by whether the row is paused
    for recorded in rows:
        added = worker_pb2.AddedRow()
        added.CopyFrom(recorded.added)
        blocks = read_column(added.block_ids, "block_ids")
        tokens = read_column(added.token_ids, "token_ids")
        num_computed = recorded.num_computed_tokens
        if num_computed >= recorded.num_known_tokens:
            tokens = tokens[: num_known_before(recorded)]
            num_computed = len(tokens) - 1
            last_chunks[recorded.paused].append(added.row)
        if not tokens or added.num_prompt_tokens > len(tokens):
            raise RecordingError(f"row {added.row} at the start has no token of its own")
        num_hits = 0
        while num_hits < min(len(blocks), num_computed // block_size) and blocks[num_hits] in done:
            num_hits += 1
        added.token_ids = write_column(tokens)
        added.num_hit_blocks = num_hits
        added.num_computed_tokens = num_hits * block_size
        yield from _prefill(added, num_computed, hello.max_num_batched_tokens)
        done.update(blocks[: num_computed // block_size])
    for is_paused in (True, False):
        chunk_rows = sorted(last_chunks[is_paused])
        paused = [] if is_paused else sorted(last_chunks[True])
        if chunk_rows or paused:
            yield worker_pb2.Plan(
                num_steps=1,
                chunk_rows=write_column(array("i", chunk_rows)),
                chunk_num_tokens=write_column(array("i", [1] * len(chunk_rows))),
                paused_rows=write_column(array("i", paused)),
            )


def num_known_before(recorded: recording_pb2.RecordedRow) -> int:
    """Tokens that a decoding row had when it sampled its last one, or failed to."""
    num_tokens = len(recorded.added.token_ids) // 4
    return num_tokens if recorded.finish_reason == ERROR else num_tokens - 1


def _prefill(added: worker_pb2.AddedRow, end: int, budget: int) -> Iterator[worker_pb2.Plan]:
    """Add a row and compute its tokens up to `end`."""
    at = added.num_computed_tokens
    plan = worker_pb2.Plan(num_steps=1, added_rows=[added])
    while True:
        count = min(end - at, budget)
        if count > 0:
            plan.chunk_rows = write_column(array("i", [added.row]))
            plan.chunk_num_tokens = write_column(array("i", [count]))
            at += count
        yield plan
        if at >= end:
            return
        plan = worker_pb2.Plan(num_steps=1)
