"""How often streams get a response when their clients left it open.

Owns: the number of open streams. Does not know: clients, tokens, time.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

# What a response costs this process, gRPC included, as measured (docs/performance.md).
_RESPONSE_COST_S = 80e-6
# Of one core, for all responses together: what steps need comes first.
_SHARE = 0.5
# Below, a step of any model takes longer, and a timer would cost for nothing.
_SHORTEST_S = 0.004
# What a reader does not see as a pause.
_LONGEST_S = 0.2


class StreamPace:
    """Few streams get every step's tokens at once; many share a part of the process.

    Without it, hundreds of streams would spend the core that orders the steps on telling each of
    them of a token it can hardly show before the next one comes.
    """

    def __init__(self) -> None:
        self.num_streams = 0

    @contextmanager
    def open(self) -> Generator[None]:
        """Count a stream."""
        self.num_streams += 1
        try:
            yield
        finally:
            self.num_streams -= 1

    def interval_s(self) -> float:
        """Seconds between two responses of a stream; 0: as tokens come."""
        interval_s = self.num_streams * _RESPONSE_COST_S / _SHARE
        return min(interval_s, _LONGEST_S) if interval_s >= _SHORTEST_S else 0.0
