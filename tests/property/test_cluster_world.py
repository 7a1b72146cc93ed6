"""Any order of work, faults and recoveries of whole control planes leaves every request right.

Control planes die, are cut off, come back and serve beside their successors; workers crash, hang,
drain, fail steps and lose streams on one side or on both; the store behind lags, loses, lies and
goes away; messages are lost, doubled and swapped. No token is lost or doubled, no block is in two
places, no name in an index is wrong, and everything is free at the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster_world import HOLD_S, LEASE_S, REPLICA_WAIT_S, STEP_TIMEOUT_S, World
from fake_store import FakeServer
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from protos.pagewire.v1 import worker_pb2

if TYPE_CHECKING:
    from cluster_world import Client, Plane, Worker

MAX_PLANES = 3
MAX_LIVE = 10
WHICH = st.integers(0, 30)


class ClusterMachine(RuleBasedStateMachine):
    """Moves a `World`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_started = False
        # What happens between two rules: messages and steps per worker; 0: nothing by itself.
        self.pace = 0
        self.saved = FakeServer()

    @initialize(
        num_workers=st.integers(1, 3),
        num_blocks=st.integers(14, 24),
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(4, 32),
        lookahead=st.integers(0, 4),
        pace=st.integers(0, 3),
        num_clients=st.integers(0, 5),
        return_wait_s=st.sampled_from([0.0, 1.5]),
    )
    def start(
        self,
        num_workers: int,
        num_blocks: int,
        max_num_seqs: int,
        budget: int,
        lookahead: int,
        pace: int,
        num_clients: int,
        return_wait_s: float,
    ) -> None:
        self.pace = pace
        self.world = World(
            num_workers=num_workers,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            lookahead=lookahead,
            return_wait_s=return_wait_s,
        )
        self.is_started = True
        plane = self.world.start_plane()
        for worker in self.world.workers:
            self.world.attach(worker, plane)
        for index in range(num_clients):
            client = self.world.new_client([*range(10, 30), 100 + index], max_tokens=20)
            self.world.send(client, plane)

    def worker(self, which: int) -> Worker:
        return self.world.workers[which % len(self.world.workers)]

    def planes(self) -> list[Plane]:
        return [plane for plane in self.world.planes if plane.is_alive]

    def plane(self, which: int) -> Plane | None:
        """The newest one most often: smaller examples are found that way."""
        reachable = [plane for plane in reversed(self.planes()) if plane.takes_requests]
        return reachable[which % len(reachable)] if reachable else None

    def live_clients(self) -> list[Client]:
        return [client for client in self.world.clients if not client.is_over]

    # Work.

    @rule(
        shared=st.integers(0, 20),
        own=st.integers(1, 6),
        salt=st.integers(0, 3),
        max_tokens=st.integers(1, 20),
        seed=st.none() | st.integers(0, 3),
        known=st.integers(0, 3),
        priority=st.integers(0, 1),
        stop_after=st.none() | st.integers(1, 8),
        plane=st.integers(0, 2),
        copies=st.integers(1, 3),
    )
    def submit(
        self,
        shared: int,
        own: int,
        salt: int,
        max_tokens: int,
        seed: int | None,
        known: int,
        priority: int,
        stop_after: int | None,
        plane: int,
        copies: int,
    ) -> None:
        target = self.plane(plane)
        for copy in range(min(copies, MAX_LIVE - len(self.live_clients()))):
            client = self.world.new_client(
                [10 + i for i in range(shared)] + [100 + salt * 10 + i + copy for i in range(own)],
                max_tokens=max_tokens,
                temperature=0.0 if seed is None else 1.0,
                seed=seed or 0,
                salt="ab"[salt // 2],
                priority=priority,
                stop_after=stop_after,
                known=known,
            )
            if target is not None:
                self.world.send(client, target)

    @rule(rounds=st.integers(1, 6))
    def work(self, rounds: int) -> None:
        for _ in range(rounds):
            for worker in self.world.workers:
                self.world.round_trip(worker)

    @rule(which=WHICH, down=st.integers(0, 4), steps=st.integers(0, 4), up=st.integers(0, 4))
    def a_part_of_the_way(self, which: int, down: int, steps: int, up: int) -> None:
        worker = self.worker(which)
        self.world.run()
        self.world.deliver_down(worker, down)
        self.world.run_steps(worker, steps)
        self.world.deliver_up(worker, up)

    @rule(is_written=st.booleans())
    def all_work_is_done(self, is_written: bool) -> None:
        """A long way in one step: random ones alone seldom get there."""
        for _ in range(40):
            if all(client.plane is None for client in self.live_clients()):
                break
            for worker in self.world.workers:
                self.world.round_trip(worker)
        for plane in self.planes() if is_written else ():
            plane.store.flush()

    @rule(which=WHICH)
    def a_client_leaves(self, which: int) -> None:
        live = self.live_clients()
        if live:
            self.world.leave(live[which % len(live)])

    @rule(plane=st.integers(0, 2))
    def broken_clients_resume(self, plane: int) -> None:
        target = self.plane(plane)
        for client in self.live_clients():
            if target is not None:
                self.world.send(client, target)

    # Workers.

    @rule(which=WHICH, plane=st.integers(0, 2))
    def workers_attach(self, which: int, plane: int) -> None:
        """One of them, or all."""
        target = self.plane(plane)
        workers = self.world.workers if which > 15 else [self.worker(which)]
        for worker in workers if target is not None else ():
            if worker.has_exited:
                self.world.crash(worker)
            self.world.attach(worker, target)  # type: ignore[arg-type]

    @rule(
        which=WHICH,
        kind=st.sampled_from(["stream", "crash"]),
        control_notices=st.booleans(),
        comes_back=st.booleans(),
    )
    def a_worker_is_lost(
        self, which: int, kind: str, control_notices: bool, comes_back: bool
    ) -> None:
        """Its stream breaks, or its process ends and another comes under the same id."""
        worker = self.worker(which)
        if kind == "crash":
            self.world.crash(worker, control_notices=control_notices)
        else:
            self.world.break_stream(worker, control_notices=control_notices)
        target = self.plane(0)
        if comes_back and target is not None:
            self.world.attach(worker, target)

    @rule(which=WHICH, kind=st.sampled_from(["hangs", "wakes", "drains at once", "drains"]))
    def a_worker_changes(self, which: int, kind: str) -> None:
        worker = self.worker(which)
        if kind in ("hangs", "wakes"):
            worker.is_hung = kind == "hangs"
        else:
            self.world.drain(worker, 60.0 if kind == "drains" else 0.5)
            self.world.deliver_up(worker)

    @rule(which=WHICH, nth=st.integers(0, 3))
    def a_step_fails(self, which: int, nth: int) -> None:
        worker = self.worker(which)
        self.world.run()
        self.world.deliver_down(worker)
        if len(worker.ordered) > nth:
            worker.runner.fail_launch.add(worker.ordered[nth].version)

    # Messages.

    @rule(which=WHICH, nth=st.integers(0, 3))
    def a_plan_is_lost(self, which: int, nth: int) -> None:
        self.world.run()
        connection = self.worker(which).connection
        if connection is None:
            return
        plans = [
            message
            for message in connection.to_worker
            if isinstance(message, worker_pb2.ControlMessage) and message.HasField("plan")
        ]
        if len(plans) > nth:
            connection.to_worker.remove(plans[nth])

    @rule(which=WHICH, kind=st.sampled_from(["twice", "lost", "swapped"]))
    def a_result_is_tampered_with(self, which: int, kind: str) -> None:
        worker = self.worker(which)
        self.world.run()
        self.world.deliver_down(worker)
        self.world.run_steps(worker)
        queue = worker.connection.to_control if worker.connection else None
        if kind == "twice" and queue:
            queue.append(queue[-1])
        elif kind == "lost" and queue:
            queue.popleft()
        elif kind == "swapped" and queue and len(queue) > 1:
            queue[0], queue[1] = queue[1], queue[0]

    # Time.

    @rule(
        seconds=st.sampled_from([0.1, HOLD_S, LEASE_S, REPLICA_WAIT_S, STEP_TIMEOUT_S, 310.0]),
        kind=st.sampled_from(["as usual", "in silence", "nobody runs"]),
    )
    def time_passes(self, seconds: float, kind: str) -> None:
        """The last: the machine of the control planes stands still."""
        if kind == "nobody runs":
            self.world.loop.now_s += seconds
        else:
            self.world.wait(seconds, heartbeats=kind == "as usual")

    # Control planes.

    @rule(
        kind=st.sampled_from(["dies", "is cut off", "stays"]),
        workers=st.sampled_from(["all", "one", "none"]),
        which=WHICH,
        waits=st.booleans(),
    )
    def another_control_plane_serves(
        self, kind: str, workers: str, which: int, waits: bool
    ) -> None:
        old = self.plane(0)
        if old is not None and kind == "dies":
            self.world.kill_plane(old)
        elif old is not None and kind == "is cut off":
            self.world.cut_plane(old)
        if len(self.planes()) >= MAX_PLANES:
            self.world.kill_plane(self.planes()[0])
        plane = self.world.start_plane()
        self._move_to(plane, workers, which)
        if waits:
            # Plans come before what was asked for.
            self.world.run(HOLD_S)
        self.broken_clients_resume(0)

    @rule(which=WHICH)
    def a_control_plane_dies(self, which: int) -> None:
        planes = self.planes()
        if planes:
            self.world.kill_plane(planes[which % len(planes)])

    @rule(which=WHICH, workers=st.sampled_from(["all", "one", "none"]))
    def a_control_plane_that_was_cut_off_comes_back(self, which: int, workers: str) -> None:
        planes = [plane for plane in self.planes() if plane.is_cut]
        if planes:
            plane = planes[which % len(planes)]
            self.world.mend_plane(plane)
            self._move_to(plane, workers, which)

    def _move_to(self, plane: Plane, workers: str, which: int) -> None:
        moving = {"all": self.world.workers, "one": [self.worker(which)], "none": []}[workers]
        for worker in moving:
            self.world.break_stream(worker)
            self.world.attach(worker, plane)

    # The store.

    @rule(which=WHICH, count=st.integers(1, 8), loses=st.sampled_from([False, False, True]))
    def changes_are_written(self, which: int, count: int, loses: bool) -> None:
        planes = self.planes()
        if planes:
            planes[which % len(planes)].store.flush(count, loses=loses)

    @rule(
        kind=st.sampled_from(
            ["away", "read-only", "slow", "healthy", "wiped", "saved", "restored", "written"]
        )
    )
    def the_store_changes(self, kind: str) -> None:
        server = self.world.server
        if kind == "wiped":
            server.wipe()
        elif kind == "saved":
            self.saved = server.copy()
        elif kind == "restored":
            server.restore(self.saved)
        elif kind == "written":
            for plane in self.planes():
                plane.store.flush()
        else:
            server.heal()
            server.is_away = kind == "away"
            server.is_read_only = kind == "read-only"
            server.delay_s = 2.0 if kind == "slow" else 0.0

    @rule(
        kind=st.sampled_from(["evicted", "flipped", "cut", "swapped", "moved", "foreign"]),
        which=WHICH,
        other=WHICH,
    )
    def a_stored_value_is_damaged(self, kind: str, which: int, other: int) -> None:
        self.world.server.damage(kind, which, other)

    # What holds.

    @invariant()
    def things_go_on_and_everything_agrees(self) -> None:
        if self.is_started:
            self.world.check()
            for worker in self.world.workers if self.pace else ():
                self.world.deliver_down(worker, self.pace)
                self.world.run_steps(worker, self.pace)
                self.world.deliver_up(worker, self.pace)
            self.world.check()

    def teardown(self) -> None:
        if not self.is_started:
            return
        try:
            self.world.come_to_rest()
        finally:
            self.world.close()


TestClusterWorld = ClusterMachine.TestCase
TestClusterWorld.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
