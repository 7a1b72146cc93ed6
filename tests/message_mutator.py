"""Valid protobuf messages, damaged: structure first, bytes afterwards. Seeded."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from google.protobuf.descriptor import FieldDescriptor
    from google.protobuf.message import Message

_INTS = [
    0,
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    15,
    16,
    17,
    63,
    64,
    127,
    128,
    255,
    256,
    511,
    512,
    4096,
    65535,
    65536,
]
_HUGE = [2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**62, 2**63 - 1, 2**64 - 1]
_FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-38, 1e38, 2.0, 100.0, 101.0, math.nan, math.inf, -math.inf]
_TEXTS = [
    "",
    " ",
    "\0",
    "a\nb",
    "é",
    "😀",
    "\ufeff",
    "../../etc/passwd",
    "{{ 7 * 7 }}",
    "%s%n",
    "</s>",
    "x" * 129,
    "x" * 257,
    "é" * 300,
    "x" * 5000,
]


class Mutator:
    """Makes damaged messages out of valid ones.

    Args:
        rng: Decides everything.
        donors: Valid messages of the same type, of which parts are borrowed.
        small: Numbers of the domain that are worth trying, such as rows and block ids.
    """

    def __init__(
        self, rng: random.Random, donors: Sequence[Message], small: Sequence[int] = ()
    ) -> None:
        self._rng = rng
        self._donors = donors
        self._ints = [*_INTS, *small]

    def mutate(self, message: Message) -> bytes:
        """The wire form of `message` with one to four things changed."""
        rng = self._rng
        changed = type(message)()
        changed.CopyFrom(message)
        kind = rng.random()
        for _ in range(rng.choice([1, 1, 1, 2, 3, 4]) if kind < 0.8 else 0):
            self._change(changed, depth=0)
        data = changed.SerializeToString()
        for _ in range(rng.choice([1, 1, 2]) if kind >= 0.7 else 0):
            data = self._change_bytes(data)
        return data

    # Fields.

    def _change(self, message: Message, depth: int) -> None:
        rng = self._rng
        fields = list(message.DESCRIPTOR.fields)
        present = [field for field, _ in message.ListFields()]
        if not fields:
            return
        field = rng.choice(present if present and rng.random() < 0.8 else fields)
        if field.is_repeated:
            self._change_repeated(message, field, depth)
        elif field.message_type is not None:
            self._change_message(message, field, depth)
        elif rng.random() < 0.1:
            message.ClearField(field.name)
        elif rng.random() < 0.1:
            self._borrow(message, field)
        else:
            setattr(message, field.name, self._scalar(field, getattr(message, field.name)))

    def _change_message(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        roll = self._rng.random()
        if roll < 0.1:
            message.ClearField(field.name)
        elif roll < 0.2:
            # Sets it, and clears the others of its oneof.
            getattr(message, field.name).SetInParent()
        elif roll < 0.3:
            self._borrow(message, field)
        elif depth < 5:
            self._change(getattr(message, field.name), depth + 1)

    def _change_repeated(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        rng = self._rng
        values: Any = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            value = field.message_type.fields_by_name["value"]
            if value.message_type is not None:
                for name in ("", "x", "messages"):
                    self._change(values[name], depth + 1)
            else:
                key = self._scalar(field.message_type.fields_by_name["key"], 0)
                values[key] = self._scalar(value, 0)
            return
        roll = rng.random()
        if roll < 0.1:
            message.ClearField(field.name)
        elif roll < 0.25 and values:
            del values[rng.randrange(len(values))]
        elif roll < 0.4 and values:
            copies = [values[rng.randrange(len(values))]] * rng.choice([1, 1, 3, 40])
            values.extend(copies)
        elif roll < 0.5:
            self._borrow(message, field)
        elif field.message_type is not None:
            part = rng.choice(values) if values and roll < 0.9 else values.add()
            if depth < 5:
                self._change(part, depth + 1)
        elif values and roll < 0.85:
            at = rng.randrange(len(values))
            values[at] = self._scalar(field, values[at])
        else:
            values.append(self._scalar(field, 0))

    def _borrow(self, message: Message, field: FieldDescriptor) -> None:
        """Take a field from another message, or, of the same kind, from another field here."""
        rng = self._rng
        others = [
            other
            for other in message.DESCRIPTOR.fields
            if other.name != field.name
            and other.type == field.type
            and other.is_repeated == field.is_repeated
            and other.message_type is field.message_type
        ]
        if others and field.message_type is None and rng.random() < 0.5:
            other = rng.choice(others)
            mine, theirs = getattr(message, field.name), getattr(message, other.name)
            if not field.is_repeated:
                setattr(message, field.name, theirs)
                setattr(message, other.name, mine)
            return
        donor: Any = rng.choice(self._donors)
        if donor.DESCRIPTOR is message.DESCRIPTOR:
            source = getattr(donor, field.name)
            if field.message_type is None and not field.is_repeated:
                setattr(message, field.name, source)
            elif not field.is_repeated:
                getattr(message, field.name).CopyFrom(source)
            elif not (field.message_type and field.message_type.GetOptions().map_entry):
                getattr(message, field.name).extend(source)

    def _scalar(self, field: FieldDescriptor, value: Any) -> Any:
        rng = self._rng
        if field.type == field.TYPE_BYTES:
            return self._column(value or b"")
        if field.type == field.TYPE_STRING:
            text = value or ""
            return rng.choice([*_TEXTS, text + "x", text[:-1], text * 2])
        if field.cpp_type == field.CPPTYPE_BOOL:
            return not value
        if field.cpp_type in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
            return rng.choice([*_FLOATS, (value or 0.0) * 2, -(value or 0.0)])
        if field.cpp_type == field.CPPTYPE_ENUM:
            return rng.choice([0, 1, 2, 3, 4, 5, 99, -1])
        bits = 64 if field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64) else 32
        is_signed = field.cpp_type in (field.CPPTYPE_INT32, field.CPPTYPE_INT64)
        return _fit(self._int(value), bits, is_signed=is_signed)

    def _int(self, value: int) -> int:
        rng = self._rng
        near = [value + 1, value - 1, value * 2, -value]
        number = rng.choice([rng.choice(near), rng.choice(self._ints), rng.choice(_HUGE)])
        return -number if rng.random() < 0.2 else number

    def _column(self, data: bytes) -> bytes:
        """A column of int32 or int64, or bytes of any kind, changed as one or as the other."""
        rng = self._rng
        size = rng.choice([1, 4, 4, 4, 8])
        parts = [data[at : at + size] for at in range(0, len(data), size)]
        number = _fit(self._int(0), size * 8, is_signed=True).to_bytes(size, "little", signed=True)
        ways: list[Callable[[], bytes]] = [
            lambda: data + number,
            lambda: data[: -rng.randint(1, size)],
            lambda: data * rng.choice([2, 3, 100]),
            lambda: data + rng.randbytes(rng.randint(1, 3)),
            lambda: b"",
        ]
        if parts:
            at = rng.randrange(len(parts))
            ways += [
                lambda: b"".join([*parts[:at], number, *parts[at + 1 :]]),
                lambda: b"".join([*parts[:at], number, *parts[at + 1 :]]),
                lambda: b"".join([*parts[:at], *parts[at + 1 :]]),
                lambda: b"".join([*parts[:at], parts[at], *parts[at:]]),
                lambda: b"".join(reversed(parts)),
            ]
        return rng.choice(ways)()

    # Bytes.

    def _change_bytes(self, data: bytes) -> bytes:
        rng = self._rng
        if not data:
            return rng.randbytes(rng.randint(1, 8))
        at, other = sorted((rng.randrange(len(data)), rng.randrange(len(data))))
        roll = rng.randrange(7)
        if roll <= 1:
            return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        if roll == 2:
            return data[:at]
        if roll == 3:
            # On the wire, a message behind a message is both, merged.
            return data + rng.choice(self._donors).SerializeToString()
        if roll == 4:
            return data[:at] + rng.randbytes(rng.randint(1, 4)) + data[at:]
        if roll == 5:
            return data[:at] + data[other:]
        return data[:at] + data[at:other] * 2 + data[other:]


def _fit(number: int, bits: int, *, is_signed: bool) -> int:
    """The number, wrapped into the range of its type."""
    number %= 1 << bits
    return number - (1 << bits) if is_signed and number >= 1 << (bits - 1) else number
