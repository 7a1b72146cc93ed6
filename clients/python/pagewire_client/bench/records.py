"""What is measured of calls, in a form that processes can pass on and add up.

Owns: the record of a request, the histogram of gaps, a process's result. Does not know: how they
are summed up or shown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

# Resolution of gaps: 128 buckets per doubling are 0.54 % each.
_PER_OCTAVE = 128
_LEAST_S = 1e-6


@dataclass(slots=True)
class RequestRecord:
    """One request. Times are seconds from the start of the run.

    Attributes:
        index: Number of the request.
        sent_s: When the call was made.
        late_s: How long after it was due.
        first_s: Its first token; None: none came, or the call does not tell.
        last_s: Its last token; None likewise.
        end_s: The end of the call.
        prompt_tokens: As the server counts them; 0 if it did not say.
        cached_tokens: Of those, prefix hits.
        output_tokens: That arrived.
        wanted_tokens: That were asked for.
        num_messages: That brought tokens.
        reason: Why it failed; empty: it did not.
        token_times: (time, tokens) of every message that brought some, where that is kept.
    """

    index: int
    sent_s: float
    late_s: float = 0.0
    first_s: float | None = None
    last_s: float | None = None
    end_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    wanted_tokens: int = 0
    num_messages: int = 0
    reason: str = ""
    token_times: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])

    def to_json(self) -> list[Any]:
        return [getattr(self, name) for name in self.__slots__]

    @classmethod
    def from_json(cls, values: list[Any]) -> RequestRecord:
        return cls(*values)


class Gaps:
    """A histogram of times with a relative error of 0.3 %, of any number of them."""

    def __init__(self, buckets: dict[int, int] | None = None) -> None:
        self.buckets = buckets or {}

    @property
    def count(self) -> int:
        return sum(self.buckets.values())

    def add(self, seconds: float) -> None:
        """Count one; what is shorter than a microsecond counts as one."""
        bucket = round(math.log2(max(seconds, _LEAST_S) / _LEAST_S) * _PER_OCTAVE)
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1

    def merge(self, other: Gaps) -> None:
        for bucket, count in other.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + count

    def points(self) -> list[tuple[float, int]]:
        """(seconds, count), ascending."""
        return [
            (_LEAST_S * 2.0 ** (bucket / _PER_OCTAVE), count)
            for bucket, count in sorted(self.buckets.items())
        ]

    def percentile(self, percent: float) -> float:
        """The nearest-rank percentile in seconds; NaN of nothing."""
        rank = max(1, math.ceil(self.count * percent / 100))
        for seconds, count in self.points():
            rank -= count
            if rank <= 0:
                return seconds
        return math.nan

    def mean(self) -> float:
        """NaN of nothing."""
        total = sum(seconds * count for seconds, count in self.points())
        return total / self.count if self.buckets else math.nan


@dataclass(slots=True)
class Outcome:
    """What one process, or all of them, measured.

    Attributes:
        records: One per request that was sent.
        gaps: Between two messages of one request that bring tokens.
        tokens_by_second: Output tokens in each second of the run.
        client_cpu_s: Processor time of each process while it sent.
        wall_s: From the start to the end of the last call.
        is_interrupted: The run was ended before its time.
    """

    records: list[RequestRecord] = field(default_factory=list[RequestRecord])
    gaps: Gaps = field(default_factory=Gaps)
    tokens_by_second: dict[int, int] = field(default_factory=dict[int, int])
    client_cpu_s: list[float] = field(default_factory=list[float])
    wall_s: float = 0.0
    is_interrupted: bool = False

    def merge(self, other: Outcome) -> None:
        """Add what another process measured."""
        self.records += other.records
        self.gaps.merge(other.gaps)
        for second, count in other.tokens_by_second.items():
            self.tokens_by_second[second] = self.tokens_by_second.get(second, 0) + count
        self.client_cpu_s += other.client_cpu_s
        self.wall_s = max(self.wall_s, other.wall_s)
        self.is_interrupted |= other.is_interrupted

    def to_json(self) -> dict[str, Any]:
        return {
            "records": [record.to_json() for record in self.records],
            "gaps": list(self.gaps.buckets.items()),
            "tokens_by_second": list(self.tokens_by_second.items()),
            "client_cpu_s": self.client_cpu_s,
            "wall_s": self.wall_s,
            "is_interrupted": self.is_interrupted,
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Outcome:
        return cls(
            records=[RequestRecord.from_json(record) for record in values["records"]],
            gaps=Gaps(dict(values["gaps"])),
            tokens_by_second=dict(values["tokens_by_second"]),
            client_cpu_s=values["client_cpu_s"],
            wall_s=values["wall_s"],
            is_interrupted=values["is_interrupted"],
        )
