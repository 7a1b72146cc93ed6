from __future__ import annotations

import math

import numpy as np
import pytest

from control_plane.errors import InvalidRequestError
from control_plane.request import FinishReason, Request, SamplingParams


def new_request(prompt: object = (1, 2, 3), **fields: object) -> Request:
    settings: dict[str, object] = {
        "req_id": "r",
        "sampling": SamplingParams(),
        "seed": 1,
        "max_total_tokens": 100,
        "arrival": 0,
        **fields,
    }
    return Request(prompt_token_ids=prompt, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("n", 0, "[1, 256]"),
        ("n", True, "[1, 256]"),
        ("max_tokens", 0, "[1, 2147483647]"),
        ("min_tokens", -1, "[0, 2147483647]"),
        ("temperature", -0.1, "[0, 100]"),
        ("temperature", math.nan, "[0, 100]"),
        ("temperature", math.inf, "[0, 100]"),
        ("temperature", "1", "[0, 100]"),
        ("top_p", 0.0, "(0, 1]"),
        ("top_p", math.nan, "(0, 1]"),
        ("top_p", 1.01, "(0, 1]"),
        ("top_k", -1, "[0, 2147483647]"),
        ("top_k", 1.5, "[0, 2147483647]"),
        ("min_p", 1.5, "[0, 1]"),
        ("min_p", -math.inf, "[0, 1]"),
        ("seed", 2**64, "[0, 18446744073709551615]"),
        ("seed", -1, "[0, 18446744073709551615]"),
    ],
)
def test_sampling_params_refuse_what_is_outside_a_limit(field: str, value: object, limit: str):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.metadata == {"field": field, "value": str(value), "limit": limit}
    assert field in caught.value.message
    assert limit in caught.value.message


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"stop": ("a",) * 17}, "stop"),
        ({"stop": ("a", "")}, "stop[1]"),
        ({"stop": ("ä" * 129,)}, "stop[0]"),
        ({"stop_token_ids": (1, -1)}, "stop_token_ids[1]"),
        ({"stop_token_ids": (2**31,)}, "stop_token_ids[0]"),
        ({"stop_token_ids": (1,) * 257}, "stop_token_ids"),
    ],
)
def test_sampling_params_name_the_field_at_fault(fields: dict[str, object], named: str):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**fields)  # type: ignore[arg-type]
    assert caught.value.metadata["field"] == named


def test_sampling_params_accept_their_limits():
    SamplingParams(temperature=0, top_p=1, min_p=1.0, top_k=2**31 - 1, seed=2**64 - 1)
    SamplingParams(max_tokens=5, min_tokens=5, stop=("ä" * 128,) * 16, stop_token_ids=(0,) * 256)


@pytest.mark.parametrize("prompt", [[], [-1], [2**31], np.zeros((2, 2), np.int32), np.ones(3)])
def test_request_refuses_a_prompt_that_is_not_a_row_of_token_ids(prompt: object):
    with pytest.raises(InvalidRequestError) as caught:
        new_request(prompt)
    assert caught.value.metadata["field"] == "prompt"


def test_request_keeps_its_own_frozen_copy_of_the_prompt():
    prompt = np.array([1, 2, 3], dtype=np.int64)
    request = new_request(prompt)
    prompt[0] = 9
    assert request.prompt_token_ids.tolist() == [1, 2, 3]
    assert request.prompt_token_ids.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        request.prompt_token_ids[0] = 9


def test_resume_fills_the_log_of_its_sequence():
    request = new_request(sampling=SamplingParams(n=2), resume={1: [7, 8]})
    assert [sequence.output_token_ids for sequence in request.sequences] == [[], [7, 8]]
    with pytest.raises(InvalidRequestError):
        new_request(resume={1: [7]})


@pytest.mark.parametrize("start", range(6))
@pytest.mark.parametrize("stop", [0, 2, 3, 4, 5, None])
def test_token_ids_slices_prompt_and_output_as_one(start: int, stop: int | None):
    sequence = new_request(resume={0: [4, 5]}).sequences[0]
    if stop is None or start <= stop:
        got = sequence.token_ids(start, stop)
        assert got.tolist() == [1, 2, 3, 4, 5][start:stop]
        assert got.dtype == np.int32


def test_request_is_finished_when_all_sequences_are():
    request = new_request(sampling=SamplingParams(n=2))
    request.sequences[0].finish_reason = FinishReason.STOP
    assert not request.is_finished
    assert request.live_sequences == request.sequences[1:]
    request.sequences[1].finish_reason = FinishReason.ABORT
    assert request.is_finished
