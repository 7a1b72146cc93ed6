"""What the processes of a chaos run may not say, and what is counted of what they do say.

Owns: the reading of one log, after its process has ended or at the end of the run. Does not know
processes.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

# Broken invariants, defects, plans that the other side could not take: none of them may be caused
# by anything that is done to processes and links from outside.
_FORBIDDEN = re.compile(
    r"Traceback \(most recent call last\)|InvariantError|unplanned failure|\bCRITICAL\b"
    r"|plan refused|step failed|MALFORMED_MESSAGE|UNEXPECTED_MESSAGE|UNKNOWN_MESSAGE|STALE_TERM"
    r"|NUM_BLOCKS_OUT_OF_RANGE|BAD_WELCOME|RESET_NOT_ABOVE|RESET_TOO_HIGH|RESET_FAILED|TOO_MANY_RESETS"
    r"|Exception ignored|never awaited"
)
_COUNTED = {
    "losses": re.compile(r"WARNING .*worker gone:"),
    "resets": re.compile(r"WARNING .*\breset: sent_version="),
    "steps back": re.compile(r"a newer control plane is active"),
}
_RECOVERED = re.compile(r"prefix index recovered: adopted=(\d+) refused=(\d+)")


@dataclass(slots=True)
class LogSummary:
    """Of all logs so far.

    Attributes:
        counts: What happened, by name.
    """

    counts: Counter[str] = field(default_factory=Counter[str])

    def read(self, path: Path) -> list[str]:
        """Take in a log; gives its forbidden lines."""
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        found = [f"{path.name}: {line[:400]}" for line in lines if _FORBIDDEN.search(line)]
        self._count(lines)
        return found

    def _count(self, lines: Iterable[str]) -> None:
        for line in lines:
            for name, pattern in _COUNTED.items():
                self.counts[name] += pattern.search(line) is not None
            if recovered := _RECOVERED.search(line):
                self.counts["adopted blocks"] += int(recovered[1])
                self.counts["refused entries"] += int(recovered[2])
