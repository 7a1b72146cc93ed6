"""Files with keys and tokens: read without waiting and with a bound, and who else may read them.

Owns: what may be read at all. Does not know: formats.
"""

from __future__ import annotations

import os
import stat

_MAX_BYTES = 4 << 20


def read_secret(path: os.PathLike[str] | str, flag: str) -> bytes:
    """Contents of a regular file, also through links.

    Raises:
        ValueError: It cannot be read, is too long, or is something else, such as a pipe, which
            would have nothing left for the second time. The message names flag and file.
    """
    try:
        # Without waiting: opening a pipe would block until somebody writes to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            is_regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
            contents = _read(descriptor) if is_regular else b""
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ValueError(f"{flag}: cannot read {path}: {error.strerror}") from None
    if not is_regular:
        raise ValueError(f"{flag}: {path} is not a regular file, which it must be to be read again")
    if len(contents) > _MAX_BYTES:
        raise ValueError(f"{flag}: {path} has more than {_MAX_BYTES} bytes")
    return contents


def _read(descriptor: int) -> bytes:
    """All of it, or a little more than is accepted."""
    pieces: list[bytes] = []
    left = _MAX_BYTES + 1
    while left and (piece := os.read(descriptor, left)):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def mode_if_open_to_all(path: os.PathLike[str] | str) -> str | None:
    """The permissions of a file that every user of the machine can read, such as "0644"."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return None
    return f"{stat.S_IMODE(mode):04o}" if mode & stat.S_IROTH else None
