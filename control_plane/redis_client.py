"""A connection to Redis or Valkey as the prefix store wants it, and names for what goes wrong.

Owns: client options, kinds of failure. Does not know: keys or what is stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import redis.asyncio
from redis import exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

if TYPE_CHECKING:
    from collections.abc import Callable

    from control_plane.prefix_store import RedisAddress

# Everything that a server or the way to it can do to us.
FAILURES = (exceptions.RedisError, OSError, TimeoutError)


def new_client(
    address: RedisAddress,
    *,
    timeout_s: float,
    on_connect: Callable[[Any], Any] | None = None,
) -> redis.asyncio.Redis:
    """Build a client that gives up early and never retries by itself.

    Args:
        address: Where to; nothing is connected before the first command.
        timeout_s: Limit of connecting and of each read.
        on_connect: Async; called with each new connection and must await its `on_connect`.
    """
    options: dict[str, Any] = dict(address.tls_options)
    if "ssl_check_hostname" in options:
        options["ssl_check_hostname"] = options["ssl_check_hostname"].lower() == "true"
    return redis.asyncio.Redis(
        host=address.host,
        port=address.port,
        db=address.db,
        username=address.username,
        password=address.password,
        ssl=address.tls,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        # The caller retries, with its own pauses; a retry in there would multiply them.
        retry=Retry(NoBackoff(), 0),
        # RESP2: understood by every server, and without server-side pushes.
        protocol=2,
        redis_connect_func=on_connect,
        client_name="pagewire",
        **options,
    )


def kind_of(error: BaseException) -> str:
    """Name the state that a failure puts the store in."""
    match error:
        case (
            exceptions.AuthenticationError()
            | exceptions.AuthorizationError()
            | exceptions.NoPermissionError()
            | exceptions.AuthenticationWrongNumberOfArgsError()
        ):
            return "denied"
        case exceptions.ReadOnlyError():
            return "read-only"
        case exceptions.OutOfMemoryError():
            return "full"
        case exceptions.ResponseError():
            return "denied" if str(error).startswith("NOAUTH") else "refusing"
        case exceptions.RedisError() | OSError() | TimeoutError():
            return "unreachable"
        case _:
            return "failing"


def is_wrong_type(error: exceptions.ResponseError) -> bool:
    """Whether the key holds another type than the command works on."""
    return "WRONGTYPE" in str(error)


def describe_error(error: BaseException) -> str:
    """Name an error without its text, which may quote credentials or values."""
    code = str(error).split(" ", 1)[0]
    name = type(error).__name__
    has_code = isinstance(error, exceptions.ResponseError) and code.isalpha() and code.isupper()
    return f"{name}({code})" if has_code else name
