"""What one call of the public API may cost the server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLimits:
    """Bounds per call and per message.

    Attributes:
        max_message_bytes: Largest message of a client; larger ones get a precise refusal.
        max_transport_bytes: Largest message that is read at all, and that is sent.
        read_timeout_s: How long the one message of a call may take to arrive: what has come of it
            is held until then.
        write_timeout_s: How long a response may wait for a client that does not read.
        batch_window: Requests of one batch stream that are unfinished or unread.
    """

    max_message_bytes: int = 4 << 20
    max_transport_bytes: int = 16 << 20
    read_timeout_s: float = 60.0
    write_timeout_s: float = 30.0
    batch_window: int = 64

    def __post_init__(self) -> None:
        if not 0 < self.max_message_bytes <= self.max_transport_bytes:
            raise ValueError(
                f"max_message_bytes must be in [1, {self.max_transport_bytes}], "
                f"got {self.max_message_bytes}"
            )
        for name in ("read_timeout_s", "write_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.batch_window < 1:
            raise ValueError(f"batch_window must be positive, got {self.batch_window}")
