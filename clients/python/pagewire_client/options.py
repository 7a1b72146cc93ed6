"""Defaults of a connection, the same for both clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

if TYPE_CHECKING:
    from protos.tls_files import TlsFiles

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


def channel_credentials(tls: TlsFiles) -> grpc.ChannelCredentials:
    """Credentials of a TLS connection.

    Raises:
        ValueError: A file is not what it should be.
    """
    contents = tls.read()
    return grpc.ssl_channel_credentials(contents.ca, contents.key, contents.cert)


def call_metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """What every call brings along.

    Raises:
        ValueError: A header cannot carry the token; the message does not quote it.
    """
    if token is None:
        return ()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError("the token must be one word of visible ASCII characters")
    return (("authorization", f"Bearer {token}"),)


def check_server(server: str, *, has_tls: bool) -> None:
    """Refuse addresses that grpc takes for a name or sends to a port that nobody meant.

    Raises:
        ValueError: It is a URL, or plain text without a port.
    """
    scheme, separator, rest = server.partition("://")
    if separator and scheme.lower() in ("http", "https", "grpc", "grpcs"):
        tls = " and the TLS options" if scheme.lower().endswith("s") and not has_tls else ""
        raise ValueError(
            f"the server is named as HOST:PORT, not as a URL: give {rest.rstrip('/')}{tls} instead "
            f"of {server}"
        )
    if not server or (not has_tls and ":" not in server):
        raise ValueError(
            f"the server is named as HOST:PORT, got {server!r}: the public port is 50051 by default"
        )


def channel_options(server: str) -> tuple[tuple[str, int], ...]:
    """Give the options of a connection to `server`, a host:port."""
    if server.startswith(_LOOPBACK):
        # Where http_proxy is set, grpc would ask the proxy for a server on this machine.
        return (*_CHANNEL_OPTIONS, ("grpc.enable_http_proxy", 0))
    return _CHANNEL_OPTIONS
