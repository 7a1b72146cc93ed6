"""Drives a ModelRunner with hand-made StepWork: the smallest control plane that is correct.

Keeps what a control plane would know of each row, hands out blocks in shuffled order so that no
test depends on which ones, and records the tokens that come back.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from data_plane.step_work import BlockCopies, Forks, NewRow, RowSampling, StepOutput, StepWork

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from data_plane.device_step import DeviceStep
    from data_plane.model_runner import ModelRunner

GREEDY = RowSampling(temperature=0.0)
SAMPLED = RowSampling(temperature=0.9, top_k=40, top_p=0.95)
VOCAB = 97
_RANDOM = random.Random(0)
# Around the edges of blocks of 16, 32 and 64 tokens.
PROMPTS = [
    [_RANDOM.randrange(VOCAB) for _ in range(length)] for length in (1, 15, 16, 17, 40, 63, 64, 65)
]


@dataclass
class DrivenRow:
    """What the host knows of a row."""

    row: int
    token_ids: list[int]  # prompt and every token that came back
    num_known: int  # tokens that were known when it was added
    num_prompt: int
    max_total: int
    block_ids: list[int]
    num_computed: int = 0
    finish_reason: int = 0
    counts: list[int] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt :]


@dataclass
class Ordered:
    """A launched step and the rows it samples, kept with it."""

    pending: DeviceStep
    sampled: list[DrivenRow]


def _int32(values: Iterable[int]) -> np.ndarray:
    return np.array(list(values), np.int32)


class StepDriver:
    def __init__(self, runner: ModelRunner, *, block_size: int, seed: int = 0) -> None:
        self.runner = runner
        self.rows: dict[int, DrivenRow] = {}
        self.version = 0
        self._block_size = block_size
        self._free = list(range(1, runner.num_blocks))
        random.Random(seed).shuffle(self._free)
        self._removed: list[int] = []
        self._added: list[NewRow] = []
        self._forks: list[tuple[int, int, int, int]] = []
        self._copies: list[tuple[int, int, int, int]] = []
        self._handed_out: list[int] = []

    def add(
        self,
        row: int,
        token_ids: Sequence[int],
        *,
        num_prompt: int | None = None,
        sampling: RowSampling = GREEDY,
        max_total: int = 200,
        seed: int = 1,
        sequence_index: int = 0,
        eos_token_ids: Sequence[int] = (),
        hit_blocks: Sequence[int] = (),
        num_computed: int | None = None,
    ) -> DrivenRow:
        """Start a sequence with the next plan."""
        num_blocks = -(-len(token_ids) // self._block_size)
        new_blocks = [self._free.pop() for _ in range(num_blocks - len(hit_blocks))]
        self._handed_out += new_blocks
        num_hit_tokens = len(hit_blocks) * self._block_size
        driven = DrivenRow(
            row=row,
            token_ids=list(token_ids),
            num_known=len(token_ids),
            num_prompt=len(token_ids) if num_prompt is None else num_prompt,
            max_total=max_total,
            block_ids=[*hit_blocks, *new_blocks],
            num_computed=num_hit_tokens if num_computed is None else num_computed,
        )
        assert row not in self.rows
        self.rows[row] = driven
        self._added.append(
            NewRow(
                row=row,
                token_ids=_int32(token_ids),
                num_prompt_tokens=driven.num_prompt,
                sequence_index=sequence_index,
                seed=seed,
                sampling=sampling,
                eos_token_ids=_int32(eos_token_ids),
                max_total_tokens=max_total,
                block_ids=_int32(driven.block_ids),
                num_hit_blocks=len(hit_blocks),
                num_computed_tokens=driven.num_computed,
            )
        )
        return driven

    def remove(self, row: int, *, free: bool = True) -> DrivenRow:
        """End a row with the next plan; its blocks are reused first unless `free` is False."""
        driven = self.rows.pop(row)
        self._removed.append(row)
        if free:
            self._free += driven.block_ids
        return driven

    def fork(self, parent: int, child: int, *, sequence_index: int, token: int = -1) -> DrivenRow:
        """Branch off a row with the next plan; blocks are shared until `copy_block`."""
        source = self.rows[parent]
        token_ids = list(source.token_ids)
        if token >= 0:
            token_ids[-1] = token
        driven = DrivenRow(
            row=child,
            token_ids=token_ids,
            num_known=source.num_known,
            num_prompt=source.num_prompt,
            max_total=source.max_total,
            block_ids=list(source.block_ids),
            num_computed=source.num_computed,
        )
        assert child not in self.rows
        self.rows[child] = driven
        self._forks.append((parent, child, sequence_index, token))
        return driven

    def copy_block(self, row: int, index: int) -> None:
        """Give a row its own copy of a block with the next plan."""
        driven = self.rows[row]
        dst = self._free.pop()
        self._copies.append((driven.block_ids[index], dst, row, index))
        self._handed_out.append(dst)
        driven.block_ids[index] = dst

    def launch(
        self, *, chunks: Mapping[int, int] | None = None, paused: Iterable[int] = ()
    ) -> Ordered:
        """Send the plan: chunks of rows in prefill (None: all the rest of each), and one token of
        every other row."""
        self.version += 1
        parents = {child: parent for parent, child, _, _ in self._forks}
        appended: list[tuple[int, list[int]]] = []
        columns: list[tuple[int, int, int, bool, bool]] = []
        chunk_tokens: list[int] = []
        shares_logits: dict[int, bool] = {}
        before = {row: driven.num_computed for row, driven in self.rows.items()}
        for row in sorted(self.rows):
            driven = self.rows[row]
            start = before[row]
            if start < driven.num_known:
                rest = driven.num_known - start
                if row in parents:
                    # Its parent's last chunk is in this plan.
                    driven.num_computed = driven.num_known
                    shares_logits[row] = True
                    columns.append((row, 0, driven.num_known, True, False))
                    continue
                count = rest if chunks is None else chunks.get(row, 0)
                if not count:
                    continue
                chunk_tokens += driven.token_ids[start : start + count]
                columns.append((row, count, start, count == rest, False))
            else:
                count = 1
                if row in paused or driven.num_computed >= driven.max_total - 1:
                    continue
                columns.append((row, 1, start, True, True))
            driven.num_computed += count
            missing = -(-driven.num_computed // self._block_size) - len(driven.block_ids)
            if missing > 0:
                ids = [self._free.pop() for _ in range(missing)]
                driven.block_ids += ids
                appended.append((row, ids))
                self._handed_out += ids
        work = StepWork(
            version=self.version,
            step=0,
            is_last_step=True,
            removed_rows=_int32(sorted(self._removed)),
            added=tuple(self._added),
            forks=Forks(
                parent_rows=_int32(parent for parent, _, _, _ in self._forks),
                child_rows=_int32(child for _, child, _, _ in self._forks),
                sequence_indices=_int32(index for _, _, index, _ in self._forks),
                token_ids=_int32(token for _, _, _, token in self._forks),
                shares_logits=np.array(
                    [shares_logits.get(child, False) for _, child, _, _ in self._forks], np.bool_
                ),
            ),
            copies=BlockCopies(
                src=_int32(src for src, _, _, _ in self._copies),
                dst=_int32(dst for _, dst, _, _ in self._copies),
                rows=_int32(row for _, _, row, _ in self._copies),
                indices=_int32(index for _, _, _, index in self._copies),
            ),
            appended_rows=_int32(row for row, _ in appended),
            appended_counts=_int32(len(ids) for _, ids in appended),
            appended_block_ids=_int32(block_id for _, ids in appended for block_id in ids),
            handed_out=_int32(self._handed_out),
            rows=_int32(row for row, *_ in columns),
            num_new_tokens=_int32(count for _, count, *_ in columns),
            start_positions=np.array([start for _, _, start, _, _ in columns], np.int64),
            samples=np.array([samples for *_, samples, _ in columns], np.bool_),
            is_decode=np.array([is_decode for *_, is_decode in columns], np.bool_),
            chunk_token_ids=_int32(chunk_tokens),
        )
        for staged in (
            self._removed,
            self._added,
            self._forks,
            self._copies,
            self._handed_out,
        ):
            staged.clear()
        # As from the wire: nobody may write into a plan's columns.
        for array in (work.rows, work.num_new_tokens, work.start_positions, work.chunk_token_ids):
            array.flags.writeable = False
        sampled = [self.rows[row] for row, _, _, samples, _ in columns if samples]
        return Ordered(self.runner.launch(work), sampled)

    def collect(self, ordered: Ordered) -> StepOutput:
        """Wait for a step and give its tokens to the rows that sampled them."""
        output = ordered.pending.wait()
        assert output.counts.size == len(ordered.sampled)
        tokens = iter(output.token_ids.tolist())
        reasons = dict(
            zip(output.finished_rows.tolist(), output.finish_reasons.tolist(), strict=True)
        )
        for driven, count in zip(ordered.sampled, output.counts.tolist(), strict=True):
            driven.counts.append(count)
            driven.token_ids += [next(tokens) for _ in range(count)]
            driven.finish_reason = reasons.get(driven.row, driven.finish_reason)
        assert next(tokens, None) is None
        return output

    def step(
        self, *, chunks: Mapping[int, int] | None = None, paused: Iterable[int] = ()
    ) -> StepOutput:
        """Launch and collect."""
        return self.collect(self.launch(chunks=chunks, paused=paused))

    def run(self, num_steps: int, *, chunk: int | None = None, lookahead: int = 0) -> None:
        """Several steps; rows in prefill compute at most `chunk` tokens in each."""
        in_flight: list[Ordered] = []
        for _ in range(num_steps):
            chunks = None
            if chunk is not None:
                chunks = {
                    row: min(chunk, driven.num_known - driven.num_computed)
                    for row, driven in self.rows.items()
                }
            in_flight.append(self.launch(chunks=chunks))
            if len(in_flight) > lookahead:
                self.collect(in_flight.pop(0))
        for ordered in in_flight:
            self.collect(ordered)
