"""Consistent hashing of prefixes onto control planes, with spill by load.

Owns: which member has which key, and who is next when it is full. Does not know: what a key or a
member is, how loads are measured.
"""

from __future__ import annotations

from bisect import bisect_left
from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Per unit of weight. With 256 points a member's share deviates by about 1 / sqrt(256) = 6 %.
POINTS = 256


def hash64(data: bytes) -> int:
    """64 uniform bits, the same in every process."""
    return int.from_bytes(sha256(data).digest()[:8], "big")


class Ring:
    """Members on a circle of 64-bit points.

    A member's points depend on its name and weight only, so that one that comes or goes moves only
    the keys that it gains or loses.
    """

    def __init__(self) -> None:
        self._owner_of: dict[int, int] = {}
        self._points: list[int] = []
        self._points_of: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._points_of)

    def add(self, member: int, weight: float = 1.0) -> None:
        """Enter a member; its share of the keys is proportional to its weight."""
        if member in self._points_of:
            raise ValueError(f"member {member} is on the ring already")
        points = [hash64(b"%d/%d" % (member, i)) for i in range(max(1, round(POINTS * weight)))]
        self._points_of[member] = points
        self._owner_of.update((point, member) for point in points)
        self._points = sorted(self._owner_of)

    def remove(self, member: int) -> None:
        """Take a member off; its keys go to whoever is next."""
        for point in self._points_of.pop(member):
            del self._owner_of[point]
        self._points = sorted(self._owner_of)

    def owner(self, key: int) -> int:
        """Whose key it is when nobody is full."""
        return next(self.walk(key))

    def walk(self, key: int) -> Iterator[int]:
        """All members, each once, from the key's owner on."""
        points, seen = self._points, set[int]()
        first = bisect_left(points, key)
        for i in range(len(points)):
            member = self._owner_of[points[(first + i) % len(points)]]
            if member not in seen:
                seen.add(member)
                yield member

    def place(self, key: int, has_room: Callable[[int], bool]) -> int:
        """The first member with room from the key's owner on; the owner if nobody has any."""
        for member in self.walk(key):
            if has_room(member):
                return member
        return self.owner(key)
