"""Bytes of a client to a message, or to the precise reason why they are none.

The protobuf runtime says only that parsing failed. Clients in other languages do send text that is
not UTF-8 (lone surrogates above all) and messages of any size, and deserve to hear which field.

Owns: the size limit of a message. Does not know: what fields mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from control_plane.errors import InvalidRequestError, RequestTooLongError, ServingError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.descriptor import Descriptor

_MessageT = TypeVar("_MessageT", bound=Message)

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_DEPTH = 100
# Enough for every message of good faith. Millions of empty fields fit into a message, and looking
# at them one by one would hold up everybody's tokens for seconds.
_MAX_FIELDS = 10_000


class MessageDecoder(Generic[_MessageT]):
    """Deserializer of one method. Never raises: a gRPC server would answer that with INTERNAL."""

    def __init__(self, message_class: type[_MessageT], *, max_bytes: int) -> None:
        self._class = message_class
        self._max_bytes = max_bytes

    def __call__(self, data: bytes) -> _MessageT | ServingError:
        """The message, or what to answer instead."""
        if len(data) > self._max_bytes:
            return RequestTooLongError(
                f"The message has {len(data)} bytes, at most {self._max_bytes} are accepted. "
                "Shorten the prompt, or send it as token_ids.",
                field="message",
                value=len(data),
                limit=self._max_bytes,
            )
        try:
            return self._class.FromString(data)
        except DecodeError:
            return self._explain(data)

    def _explain(self, data: bytes) -> ServingError:
        descriptor = cast("Descriptor", self._class.DESCRIPTOR)
        name = descriptor.full_name
        try:
            # A view: a copy for every level of a deep message would be a hundred times its size.
            found = _BadTextSearch().run(memoryview(data), descriptor)
        except ValueError:
            found = None
        if found is None:
            return InvalidRequestError(
                f"The message is not a {name}: its bytes cannot be parsed. Generate the client "
                "from this server's protos.",
                field="message",
                value=f"{len(data)} bytes",
                limit=name,
            )
        field, position = found
        return InvalidRequestError(
            f"{field} is not UTF-8: byte {position} is no part of a character, such as half of a "
            "surrogate pair. Remove it or encode the text as UTF-8.",
            field=field,
            position=position,
            value="invalid UTF-8",
            limit="valid Unicode",
        )


class _BadTextSearch:
    """Looks for the first string field that is not UTF-8, through a bounded number of fields."""

    def __init__(self) -> None:
        self._num_fields = 0

    def run(
        self, data: memoryview, descriptor: Descriptor, depth: int = 0
    ) -> tuple[str, int] | None:
        """Path and byte offset of the field.

        Raises:
            ValueError: The bytes do not have the structure of a message, or too much of it.
        """
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deeply")
        counts: dict[int, int] = {}
        for number, value in self._chunks(data):
            field = descriptor.fields_by_number.get(number)
            if field is None:
                continue
            index = counts.get(number, 0)
            counts[number] = index + 1
            name = f"{field.name}[{index}]" if field.is_repeated else field.name
            if field.type == FieldDescriptor.TYPE_STRING:
                try:
                    str(value, "utf-8")
                except UnicodeDecodeError as error:
                    return name, error.start
            elif field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type is not None:
                inner = self.run(value, field.message_type, depth + 1)
                if inner is not None:
                    return f"{name}.{inner[0]}", inner[1]
        return None

    def _chunks(self, data: memoryview) -> Iterator[tuple[int, memoryview]]:
        """Field number and bytes of every length-delimited field."""
        at = 0
        while at < len(data):
            self._num_fields += 1
            if self._num_fields > _MAX_FIELDS:
                raise ValueError("too many fields")
            tag, at = _varint(data, at)
            kind = tag & 7
            if kind == _VARINT:
                _, at = _varint(data, at)
            elif kind == _BYTES:
                size, at = _varint(data, at)
                if at + size > len(data):
                    raise ValueError("truncated")
                yield tag >> 3, data[at : at + size]
                at += size
            elif kind in (_FIXED32, _FIXED64):
                at += 4 if kind == _FIXED32 else 8
            else:
                raise ValueError(f"wire type {kind}")


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("truncated")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("varint too long")
