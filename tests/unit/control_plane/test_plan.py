"""The mapping between the scheduler's arrays and the wire's columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from control_plane.errors import Code, ProtocolError
from control_plane.plan import count_prompt_tokens, decode_step_result, encode_plan
from control_plane.request import Request, SamplingParams, Version
from control_plane.scheduled_step import AddedSequence, ScheduledStep
from protos.pagewire.v1 import worker_pb2


def int32(*values: int) -> Any:
    return np.array(values, dtype=np.int32)


def step(**fields: Any) -> ScheduledStep:
    columns = (
        "removed_rows",
        "appended_rows",
        "appended_counts",
        "appended_block_ids",
        "chunk_rows",
        "chunk_num_tokens",
        "sampled_rows",
    )
    defaults: dict[str, Any] = {name: int32() for name in columns}
    return ScheduledStep(
        **{**defaults, "version": Version(8), "added": [], "num_tokens": 0, **fields}
    )


def result(**fields: Any) -> worker_pb2.StepResult:
    return worker_pb2.StepResult(version=8, **fields)


def test_steady_decode_sends_nothing_but_versions() -> None:
    plan = encode_plan(step(sampled_rows=int32(*range(256))))
    assert (plan.base_version, plan.version, plan.num_steps) == (7, 8, 1)
    assert plan.ByteSize() <= 8


def test_columns_are_little_endian_int32() -> None:
    plan = encode_plan(
        step(
            removed_rows=int32(1, 258),
            appended_rows=int32(3),
            appended_counts=int32(1),
            appended_block_ids=int32(70000),
            chunk_rows=int32(2),
            chunk_num_tokens=int32(5),
        )
    )
    assert plan.removed_rows == b"\x01\x00\x00\x00\x02\x01\x00\x00"
    assert plan.appended_block_ids == (70000).to_bytes(4, "little")
    assert (plan.appended_rows, plan.appended_counts) == (b"\x03\0\0\0", b"\x01\0\0\0")
    assert (plan.chunk_rows, plan.chunk_num_tokens) == (b"\x02\0\0\0", b"\x05\0\0\0")


def test_a_big_endian_column_is_sent_little_endian() -> None:
    plan = encode_plan(step(removed_rows=np.array([1], dtype=">i4")))
    assert plan.removed_rows == b"\x01\x00\x00\x00"


def test_an_added_row_carries_tokens_parameters_and_table() -> None:
    request = Request(
        req_id="a",
        prompt_token_ids=[5, 6, 7],
        sampling=SamplingParams(
            max_tokens=9, temperature=0.0, top_k=3, stop=("x",), stop_token_ids=(4,)
        ),
        seed=2**64 - 1,
        max_total_tokens=12,
        arrival=0,
        eos_token_ids=(2,),
        resume={0: [8]},
    )
    (sequence,) = request.sequences
    added = AddedSequence(
        row=4,
        sequence=sequence,
        token_ids=sequence.token_ids(),
        num_computed_tokens=2,
        block_ids=int32(9, 10),
        num_hit_blocks=1,
    )
    ordered = step(added=[added])
    (row,) = encode_plan(ordered).added_rows
    assert row.row == 4
    assert np.frombuffer(row.token_ids, "<i4").tolist() == [5, 6, 7, 8]
    assert np.frombuffer(row.block_ids, "<i4").tolist() == [9, 10]
    assert np.frombuffer(row.eos_token_ids, "<i4").tolist() == [2]
    assert (row.num_prompt_tokens, row.num_hit_blocks, row.num_computed_tokens) == (3, 1, 2)
    assert (row.seed, row.max_total_tokens) == (2**64 - 1, 12)
    # Limits count from the prompt's end: as submitted, whatever is known of the output.
    assert row.sampling.max_tokens == 9
    assert row.sampling.HasField("temperature")
    assert row.sampling.temperature == 0.0
    assert list(row.sampling.stop_token_ids) == [4]
    # Strings are found by the edge.
    assert not row.sampling.stop
    assert count_prompt_tokens(ordered) == 3


def test_a_result_becomes_arrays() -> None:
    columns = decode_step_result(
        result(
            counts=b"\x01\x00\x01",
            token_ids=int32(7, 9).tobytes(),
            finished_rows=int32(2).tobytes(),
            finish_reasons=b"\x01",
        )
    )
    assert columns.counts.tolist() == [1, 0, 1]
    assert columns.token_ids.tolist() == [7, 9]
    assert columns.finished_rows.tolist() == [2]
    assert columns.finish_reasons.tolist() == [1]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"token_ids": b"\x01"}, "step_result.token_ids"),
        ({"finished_rows": b"\x01\x02"}, "step_result.finished_rows"),
    ],
)
def test_a_torn_column_is_malformed(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ProtocolError) as refusal:
        decode_step_result(result(**fields))
    assert refusal.value.reason == "MALFORMED_MESSAGE"
    assert refusal.value.code is Code.INVALID_ARGUMENT
    assert refusal.value.metadata["field"] == field


def test_a_step_never_took_less_than_no_time() -> None:
    assert decode_step_result(result(device_time_us=-5)).device_time_us == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"counts": b"\x02", "token_ids": int32(1).tobytes()},
        {"counts": b"\x01", "token_ids": int32(-1).tobytes()},
        {"finished_rows": int32(1, 1).tobytes(), "finish_reasons": b"\x03"},
        {"finish_reasons": b"\x01"},
    ],
)
def test_what_columns_say_is_not_judged_where_they_are_read(fields: dict[str, Any]) -> None:
    columns = decode_step_result(result(**fields))
    assert columns.finish_reasons.tobytes() == fields.get("finish_reasons", b"")
