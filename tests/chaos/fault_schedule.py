"""What goes wrong, in which order: drawn from a seed and from nothing else.

Owns: kinds of faults, whom they hit, how long they last. Does not know: processes, time, load. The
order is the same in every run of a seed; when each fault comes depends on how fast the system is.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CONTROL_PLANE = "control-plane"
STORE = "store"


class FaultKind(StrEnum):
    """Kinds as the report counts them."""

    WORKER_KILL = "worker kill -9"
    WORKER_STOP = "worker SIGSTOP"
    WORKER_TERM = "worker SIGTERM"
    CONTROL_KILL = "control plane kill -9"
    CONTROL_STOP = "control plane SIGSTOP"
    CONTROL_TERM = "control plane SIGTERM"
    STORE_KILL = "store kill -9"
    STORE_STOP = "store SIGSTOP"
    STORE_WIPE = "store wiped"
    LINK_CUT = "link cut"
    LINK_FREEZE = "link silent"
    LINK_SLOW = "link slow"


WORKER_KINDS = (FaultKind.WORKER_KILL, FaultKind.WORKER_STOP, FaultKind.WORKER_TERM)
CONTROL_KINDS = (FaultKind.CONTROL_KILL, FaultKind.CONTROL_STOP, FaultKind.CONTROL_TERM)
STORE_KINDS = (FaultKind.STORE_KILL, FaultKind.STORE_STOP, FaultKind.STORE_WIPE)
LINK_KINDS = (FaultKind.LINK_CUT, FaultKind.LINK_FREEZE, FaultKind.LINK_SLOW)
# Kinds that keep their target away for as long as they last, and may thus outlast a lease.
_SILENT_KINDS = (FaultKind.WORKER_STOP, FaultKind.CONTROL_STOP, FaultKind.LINK_FREEZE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. Times in seconds.

    Attributes:
        number: Position in the schedule, from 1.
        target: A worker, CONTROL_PLANE, STORE or a link.
        gap_s: Pause between the previous fault's beginning and this one's.
        hold_s: How long it lasts before it is undone.
        chance: In [0, 1): decides between variants of the kind.
    """

    number: int
    kind: FaultKind
    target: str
    gap_s: float
    hold_s: float
    chance: float

    def __str__(self) -> str:
        return f"#{self.number} {self.kind} of {self.target} for {self.hold_s:.2f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """What there is to break.

    Attributes:
        workers: Their slots.
        worker_links: The link of each worker to the control plane.
        other_links: Of clients and of the store.
        lease_s: What some silences have to outlast.
        mean_gap_s: Between the beginnings of two faults.
    """

    workers: Sequence[str]
    worker_links: Sequence[str]
    other_links: Sequence[str]
    lease_s: float
    mean_gap_s: float


def schedule(seed: int, config: ScheduleConfig) -> Iterator[Fault]:
    """All faults of a seed, without end.

    Kinds come as from a pack of cards: once each in an order of its own, then the next pack. So any
    long enough run has all of them, equally often.
    """
    draw = random.Random(f"faults of {seed}")
    number = 0
    while True:
        pack = list(FaultKind)
        draw.shuffle(pack)
        for kind in pack:
            number += 1
            yield Fault(
                number=number,
                kind=kind,
                target=_target(kind, draw, config),
                gap_s=draw.uniform(0.2, 1.8) * config.mean_gap_s,
                hold_s=_hold_s(kind, draw, config.lease_s),
                chance=draw.random(),
            )


def _target(kind: FaultKind, draw: random.Random, config: ScheduleConfig) -> str:
    if kind in WORKER_KINDS:
        return draw.choice(config.workers)
    if kind in CONTROL_KINDS:
        return CONTROL_PLANE
    if kind in STORE_KINDS:
        return STORE
    # Workers' links are the ones that matter most.
    return draw.choice(config.worker_links if draw.random() < 0.6 else config.other_links)


def _hold_s(kind: FaultKind, draw: random.Random, lease_s: float) -> float:
    outlasts_lease = kind in _SILENT_KINDS and draw.random() < 0.3
    if outlasts_lease:
        return lease_s + draw.uniform(0.5, 1.5)
    # Many short ones: what races needs to be near, not far apart.
    return min(draw.expovariate(1.0), 2.5) + 0.02
