"""RowTable: the limits of an added row and of its sampling parameters."""

from __future__ import annotations

from typing import Any

import pytest
from row_table_tools import assert_refused, make_plan
from scripted_control_plane import added_row

from data_plane.plan_refused import Refusal
from protos.pagewire.v1 import inference_pb2

ADDED_ROW_REFUSALS: list[tuple[str, Refusal, dict[str, Any]]] = [
    ("no tokens", Refusal.VALUE_OUT_OF_RANGE, {"token_ids": b""}),
    ("no prompt", Refusal.VALUE_OUT_OF_RANGE, {"num_prompt_tokens": 0}),
    ("prompt beyond its tokens", Refusal.VALUE_OUT_OF_RANGE, {"num_prompt_tokens": 6}),
    ("everything computed", Refusal.VALUE_OUT_OF_RANGE, {"num_computed_tokens": 5}),
    ("computed beyond the hits", Refusal.VALUE_OUT_OF_RANGE, {"num_computed_tokens": 1}),
    ("negative num_computed_tokens", Refusal.VALUE_OUT_OF_RANGE, {"num_computed_tokens": -1}),
    ("more hits than blocks", Refusal.VALUE_OUT_OF_RANGE, {"num_hit_blocks": 3}),
    ("longer than the model allows", Refusal.VALUE_OUT_OF_RANGE, {"max_total_tokens": 33}),
    ("nothing left to generate", Refusal.VALUE_OUT_OF_RANGE, {"max_total_tokens": 5}),
    ("negative sequence index", Refusal.VALUE_OUT_OF_RANGE, {"sequence_index": -1}),
]


SAMPLING_REFUSALS: list[tuple[Refusal, dict[str, Any]]] = [
    (Refusal.VALUE_OUT_OF_RANGE, {"temperature": -0.5}),
    (Refusal.VALUE_OUT_OF_RANGE, {"temperature": 101.0}),
    (Refusal.VALUE_OUT_OF_RANGE, {"temperature": float("nan")}),
    (Refusal.VALUE_OUT_OF_RANGE, {"top_p": 0.0}),
    (Refusal.VALUE_OUT_OF_RANGE, {"top_p": 1.5}),
    (Refusal.VALUE_OUT_OF_RANGE, {"min_p": -0.1}),
    (Refusal.VALUE_OUT_OF_RANGE, {"top_k": -1}),
    (Refusal.VALUE_OUT_OF_RANGE, {"min_tokens": -1}),
    (Refusal.TOKEN_OUT_OF_VOCABULARY, {"stop_token_ids": [100]}),
    (Refusal.UNSUPPORTED, {"presence_penalty": 0.5}),
    (Refusal.UNSUPPORTED, {"frequency_penalty": -0.5}),
    (Refusal.UNSUPPORTED, {"repetition_penalty": 1.1}),
    (Refusal.UNSUPPORTED, {"logprobs": 0}),
    (Refusal.UNSUPPORTED, {"prompt_logprobs": 1}),
    (Refusal.UNSUPPORTED, {"logit_bias": {3: 1.0}}),
    (Refusal.UNSUPPORTED, {"allowed_token_ids": [3]}),
    (Refusal.UNSUPPORTED, {"bad_words": ["x"]}),
    (Refusal.UNSUPPORTED, {"structured_output": inference_pb2.StructuredOutput()}),
    (Refusal.UNSUPPORTED, {"beam_search": inference_pb2.BeamSearch()}),
]


@pytest.mark.parametrize(
    ("name", "reason", "fields"),
    ADDED_ROW_REFUSALS,
    ids=[name for name, _, _ in ADDED_ROW_REFUSALS],
)
def test_added_row_out_of_limits_is_refused(
    name: str, reason: Refusal, fields: dict[str, Any]
) -> None:
    row = added_row(3, [1] * 5, [9, 10])
    for field, value in fields.items():
        setattr(row, field, value)
    assert_refused(make_plan(4, added_rows=[row]), reason)


@pytest.mark.parametrize(
    ("reason", "sampling"), SAMPLING_REFUSALS, ids=[str(fields) for _, fields in SAMPLING_REFUSALS]
)
def test_sampling_parameter_that_cannot_be_honoured_is_refused(
    reason: Refusal, sampling: dict[str, Any]
) -> None:
    row = added_row(3, [1], [9], sampling=inference_pb2.SamplingParams(**sampling))
    assert_refused(make_plan(4, added_rows=[row]), reason)
