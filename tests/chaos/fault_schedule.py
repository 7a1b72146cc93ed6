"""What goes wrong, in which order: drawn from a seed and from nothing else.

Four lanes run side by side, so that a control plane that starts holds up no fault of a link. The
order within a lane is the same in every run of a seed; when each fault comes depends on how fast
the system is.

Owns: kinds of faults, whom they hit, how long they last. Does not know: processes, time, load.
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
    STORE_WIPE = "store wiped or of yesterday"
    LINK_CUT = "link cut"
    LINK_FREEZE = "link silent"
    LINK_SLOW = "link slow"


class FaultLane(StrEnum):
    """Who is hit; lanes do not wait for each other."""

    CONTROL = "control plane"
    WORKERS = "workers"
    STORE = "store"
    LINKS = "links"


LANES = {
    FaultLane.CONTROL: (FaultKind.CONTROL_KILL, FaultKind.CONTROL_STOP, FaultKind.CONTROL_TERM),
    FaultLane.WORKERS: (FaultKind.WORKER_KILL, FaultKind.WORKER_STOP, FaultKind.WORKER_TERM),
    FaultLane.STORE: (FaultKind.STORE_KILL, FaultKind.STORE_STOP, FaultKind.STORE_WIPE),
    FaultLane.LINKS: (FaultKind.LINK_CUT, FaultKind.LINK_FREEZE, FaultKind.LINK_SLOW),
}
_GAP_FACTORS = {
    FaultLane.CONTROL: 2.0,
    FaultLane.WORKERS: 2.0,
    FaultLane.STORE: 3.0,
    FaultLane.LINKS: 3.0,
}
# Kinds that keep their target away for as long as they last, and may thus outlast a lease.
_SILENT_KINDS = (FaultKind.WORKER_STOP, FaultKind.CONTROL_STOP, FaultKind.LINK_FREEZE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. Times in seconds.

    Attributes:
        number: Position in its lane, from 1.
        target: A worker, CONTROL_PLANE, STORE or a link.
        gap_s: Pause after the beginning of the lane's previous one.
        hold_s: How long it lasts before it is undone.
        chance: In [0, 1): decides between variants of the kind.
    """

    lane: FaultLane
    number: int
    kind: FaultKind
    target: str
    gap_s: float
    hold_s: float
    chance: float

    def __str__(self) -> str:
        return (
            f"fault {self.number} of {self.lane}: {self.kind} of {self.target} "
            f"for {self.hold_s:.2f} s"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """What there is to break.

    Attributes:
        workers: Their slots.
        worker_links: The link of each worker to the control plane.
        other_links: Of clients and of the store.
        lease_s: What some silences have to outlast.
        mean_gap_s: Between the beginnings of two faults of one lane, where nobody is waited for.
    """

    workers: Sequence[str]
    worker_links: Sequence[str]
    other_links: Sequence[str]
    lease_s: float
    mean_gap_s: float


def schedule(seed: int, lane: FaultLane, config: ScheduleConfig) -> Iterator[Fault]:
    """All faults of a lane, without end.

    Kinds come as from a pack of cards: once each in an order of its own, then the next pack. So any
    long enough run has all of them, equally often.
    """
    draw = random.Random(f"{lane} of {seed}")
    number = 0
    while True:
        pack = list(LANES[lane])
        draw.shuffle(pack)
        for kind in pack:
            number += 1
            yield Fault(
                lane=lane,
                number=number,
                kind=kind,
                target=_target(lane, draw, config),
                gap_s=draw.uniform(0.2, 1.8) * config.mean_gap_s * _GAP_FACTORS[lane],
                hold_s=_hold_s(kind, draw, config.lease_s),
                chance=draw.random(),
            )


def _target(lane: FaultLane, draw: random.Random, config: ScheduleConfig) -> str:
    match lane:
        case FaultLane.WORKERS:
            return draw.choice(config.workers)
        case FaultLane.CONTROL:
            return CONTROL_PLANE
        case FaultLane.STORE:
            return STORE
        case FaultLane.LINKS:
            # Workers' links are the ones that matter most.
            is_workers = draw.random() < 0.6
            return draw.choice(config.worker_links if is_workers else config.other_links)


def _hold_s(kind: FaultKind, draw: random.Random, lease_s: float) -> float:
    outlasts_lease = kind in _SILENT_KINDS and draw.random() < 0.3
    if outlasts_lease:
        return lease_s + draw.uniform(0.5, 1.5)
    # Many short ones: what races needs to be near, not far apart.
    return min(draw.expovariate(1.0), 2.5) + 0.02
