"""Small parts of the edge: live ids, histograms, deserializers, where errors come from."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from control_plane.call_errors import describe_place
from control_plane.errors import DuplicateRequestError, ServingError
from control_plane.live_requests import LiveRequests
from control_plane.message_decoding import MessageDecoder
from control_plane.metrics import LatencyHistogram
from protos.pagewire.v1 import inference_pb2


def test_ids_of_two_principals_never_meet() -> None:
    live = LiveRequests()
    live.claim("a", "id", replace=False, on_replaced=list)
    live.claim("b", "id", replace=False, on_replaced=list)
    with pytest.raises(DuplicateRequestError):
        live.claim("a", "id", replace=False, on_replaced=list)


def test_a_replaced_claim_cannot_release_its_successor() -> None:
    live = LiveRequests()
    replaced: list[str] = []
    first = live.claim("", "id", replace=False, on_replaced=lambda: replaced.append("first"))
    second = live.claim("", "id", replace=True, on_replaced=list)
    assert (first.is_replaced, replaced) == (True, ["first"])
    live.release(first)
    with pytest.raises(DuplicateRequestError):
        live.claim("", "id", replace=False, on_replaced=list)
    live.release(second)
    assert len(live) == 0


def test_a_histogram_counts_cumulatively() -> None:
    histogram = LatencyHistogram((0.1, 1.0))
    histogram.observe(0.1)
    histogram.observe(0.5, count=3)
    histogram.observe(7)

    class Once(Collector):
        def collect(self) -> list:
            return [histogram.family("x_seconds", "x")]

    registry = CollectorRegistry()
    registry.register(Once())
    lines = generate_latest(registry).decode().splitlines()
    assert 'pagewire_x_seconds_bucket{le="0.1"} 1.0' in lines
    assert 'pagewire_x_seconds_bucket{le="1.0"} 4.0' in lines
    assert 'pagewire_x_seconds_bucket{le="+Inf"} 5.0' in lines
    assert "pagewire_x_seconds_count 5.0" in lines
    assert "pagewire_x_seconds_sum 8.6" in lines


@given(data=st.binary(max_size=200))
def test_a_decoder_never_raises(data: bytes) -> None:
    decoder = MessageDecoder(inference_pb2.GenerateRequest, max_bytes=150)
    assert isinstance(decoder(data), inference_pb2.GenerateRequest | ServingError)


@given(seed=st.integers())
def test_a_damaged_message_never_makes_a_decoder_raise(seed: int) -> None:
    rng = random.Random(seed)
    message = inference_pb2.GenerateRequest(
        model="m",
        chat=inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="é")]),
        sampling=inference_pb2.SamplingParams(stop=["x", "y"], logit_bias={1: 2.0}),
    )
    message.chat.template_kwargs.update({"a": [1, {"b": "c"}]})
    data = bytearray(message.SerializeToString())
    for _ in range(rng.randrange(1, 4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    decoder = MessageDecoder(inference_pb2.GenerateRequest, max_bytes=1000)
    assert isinstance(decoder(bytes(data)), inference_pb2.GenerateRequest | ServingError)


def test_the_place_of_an_error_has_no_values() -> None:
    try:
        raise KeyError("secret")
    except KeyError as error:
        place = describe_place(error)
    assert place.startswith("test_edge_parts.py:")
    assert "secret" not in place
