"""Defaults of a connection, the same for both clients."""

from __future__ import annotations

DEFAULT_SERVER = "127.0.0.1:50051"

_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # What the server reads and sends at most.
    ("grpc.max_send_message_length", 16 << 20),
    ("grpc.max_receive_message_length", 16 << 20),
    # A server that vanished without a word is noticed within 40 seconds.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # What grpc really waits for the answer to a ping.
    ("grpc.http2.ping_timeout_ms", 10_000),
    # A server that comes back is found within a second or two, however long it was away.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)

_LOOPBACK = ("127.", "localhost:", "[::1]:")


def channel_options(server: str) -> tuple[tuple[str, int], ...]:
    """Give the options of a connection to `server`, a host:port."""
    if server.startswith(_LOOPBACK):
        # Where http_proxy is set, grpc would ask the proxy for a server on this machine.
        return (*_CHANNEL_OPTIONS, ("grpc.enable_http_proxy", 0))
    return _CHANNEL_OPTIONS
