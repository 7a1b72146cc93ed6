"""What a process knows of one scope beyond what it has told the server.

Owns nothing but the fields: `redis_prefix_store` changes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from control_plane.prefix_store import EntryCodec
    from control_plane.request import BlockHash, BlockId, Version

    Live = Callable[[], Mapping[BlockId, tuple[BlockHash, Version]]]


class ScopeState:
    """What one scope still has to tell the server.

    Attributes:
        key: Its hash.
        codec: Of its values.
        pending: Newest unwritten value per block; None: to be removed. At most one per block of the
            replica, however long the server is away.
        in_flight: The part of it that an exchange under way carries.
        live: Set by a lease that came in and was not passed on yet.
        lease_at: Monotonic time of the last sign of life.
        renewed_at: Monotonic time at which the server last got a new TTL.
        synced_connection: The connection on which everything was written; 0: none.
        is_listed: Whether those who ask for known scopes hear of it.
    """

    __slots__ = (
        "codec",
        "in_flight",
        "is_listed",
        "key",
        "lease_at",
        "live",
        "pending",
        "renewed_at",
        "synced_connection",
    )

    def __init__(self, key: str, codec: EntryCodec) -> None:
        self.key = key
        self.codec = codec
        self.pending: dict[int, bytes | None] = {}
        self.in_flight: dict[int, bytes | None] = {}
        self.live: Live | None = None
        self.lease_at = 0.0
        self.renewed_at = float("-inf")
        self.synced_connection = 0
        self.is_listed = False
