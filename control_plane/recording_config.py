"""Where the control streams are recorded and how much is kept.

Owns: the check that it can be written, before anything slow is started. Does not know: what is in
a recording.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

# Less would not hold the prompts of one busy moment.
MIN_MB = 8
DEFAULT_MB = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingConfig:
    """How to record.

    Attributes:
        directory: Gets a directory per replica.
        max_bytes: Of one replica's files together; the oldest go first.
        max_backlog_bytes: What may wait for the disk, all replicas together. Beyond it messages are
            left out.
    """

    directory: Path
    max_bytes: int = DEFAULT_MB << 20
    max_backlog_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if self.max_bytes < 1 or self.max_backlog_bytes < 1:
            raise ValueError("a recording needs room")

    def prepare(self) -> None:
        """Make the directory, for its owner alone if it is new, and try to write into it.

        Raises:
            ValueError: It cannot be written.
        """
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, path = tempfile.mkstemp(dir=self.directory, prefix=".writable-")
            os.close(descriptor)
            os.unlink(path)
        except OSError as error:
            raise ValueError(
                f"--record: cannot write into {self.directory}: {error.strerror}"
            ) from None


def read_recording_flags(directory: Path | None, max_mb: int | None) -> RecordingConfig | None:
    """What was asked for, tried; None: nothing.

    Raises:
        ValueError: It cannot be done.
    """
    if directory is None:
        if max_mb is not None:
            raise ValueError("--record-max-mb needs --record")
        return None
    if max_mb is None:
        max_mb = DEFAULT_MB
    if max_mb < MIN_MB:
        raise ValueError(f"--record-max-mb must be at least {MIN_MB}, got {max_mb}")
    config = RecordingConfig(directory=directory, max_bytes=max_mb << 20)
    config.prepare()
    return config
