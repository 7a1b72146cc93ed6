"""Messages of strangers that cannot be read: what it costs to say why."""

from __future__ import annotations

import tracemalloc

from control_plane.errors import InvalidRequestError
from control_plane.message_decoding import MessageDecoder
from protos.pagewire.v1 import inference_pb2

MAX_BYTES = 4 << 20


def field(number: int, payload: bytes) -> bytes:
    """A length-delimited field as it travels."""
    size, rest = bytearray(), len(payload)
    while rest > 0x7F:
        size.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes([number << 3 | 2]) + bytes(size) + bytes([rest]) + payload


def nested(text: bytes, *, depth: int) -> bytes:
    """A chat whose template_kwargs hold `text` under that many objects."""
    chat = inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name["chat"].number
    kwargs = inference_pb2.Chat.DESCRIPTOR.fields_by_name["template_kwargs"].number
    value = field(3, text)  # Value.string_value
    for _ in range(depth):
        value = field(5, field(1, field(1, b"k") + field(2, value)))  # Value.struct_value
    return field(chat, field(kwargs, field(1, field(1, b"k") + field(2, value))))


def test_a_deep_message_is_explained_without_a_copy_for_each_of_its_levels() -> None:
    data = nested(b"a" * (MAX_BYTES - 4000) + b"\xff", depth=30)
    decoder = MessageDecoder(inference_pb2.GenerateRequest, max_bytes=MAX_BYTES)
    tracemalloc.start()
    try:
        error = decoder(data)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(error, InvalidRequestError)
    assert error.metadata["position"] == str(MAX_BYTES - 4000)
    assert error.metadata["field"].endswith("value.string_value")
    assert peak_bytes < 4 * MAX_BYTES


def test_a_message_nested_deeper_than_is_read_is_refused_as_a_whole() -> None:
    decoder = MessageDecoder(inference_pb2.GenerateRequest, max_bytes=MAX_BYTES)
    error = decoder(nested(b"a", depth=60))
    assert isinstance(error, InvalidRequestError)
    assert error.metadata["field"] == "message"
