"""RowTable under random plans: legal ones give the model's tokens, damaged ones change nothing.

`PlanMaker` makes legal plans out of hypothesis' choices; the second test damages them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fake_model import FakeModelRunner, expected_output
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from row_table_tools import check_invariants, snapshot
from scripted_control_plane import added_row, column

from data_plane.plan_refused import PlanRefused
from data_plane.row_table import RowTable
from protos.pagewire.v1 import worker_pb2

NUM_BLOCKS, BLOCK_SIZE, MAX_NUM_SEQS, MAX_MODEL_LEN, BUDGET, VOCAB = 25, 4, 4, 32, 12, 64
EOS = 2

SETTINGS = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


def make_table() -> RowTable:
    return RowTable(
        max_num_seqs=MAX_NUM_SEQS,
        num_blocks=NUM_BLOCKS,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=BUDGET,
        vocab_size=VOCAB,
    )


@dataclass
class MadeRow:
    tokens: list[int]
    max_total: int
    blocks: list[int]
    num_computed: int = 0
    is_paused: bool = False
    output: list[int] = field(default_factory=list)
    is_finished: bool = False

    @property
    def is_decoding(self) -> bool:
        return self.num_computed >= len(self.tokens)


class PlanMaker:
    """A tiny control plane that knows only how to make legal plans."""

    def __init__(self) -> None:
        self.version = 0
        self.rows: dict[int, MadeRow] = {}
        self.free = list(range(1, NUM_BLOCKS))

    def make(self, draw: Any) -> worker_pb2.Plan:
        self.version += 1
        plan = worker_pb2.Plan(base_version=self.version - 1, version=self.version, num_steps=1)
        removed = [row for row in sorted(self.rows) if draw(st.integers(0, 9)) == 0]
        for row in removed:
            self.free += self.rows.pop(row).blocks
        self._add(plan, draw)
        paused, resumed = [], []
        for row, made in sorted(self.rows.items()):
            if made.is_decoding and draw(st.integers(0, 5)) == 0:
                (resumed if made.is_paused else paused).append(row)
                made.is_paused = not made.is_paused
        self._order_work(plan, draw)
        plan.removed_rows = column(*removed)
        plan.paused_rows = column(*paused)
        plan.resumed_rows = column(*resumed)
        return plan

    def _add(self, plan: worker_pb2.Plan, draw: Any) -> None:
        for row in range(MAX_NUM_SEQS):
            if row in self.rows or not draw(st.booleans()):
                continue
            length = draw(st.integers(1, 14))
            max_total = draw(st.integers(length + 1, MAX_MODEL_LEN))
            # Room for every row at its longest, so that none ever has to wait for a block.
            reserved = sum(-(-made.max_total // BLOCK_SIZE) for made in self.rows.values())
            if reserved + -(-max_total // BLOCK_SIZE) >= NUM_BLOCKS:
                continue
            tokens = draw(st.lists(st.integers(0, VOCAB - 1), min_size=length, max_size=length))
            blocks = [self.free.pop(0) for _ in range(-(-length // BLOCK_SIZE))]
            self.rows[row] = MadeRow(tokens, max_total, blocks)
            plan.added_rows.append(
                added_row(
                    row,
                    tokens,
                    blocks,
                    max_total_tokens=max_total,
                    eos_token_ids=column(EOS),
                )
            )

    def _order_work(self, plan: worker_pb2.Plan, draw: Any) -> None:
        """Advance every row as the worker will; append the blocks that takes."""
        budget = BUDGET
        appended: list[tuple[int, int]] = []
        chunks: list[tuple[int, int]] = []
        for row, made in sorted(self.rows.items()):
            if made.is_decoding and not made.is_paused and made.num_computed < made.max_total - 1:
                budget -= 1
                if made.num_computed // BLOCK_SIZE == len(made.blocks):
                    block_id = self.free.pop(0)
                    made.blocks.append(block_id)
                    appended.append((row, block_id))
                made.num_computed += 1
        for row, made in sorted(self.rows.items()):
            if not made.is_decoding:
                most = min(budget, len(made.tokens) - made.num_computed)
                count = draw(st.integers(0, max(most, 0)))
                if count > 0:
                    budget -= count
                    made.num_computed += count
                    chunks.append((row, count))
        plan.appended_rows = column(*[row for row, _ in appended])
        plan.appended_counts = column(*[1 for _ in appended])
        plan.appended_block_ids = column(*[block_id for _, block_id in appended])
        plan.chunk_rows = column(*[row for row, _ in chunks])
        plan.chunk_num_tokens = column(*[count for _, count in chunks])


@SETTINGS
@given(data=st.data())
def test_legal_plans_are_applied_and_give_the_models_tokens(data: st.DataObject) -> None:
    table, maker = make_table(), PlanMaker()
    runner = FakeModelRunner(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, vocab_size=VOCAB)
    for _ in range(data.draw(st.integers(1, 40))):
        plan = maker.make(data.draw)
        [work] = table.apply(plan)
        check_invariants(table)
        output = runner.launch(work).wait()
        sampled = work.rows[work.samples].tolist()
        tokens = iter(output.token_ids.tolist())
        for row, count in zip(sampled, output.counts.tolist(), strict=True):
            made = maker.rows[row]
            assert count == (0 if made.is_finished else 1)
            made.output += [next(tokens) for _ in range(count)]
        for row in output.finished_rows.tolist():
            maker.rows[row].is_finished = True
        for made in maker.rows.values():
            expected, _ = expected_output(
                made.tokens, max_total_tokens=made.max_total, vocab_size=VOCAB
            )
            assert made.output == expected[: len(made.output)]
            assert made.is_finished == (len(made.output) == len(expected))


HOSTILE = st.sampled_from([-(2**31), -1, 0, 1, 2, 3, 4, 5, 12, 13, 24, 25, 64, 2**31 - 1])


def damage(message: Any, draw: Any) -> None:
    """Change one field of a message, or of one inside it."""
    descriptor = draw(st.sampled_from(list(message.DESCRIPTOR.fields)))
    name, value = descriptor.name, getattr(message, descriptor.name)
    if descriptor.message_type is not None:
        if not descriptor.is_repeated:
            damage(value, draw)
        elif value and draw(st.booleans()):
            damage(value[draw(st.integers(0, len(value) - 1))], draw)
        elif value and draw(st.booleans()):
            del value[draw(st.integers(0, len(value) - 1))]
        elif descriptor.message_type.name in ("AddedRow", "Fork"):
            new = value.add()
            for _ in range(draw(st.integers(0, 3))):
                damage(new, draw)
    elif descriptor.type == descriptor.TYPE_BYTES:
        numbers = list(np.frombuffer(value[: len(value) // 4 * 4], "<i4").tolist())
        how = draw(st.integers(0, 3))
        if how == 0:
            setattr(message, name, draw(st.binary(max_size=9)))
            return
        if how == 1 or not numbers:
            numbers.insert(draw(st.integers(0, len(numbers))), draw(HOSTILE))
        elif how == 2:
            del numbers[draw(st.integers(0, len(numbers) - 1))]
        else:
            numbers[draw(st.integers(0, len(numbers) - 1))] = draw(HOSTILE)
        setattr(message, name, column(*numbers))
    elif descriptor.is_repeated:
        return
    elif descriptor.cpp_type in (descriptor.CPPTYPE_FLOAT, descriptor.CPPTYPE_DOUBLE):
        setattr(message, name, draw(st.floats(width=32)))
    elif descriptor.cpp_type == descriptor.CPPTYPE_UINT64:
        setattr(message, name, draw(st.integers(0, 2**64 - 1)))
    elif descriptor.cpp_type in (descriptor.CPPTYPE_INT32, descriptor.CPPTYPE_INT64):
        setattr(message, name, draw(HOSTILE))


@settings(SETTINGS, max_examples=400)
@given(data=st.data())
def test_damaged_plan_is_applied_whole_or_refused_with_nothing_changed(
    data: st.DataObject,
) -> None:
    table, maker = make_table(), PlanMaker()
    for _ in range(data.draw(st.integers(0, 8))):
        table.apply(maker.make(data.draw))
    plan = maker.make(data.draw)
    damaged = worker_pb2.Plan()
    damaged.CopyFrom(plan)
    for _ in range(data.draw(st.integers(1, 4))):
        damage(damaged, data.draw)
    before = snapshot(table)
    try:
        table.apply(damaged)
    except PlanRefused:
        assert snapshot(table) == before
        # And the plan that was meant still applies.
        table.apply(plan)
    check_invariants(table)


@settings(SETTINGS, max_examples=300)
@given(data=st.data())
def test_plan_with_flipped_bytes_is_applied_whole_or_refused_with_nothing_changed(
    data: st.DataObject,
) -> None:
    table, maker = make_table(), PlanMaker()
    for _ in range(3):
        table.apply(maker.make(data.draw))
    plan = maker.make(data.draw)
    wire = bytearray(plan.SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))
    try:
        damaged = worker_pb2.Plan.FromString(bytes(wire))
    except DecodeError:
        return
    before = snapshot(table)
    try:
        table.apply(damaged)
    except PlanRefused:
        assert snapshot(table) == before
        table.apply(plan)
    check_invariants(table)
