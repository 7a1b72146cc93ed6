"""N control planes, each with its own replicas, behind a balancer that knows nothing.

A discrete-event simulation: arrivals, steps and gossip are events in simulated seconds; nothing
here measures this machine. Within a control plane the real `control_plane.router` chooses.

What is assumed and not built: a control plane that forwards a request to another one, and loads
that control planes tell each other.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from control_plane import router
from tests.benchmarks.scale.outcome import Outcome, Window
from tests.benchmarks.scale.ring import Ring
from tests.benchmarks.scale.service_model import Device, Replica
from tests.benchmarks.scale.workload import Turn, Workload, WorkloadConfig, sessions_per_s

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from tests.benchmarks.scale.workload import Session

# random: every request to any control plane; connection: every session to one, for its life;
# hash: by the ring, whichever control plane it arrived at.
PLACEMENTS = ("random", "connection", "hash")
# prefix: the first blocks; session: what names the conversation; sticky: the first blocks of its
# first request, and then where that one went; template: a first block that everybody shares.
KEYS = ("prefix", "session", "sticky", "template")
_NO_SPILL = 1e6  # finite: with nobody live, infinity times zero is no number


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One run.

    Attributes:
        placement: One of PLACEMENTS; with one control plane all are the same.
        key: What `hash` hashes, one of KEYS.
        spill: A control plane with more than this many times its share of the live requests is
            passed by.
        cost: What replicas tell the router, one of `service_model.COSTS`.
        load: Share of what perfect caches could carry; see `workload.sessions_per_s`.
        warm_up: Requests per replica before anything counts.
        measured: Requests per replica that count.
        hop_s: What forwarding adds to the first token.
        gossip_s: How old known loads are at most.
        outages: Of whole control planes.
    """

    num_replicas: int
    num_control_planes: int = 1
    placement: str = "hash"
    key: str = "prefix"
    spill: float = 1.25
    cost: str = "today"
    load: float = 0.7
    warm_up: int = 200
    measured: int = 120
    hop_s: float = 0.5e-3
    gossip_s: float = 0.05
    hot_share: float = 0.0
    seed: int = 0
    device: Device = field(default_factory=Device)
    outages: tuple[Outage, ...] = ()

    def __post_init__(self) -> None:
        if self.placement not in PLACEMENTS:
            raise ValueError(f"placement must be one of {PLACEMENTS}, got {self.placement!r}")
        if self.key not in KEYS:
            raise ValueError(f"key must be one of {KEYS}, got {self.key!r}")
        if not 1 <= self.num_control_planes <= self.num_replicas:
            raise ValueError(
                f"{self.num_control_planes} control planes need as many replicas at least, "
                f"got {self.num_replicas}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """A control plane dies, or joins late.

    Attributes:
        control_plane: Which.
        from_s: Seconds after the measurement began; negative: from the start of the run.
        to_s: When it is there again; infinite: never.
        keeps_cache: Whether its index comes back from the prefix store.
    """

    control_plane: int
    from_s: float
    to_s: float
    keeps_cache: bool = True


class ControlPlane:
    """Some replicas and who gets the next request.

    Attributes:
        known_live: What the others believe of its live requests.
    """

    def __init__(self, index: int, replicas: list[Replica]) -> None:
        self.index = index
        self.replicas = replicas
        self.by_index = {replica.index: at for at, replica in enumerate(replicas)}
        self.is_up = True
        self.known_live = 0
        # Sorts as the router does where nothing is cached: queue, then live requests, then id.
        self._scores: NDArray[np.int64] = np.zeros(len(replicas), dtype=np.int64)

    @property
    def num_live(self) -> int:
        return sum(replica.num_live for replica in self.replicas)

    def changed(self, replica: Replica) -> None:
        """The replica's queue or rows changed."""
        score = (replica.queued_tokens << 20) | replica.num_live
        self._scores[self.by_index[replica.index]] = score

    def choose(self, turn: Turn) -> Replica:
        """What `router.choose` gives for all replicas, asked about few.

        A replica without the prompt's first segment has no hit, and of those the one with the
        least queue is the best; so it and those with the segment are all that need be compared.
        """
        holders, by_index = turn.chain[0].holders, self.by_index
        if len(holders) < len(by_index):
            ats = {by_index[index] for index in holders if index in by_index}
        else:
            ats = {at for index, at in by_index.items() if index in holders}
        ats.add(int(self._scores.argmin()))
        candidates = [self.replicas[at] for at in ats]
        chosen = cast("Replica | None", router.choose(cast("Any", turn), cast("Any", candidates)))
        if chosen is None:
            raise ValueError(f"a prompt of {turn.num_tokens} tokens fits no replica")
        return chosen


class Simulation:
    """One run of one setup; `run` gives its outcome."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.now = 0.0
        num = setup.num_replicas
        # More replicas serve more applications: two system prompts and half an agent for each.
        self.workload = Workload(
            WorkloadConfig(
                num_system_prompts=max(8, 2 * num),
                num_agent_prefixes=max(4, num // 2),
                hot_share=setup.hot_share,
                seed=setup.seed,
            )
        )
        self.replicas = [
            Replica(i, setup.device, self._schedule_wake, self._on_progress, setup.cost)
            for i in range(num)
        ]
        count = setup.num_control_planes
        # Dealt out in turn, so that numbers differ by one at most.
        self.control_planes = [ControlPlane(i, self.replicas[i::count]) for i in range(count)]
        self.owner_of = [i % count for i in range(num)]
        self.ring = Ring()
        for plane in self.control_planes:
            self.ring.add(plane.index, len(plane.replicas) * count / num)
        self._session_rate = sessions_per_s(setup.device, load=setup.load, num_replicas=num)
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._serial = 0
        self._wakes = [0] * num
        self._num_arrived = 0
        self._window: Window | None = None
        self._limit_per_replica = 0.0
        self._num_open = 0  # measured turns without a first token
        self.hits_by_second: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])

    def run(self, progress: Callable[[float], None] | None = None) -> Outcome:
        """Warm up, measure, and wait for the first tokens of what was measured."""
        setup, count = self.setup, 0
        warm = setup.warm_up * setup.num_replicas
        last = warm + setup.measured * setup.num_replicas
        self._at(0.0, self._on_session, None)
        if len(self.control_planes) > 1:
            self._at(0.0, self._on_gossip, None)
        for outage in setup.outages:
            if outage.from_s < 0:
                self._on_death(outage)
        ended_s = give_up_s = math.inf
        while self._num_arrived < last or (self._num_open and self.now < give_up_s):
            self.now, serial, action, what = heappop(self._events)
            if action == self._on_wake and serial != self._wakes[what.index]:
                continue
            action(what)
            if self._window is None and self._num_arrived >= warm:
                self._begin_window()
            if ended_s == math.inf and self._num_arrived >= last and self._window is not None:
                ended_s, give_up_s = self.now, self.now + 30.0
                self._window.close(self.now, self.replicas)
            count += 1
            if progress is not None and not count % 20_000:
                progress(min(1.0, self._num_arrived / last))
        if self._window is None:
            raise ValueError("nothing was measured: warm_up and measured must be positive")
        return self._window.outcome(self.now, self.owner_of, len(self.control_planes))

    def _begin_window(self) -> None:
        self._window = Window(self.now, self.replicas)
        for outage in self.setup.outages:
            if outage.from_s >= 0:
                self._at(self.now + outage.from_s, self._on_death, outage)
            if outage.to_s < math.inf:
                self._at(self.now + outage.to_s, self._on_return, outage)

    # Events.

    def _at(self, time_s: float, action: Callable[[Any], None], what: object) -> None:
        self._serial += 1
        heappush(self._events, (time_s, self._serial, action, what))

    def _schedule_wake(self, time_s: float, replica: Replica) -> None:
        self._at(time_s, self._on_wake, replica)
        self._wakes[replica.index] = self._serial

    def _on_wake(self, replica: Replica) -> None:
        replica.wake(self.now)
        self.control_planes[self.owner_of[replica.index]].changed(replica)

    def _on_session(self, _: None) -> None:
        self._on_question(self.workload.new_session())
        self._at(
            self.now + self.workload.interarrival_s(self._session_rate), self._on_session, None
        )

    def _on_question(self, session: Session) -> None:
        turn = self.workload.next_turn(session)
        turn.arrived_s = self.now
        self._num_arrived += 1
        if self._window is not None and self._window.is_open:
            turn.is_measured = True
            self._num_open += 1
            self._window.arrived(turn)
        self._place(turn)

    def _on_gossip(self, _: None) -> None:
        live = replicas = 0
        for plane in self.control_planes:
            if plane.is_up:
                plane.known_live = plane.num_live
                live += plane.known_live
                replicas += len(plane.replicas)
        self._limit_per_replica = min(self.setup.spill, _NO_SPILL) * live / replicas
        self._at(self.now + self.setup.gossip_s, self._on_gossip, None)

    def _on_arrival(self, turn: Turn) -> None:
        plane = self.control_planes[turn.control_plane]
        if not plane.is_up:
            self._place(turn)
            return
        turn.ready_s = self.now
        replica = plane.choose(turn)
        replica.add(turn, self.now)
        plane.changed(replica)

    def _on_progress(self, now: float, replica: Replica, turn: Turn, what: str) -> None:
        if what == "admitted":
            if turn.is_measured and self._window is not None:
                self._window.admitted(turn, now)
            if self._window is not None:
                second = self.hits_by_second[int(now - self._window.began_s)]
                second[0] += turn.num_hit_blocks
                second[1] += turn.num_prompt_blocks
        elif what == "first":
            if turn.first_token_s < 0:
                turn.first_token_s = now
                self._num_open -= turn.is_measured
        elif turn.session.turns_left:
            session = turn.session
            self._at(now + self.workload.think_s(session), self._on_question, session)

    # Where a request goes.

    def _place(self, turn: Turn) -> None:
        up = [plane.index for plane in self.control_planes if plane.is_up]
        arrives_at = up[self.workload.pick(len(up))] if len(up) > 1 else up[0]
        setup, session, goes_to = self.setup, turn.session, arrives_at
        if len(self.control_planes) == 1 or setup.placement == "random":
            pass
        elif setup.placement == "connection":
            if session.home < 0 or not self.control_planes[session.home].is_up:
                session.home = arrives_at
            goes_to = session.home
        else:
            key = {"session": session.own_key, "template": 0}.get(setup.key, session.key)
            home = session.home if setup.key == "sticky" else -1
            if home >= 0 and self._has_room(home, times=2.0):
                goes_to = home
            else:
                goes_to = session.home = self.ring.place(key, self._has_room)
            if self._window is not None and turn.is_measured:
                self._window.num_forwarded += goes_to != arrives_at
                self._window.num_spilled += goes_to != self.ring.owner(key)
        turn.control_plane = goes_to
        if goes_to == arrives_at or setup.placement == "connection":
            self._on_arrival(turn)
        else:
            self._at(self.now + setup.hop_s, self._on_arrival, turn)

    def _has_room(self, index: int, times: float = 1.0) -> bool:
        """Whether a control plane has less than `spill` times its share, as far as is known."""
        plane = self.control_planes[index]
        limit = math.ceil(times * self._limit_per_replica * len(plane.replicas))
        return plane.is_up and plane.known_live < limit

    # Outages.

    def _on_death(self, outage: Outage) -> None:
        plane = self.control_planes[outage.control_plane]
        plane.is_up = False
        plane.known_live = 0
        self.ring.remove(plane.index)
        for replica in plane.replicas:
            self._wakes[replica.index] = 0
            turns = replica.evacuate()
            plane.changed(replica)
            if not outage.keeps_cache:
                replica.cache.clear()
            for turn in turns:  # clients resume at whoever the balancer gives them
                self._place(turn)

    def _on_return(self, outage: Outage) -> None:
        plane = self.control_planes[outage.control_plane]
        plane.is_up = True
        self.ring.add(
            plane.index,
            len(plane.replicas) * len(self.control_planes) / len(self.replicas),
        )
