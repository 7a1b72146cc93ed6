"""What peers may hold of this process before anybody knows who they are.

Connections are file descriptors, of which a process has only so many; streams that say nothing and
messages that never end are memory. Each has a bound here, or a time after which it is over.

Owns: options of the two gRPC servers, open files. Does not know: services, certificates, tokens.
"""

from __future__ import annotations

import resource

# Both TLS and the first frame of HTTP/2. gRPC's own limit is two minutes.
_HANDSHAKE_TIMEOUT_MS = 10_000
# Calls of one burst; each costs some kilobytes until somebody looks at it. A bound per connection
# (SETTINGS_MAX_CONCURRENT_STREAMS) would end some calls of a client at that bound with a bare
# UNAVAILABLE: to gRPC's server a stream ends a moment later than to its client.
_MAX_PENDING_CALLS = 1 << 16

_WANTED_OPEN_FILES = 1 << 16
# Files, the store, the metrics port, gRPC's own.
_RESERVED_FILES = 128


def raise_open_files() -> None:
    """Let the process have as many open files as it may, up to 65536. Many shells give 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_OPEN_FILES if hard == resource.RLIM_INFINITY else min(_WANTED_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def public_options(*, max_message_bytes: int) -> tuple[tuple[str, int], ...]:
    """Options of the public port's server."""
    return (
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # A client that vanished without a word is noticed within 40 seconds.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        # What grpc really waits for the answer to a ping.
        ("grpc.http2.ping_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Clients may ping every 5 seconds, with and without a call.
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        # gRPC's own limit of calls that nobody has looked at yet (1000) ends part of a burst with a
        # bare CANCELLED. Whom we refuse hears why, and when to try again.
        ("grpc.server.max_pending_requests", _MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING_CALLS),
        # A connection that is not used is opened again by the next call.
        ("grpc.max_connection_idle_ms", 600_000),
        ("grpc.max_allowed_incoming_connections", _share_of_files(3, 4)),
        *_of_both_ports(),
    )


def worker_options() -> tuple[tuple[str, int], ...]:
    """What the worker port's server has beyond the options of its service."""
    return (
        # A worker has one stream, on a connection of its own.
        ("grpc.max_concurrent_streams", 16),
        ("grpc.max_connection_idle_ms", 30_000),
        ("grpc.max_allowed_incoming_connections", _share_of_files(1, 4)),
        *_of_both_ports(),
    )


def _of_both_ports() -> tuple[tuple[str, int], ...]:
    return (
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_TIMEOUT_MS),
        # Two servers on one port would each get some of the peers.
        ("grpc.so_reuseport", 0),
    )


def _share_of_files(numerator: int, denominator: int) -> int:
    """Connections of one port, so that a flood at one leaves files for the other."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft > _WANTED_OPEN_FILES:
        soft = _WANTED_OPEN_FILES
    return max(16, (soft - _RESERVED_FILES) * numerator // denominator)
