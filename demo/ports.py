"""Ports for servers that start in a moment.

Owns: which ports this process has claimed. Does not know what listens there.

A port that was looked at is not yet a port that one has. The model loads between the look and the
bind, and the usual ports of gRPC lie in the range from which Linux takes the near ends of outgoing
connections: another demo may choose the same one, and any connection may get it.
"""

from __future__ import annotations

import contextlib
import socket

_HOST = "127.0.0.1"
_TRIES = 200


class PortClaims:
    """Keeps ports free for servers on this machine that set SO_REUSEADDR, as all of ours do.

    A bound socket that does not listen keeps connections and `any_free_port` out, but no server
    that shares the address; a name in Linux's abstract namespace keeps out other claims. Both are
    gone with the process.
    """

    def __init__(self) -> None:
        self._holders: list[socket.socket] = []

    def next_free(self, first: int) -> int:
        """Claim the first free port from `first` on.

        Raises:
            RuntimeError: none of 200 is free.
        """
        for port in range(first, min(first + _TRIES, 65536)):
            if is_port_free(port) and self._claim(port):
                return port
        raise RuntimeError(f"no free port on {_HOST} in {first}-{first + _TRIES - 1}")

    def any_free(self) -> int:
        """Claim a port that the system considers free.

        Raises:
            RuntimeError: the system gave 200 that others have claimed.
        """
        for _ in range(_TRIES):
            if self._claim(port := any_free_port()):
                return port
        raise RuntimeError(f"no port on {_HOST} could be claimed")

    def close(self) -> None:
        """Give all of them up."""
        for holder in self._holders:
            holder.close()
        self._holders.clear()

    def _claim(self, port: int) -> bool:
        with contextlib.ExitStack() as opened:
            name = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            holder = opened.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                name.bind(f"\0pagewire-port-{port}")
                holder.bind((_HOST, port))
            except OSError:
                return False
            opened.pop_all()
        self._holders += (name, holder)
        return True


def is_port_free(port: int) -> bool:
    """Whether a server could listen there now; a claim does not count."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        # Connections of an earlier server that still wind down do not count.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((_HOST, port))
            listener.listen()
        except OSError:
            return False
    return True


def any_free_port() -> int:
    """Give a port that the system considers free."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind((_HOST, 0))
        return int(listener.getsockname()[1])
