"""Defaults of a connection, the same for both clients."""

from __future__ import annotations

DEFAULT_SERVER = "127.0.0.1:50051"

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # What the server reads and sends at most.
    ("grpc.max_send_message_length", 16 << 20),
    ("grpc.max_receive_message_length", 16 << 20),
    # A server that vanished without a word is noticed within 40 seconds.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # A server that comes back is found within a second or two, however long it was away.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
