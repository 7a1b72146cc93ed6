"""The simulated replica and the simulated fleet."""

from __future__ import annotations

import heapq
import math
from dataclasses import asdict, dataclass, field, replace

import pytest

from control_plane import router
from tests.benchmarks.scale.scenarios import setup
from tests.benchmarks.scale.service_model import Device, Replica
from tests.benchmarks.scale.simulation import ControlPlane, Outage, Setup, Simulation
from tests.benchmarks.scale.workload import (
    KINDS,
    Turn,
    Workload,
    WorkloadConfig,
    sessions_per_s,
)

DEVICE = Device(num_blocks=4000, max_num_seqs=6, lookahead=0)
SMALL = Setup(num_replicas=8, num_control_planes=4, warm_up=60, measured=60)


@dataclass
class World:
    """One replica, its wakes, and what it reports."""

    device: Device = DEVICE
    step_by_step: bool = False
    events: list[tuple[float, str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        kind = StepByStep if self.step_by_step else Replica
        self.due: float = math.inf
        self.replica = kind(0, self.device, self._schedule, self._report)
        self.numbers: dict[Turn, int] = {}

    def _schedule(self, time_s: float, replica: Replica) -> None:
        self.due = time_s

    def _report(self, now: float, replica: Replica, turn: Turn, what: str) -> None:
        self.events.append((now, what, self.numbers[turn]))

    def run(self, arrivals: list[tuple[float, Turn]]) -> None:
        queue = [(time_s, i, turn) for i, (time_s, turn) in enumerate(arrivals)]
        heapq.heapify(queue)
        while queue or self.due < math.inf:
            if queue and queue[0][0] < self.due:
                now, number, turn = heapq.heappop(queue)
                self.numbers[turn] = number
                self.replica.add(turn, now)
            else:
                now, self.due = self.due, math.inf
                self.replica.wake(now)


class StepByStep(Replica):
    """Looks at every step, as a real scheduler does."""

    def _start_run(self, now: float) -> None:
        super()._start_run(now)
        if self._run_steps > 1:
            self._run_steps = 1
            self._schedule(now + self._unit_s, self)


def turns(count: int, seed: int = 0) -> list[Turn]:
    workload = Workload(WorkloadConfig(num_system_prompts=4, num_agent_prefixes=2, seed=seed))
    return [workload.next_turn(workload.new_session()) for _ in range(count)]


def test_one_request_takes_its_prefill_and_then_a_step_per_token() -> None:
    world, [turn] = World(), turns(1)
    world.run([(1.0, turn)])
    first = 1.0 + DEVICE.fixed_s + turn.num_tokens * DEVICE.per_token_s
    last = first + (turn.num_output_tokens - 1) * (DEVICE.fixed_s + DEVICE.per_row_s)
    assert [what for _, what, _ in world.events] == ["admitted", "first", "done"]
    assert [time_s for time_s, _, _ in world.events] == pytest.approx([1.0, first, last])


@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize("gap_s", [0.0, 0.05, 0.3])
def test_runs_of_equal_steps_are_the_steps_one_by_one(gap_s: float, lookahead: int) -> None:
    arrivals = [i * gap_s + 1e-4 for i in range(40)]
    seen: list[list[tuple[float, str, int]]] = []
    for step_by_step in (False, True):
        world = World(device=replace(DEVICE, lookahead=lookahead), step_by_step=step_by_step)
        world.run(list(zip(arrivals, turns(40), strict=True)))
        seen.append(sorted(world.events, key=lambda event: (event[1], event[2])))
    assert [event[1:] for event in seen[0]] == [event[1:] for event in seen[1]]
    assert [event[0] for event in seen[0]] == pytest.approx([event[0] for event in seen[1]])


def test_a_newcomer_joins_behind_the_steps_that_are_ordered() -> None:
    [first, second] = turns(2)
    world = World(device=replace(DEVICE, lookahead=2))
    begins_s = DEVICE.fixed_s + first.num_tokens * DEVICE.per_token_s
    step_s = DEVICE.fixed_s + DEVICE.per_row_s
    world.run([(0.0, first), (begins_s + 4.5 * step_s, second)])
    admitted_s = next(time_s for time_s, *rest in world.events if rest == ["admitted", 1])
    assert admitted_s == pytest.approx(begins_s + 7 * step_s)


def test_a_newcomer_waits_for_ordered_steps_while_others_are_in_prefill_too() -> None:
    [first, second] = turns(2)
    world = World(device=replace(DEVICE, lookahead=2))
    begins_s = DEVICE.fixed_s + first.num_tokens * DEVICE.per_token_s
    step_s = DEVICE.fixed_s + DEVICE.per_row_s
    world.run([(0.0, first), (begins_s / 2, second)])
    admitted_s = next(time_s for time_s, *rest in world.events if rest == ["admitted", 1])
    assert admitted_s == pytest.approx(begins_s + 2 * step_s)


def test_rows_are_bounded_and_nobody_is_forgotten() -> None:
    world = World()
    world.run([(0.0, turn) for turn in turns(30)])
    live = most = 0
    for _, what, _ in sorted(world.events, key=lambda event: (event[0], event[1] != "done")):
        live += (what == "admitted") - (what == "done")
        most = max(most, live)
    assert most == DEVICE.max_num_seqs
    assert sum(what == "done" for _, what, _ in world.events) == 30
    assert (world.replica.num_live, world.replica.queued_whole_tokens) == (0, 0)
    assert world.replica.queued_uncached_tokens == 0


def test_an_evacuated_replica_gives_back_everybody_and_holds_nothing() -> None:
    for num_wakes in range(12):
        world = World()
        waiting = turns(12)
        for i, turn in enumerate(waiting):
            world.numbers[turn] = i
            world.replica.add(turn, 0.0)
        for _ in range(num_wakes):
            world.replica.wake(world.due)
        done = sum(what == "done" for _, what, _ in world.events)
        given_back = world.replica.evacuate()
        assert len(given_back) == len(set(given_back)) == 12 - done
        assert world.replica.num_live == 0
        assert world.replica.queued_whole_tokens == 0
        cache = world.replica.cache
        assert cache.num_free + cache.num_evictable == DEVICE.num_blocks - 1


def test_the_few_candidates_give_the_choice_among_all() -> None:
    def ignore(*_: object) -> None:
        """Nothing is awaited."""

    replicas = [Replica(i, DEVICE, ignore, ignore) for i in range(12)]
    plane = ControlPlane(0, replicas)
    for turn in turns(300):
        chosen = plane.choose(turn)
        assert chosen is router.choose(turn, replicas)  # type: ignore[type-var, arg-type]
        chosen.add(turn, 0.0)
        plane.changed(chosen)
        if chosen.num_live > 4:
            chosen.evacuate()
            plane.changed(chosen)


@pytest.mark.parametrize("policy", ["random", "connection", "hash", "hash, sticky"])
def test_the_same_seed_gives_the_same_run(policy: str) -> None:
    made = setup(8, 4, policy, warm_up=40, measured=40)
    first, second = (asdict(Simulation(made).run()) for _ in range(2))
    assert first == second
    assert asdict(Simulation(replace(made, seed=1)).run()) != first


def test_prefixes_kept_together_hit_more_than_at_random_and_less_than_is_possible() -> None:
    rate = {
        policy: Simulation(setup(8, 4, policy, warm_up=100, measured=100)).run().hit_rate
        for policy in ("random", "hash, sticky")
    }
    oracle = Simulation(setup(8, warm_up=100, measured=100)).run()
    assert rate["random"] + 0.05 < rate["hash, sticky"]
    assert oracle.hit_rate < oracle.reusable


def test_spill_keeps_a_hot_prefix_from_one_control_plane() -> None:
    balance = {
        spill: Simulation(replace(SMALL, hot_share=0.5, spill=spill)).run().plane_balance
        for spill in (1.25, math.inf)
    }
    assert balance[1.25] < 1.5 < balance[math.inf]


def test_a_dead_control_plane_serves_nothing_and_its_requests_are_answered_elsewhere() -> None:
    outage = Outage(control_plane=0, from_s=0.5, to_s=math.inf)
    simulation = Simulation(replace(SMALL, load=0.4, outages=(outage,)))
    outcome = simulation.run()
    assert all(replica.num_live == 0 for replica in simulation.control_planes[0].replicas)
    assert not outcome.is_overloaded
    assert outcome.ttft_ms[1] < 5_000


def test_a_control_plane_that_joins_late_gets_its_share() -> None:
    outage = Outage(control_plane=0, from_s=-1, to_s=0.5)
    simulation = Simulation(replace(SMALL, outages=(outage,), load=0.4))
    assert not simulation.control_planes[0].replicas[0].num_steps
    simulation.run()
    assert all(replica.num_steps for replica in simulation.control_planes[0].replicas)


def test_arrivals_are_the_share_of_what_the_rows_can_carry() -> None:
    # At the limit, steps with all rows decoding and their prefills fill every second.
    device = Device()
    rate = sessions_per_s(device, load=1.0, num_replicas=1)
    requests = rate / sum(kind.share / kind.mean_turns for kind in KINDS)
    new = sum(kind.share * sum(kind.question) / 2 * 16 for kind in KINDS)
    output = sum(kind.share * (sum(kind.answer) / 2 * 16 + 1) for kind in KINDS)
    steps = requests * output / device.max_num_seqs
    busy = steps * (device.fixed_s + device.max_num_seqs * device.per_row_s)
    assert busy + requests * new * device.per_token_s == pytest.approx(1.0)


def test_a_setup_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="placement"):
        Setup(num_replicas=4, placement="nearest")
    with pytest.raises(ValueError, match="key"):
        Setup(num_replicas=4, key="tenant")
    with pytest.raises(ValueError, match="5 control planes"):
        Setup(num_replicas=4, num_control_planes=5)
