"""The line that says how far a run is.

Owns: what it shows and how often. Does not know: where the numbers come from.
"""

from __future__ import annotations

import time
from typing import TextIO

_BAR = 24
_TTY_INTERVAL_S = 0.2
# Where lines stay, as in a log.
_LOG_INTERVAL_S = 10.0


class Progress:
    """One line that is written again on a terminal, or a line now and then elsewhere."""

    def __init__(self, out: TextIO | None, num_requests: int, *, duration_s: float = 0.0) -> None:
        """Show nothing if `out` is None."""
        self._out = out
        self._num_requests = max(1, num_requests)
        self._duration_s = duration_s
        self._is_tty = out is not None and out.isatty()
        self._interval_s = _TTY_INTERVAL_S if self._is_tty else _LOG_INTERVAL_S
        self._started_s = self._shown_s = time.monotonic()
        self._shown_tokens = 0
        self._width = 0

    def show(self, num_done: int, num_failed: int, num_tokens: int) -> None:
        """Say how far it is, if it is time to."""
        now_s = time.monotonic()
        elapsed_s = now_s - self._shown_s
        if self._out is None or elapsed_s < self._interval_s:
            return
        rate = (num_tokens - self._shown_tokens) / elapsed_s
        self._shown_s, self._shown_tokens = now_s, num_tokens
        ran_s = now_s - self._started_s
        share = num_done / self._num_requests
        if self._duration_s:
            share = max(share, ran_s / self._duration_s)
        filled = round(_BAR * min(share, 1.0))
        line = (
            f"[{'#' * filled}{'.' * (_BAR - filled)}] {num_done}/{self._num_requests} requests, "
            f"{max(rate, 0.0):.0f} tokens/s, {num_failed} failed, {ran_s:.0f} s"
        )
        if self._is_tty:
            self._out.write(f"\r{line.ljust(self._width)}")
            self._width = len(line)
        else:
            self._out.write(f"{line}\n")
        self._out.flush()

    def close(self) -> None:
        """Leave the terminal clean."""
        if self._out is not None and self._is_tty and self._width:
            self._out.write(f"\r{' ' * self._width}\r")
            self._out.flush()
