"""A machine of work, faults and recoveries on the control stream, for property tests.

`EngineCore`s on one side, workers with the real row table and protocol over a model of block
contents on the other, between them queues that the test delivers, breaks and tampers with. The
model's next token depends on every token of a row, read through its blocks: a block reused too
early, a wrong prefix hit or a lost token gives other output than an undisturbed run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from control_stream_link import Link, Tracked
from fake_model import FakeModelRunner, expected_output
from fake_worker import StepwiseWorker
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from control_plane import router
from control_plane.cluster_config import ClusterConfig
from control_plane.engine_config import EngineConfig
from control_plane.engine_core import EngineCore
from control_plane.errors import ProtocolError
from control_plane.losses import MAX_LOSSES
from control_plane.replica import ReplicaShape, build_scheduler, read_hello
from control_plane.request import FinishReason, Request, SamplingParams
from control_plane.served_model import ServedModel
from data_plane.step_work import RowSampling
from protos.pagewire.v1 import worker_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

VOCAB_SIZE = 512
EOS = 2
MAX_MODEL_LEN = 48
LEASE_S = 10.0
STEP_TIMEOUT_S = 60.0
HOLD_S = 1.0
MODEL = ServedModel(
    name="fake",
    base_fingerprint=bytes(32),
    max_model_len=MAX_MODEL_LEN,
    vocab_size=VOCAB_SIZE,
    eos_token_ids=(EOS,),
)


class ControlStreamMachine(RuleBasedStateMachine):
    """Faults at will, then quiet: every request ends as in an undisturbed run."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.tracked: dict[str, Tracked] = {}
        self.unplaced: list[Request] = []
        self.links: list[Link] = []

    @initialize(
        lookahead=st.integers(0, 4),
        max_lookahead=st.integers(0, 16),
        reports_waits=st.booleans(),
        num_workers=st.integers(1, 2),
        num_blocks=st.integers(14, 24),
        max_num_seqs=st.integers(1, 4),
        max_num_batched_tokens=st.integers(4, 32),
        prefix_caching=st.booleans(),
    )
    def start(
        self,
        lookahead: int,
        max_lookahead: int,
        reports_waits: bool,
        num_workers: int,
        num_blocks: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefix_caching: bool,
    ) -> None:
        self.lookahead = lookahead
        self.max_lookahead = max(lookahead, max_lookahead)
        self.config = ClusterConfig(prefix_caching=prefix_caching)
        for i in range(num_workers):
            worker = StepwiseWorker(
                FakeModelRunner(num_blocks=num_blocks, block_size=4, vocab_size=VOCAB_SIZE),
                worker_id=f"w{i}",
                replica_id=f"r{i}",
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=MAX_MODEL_LEN,
            )
            # The window then follows the time that passes, from least to most.
            worker.waited_us = 0 if reports_waits else None
            self.links.append(Link(worker, self.tracked))
        self.attach(self.links[0])

    # The control plane around the cores.

    def attach(self, link: Link) -> None:
        facts = read_hello(link.worker.hello().hello, peer="test")
        shape = ReplicaShape.of_ranks([facts])
        if link.core is None or link.shape != shape:
            config = EngineConfig(
                lookahead=self.lookahead,
                max_lookahead=self.max_lookahead,
                lease_s=LEASE_S,
                step_timeout_s=STEP_TIMEOUT_S,
                audit_interval_s=0.0,
            )
            link.core = self.new_core(link, shape, config)
            link.shape = shape
            if facts.applied_version > 0 and self.config.prefix_caching:
                self.ask_store(link)
        asks = facts.applied_version > 0 and self.config.prefix_caching
        welcome = worker_pb2.Welcome(
            term=1,
            stream_id="s",
            num_blocks=facts.num_blocks,
            lookahead=self.max_lookahead,
            send_generations=asks,
        )
        welcome.lease.FromSeconds(10)
        link.to_worker.append(worker_pb2.ControlMessage(welcome=welcome))
        link.core.attach(facts.applied_version, self.now, hold_s=HOLD_S if asks else None)
        waiting, self.unplaced = self.unplaced, []
        self.place(waiting)

    def new_core(self, link: Link, shape: ReplicaShape, config: EngineConfig) -> EngineCore:
        return EngineCore(config, build_scheduler(shape, MODEL, self.config), link)

    def ask_store(self, link: Link) -> None:
        """A core of ours is new to a worker that is not: it has no store here."""

    def lose(self, link: Link) -> None:
        """The stream ends first; what was on its way either way is gone."""
        link.to_worker.clear()
        link.to_control.clear()
        requests = link.engine.detach(lost=True)
        link.worker.disconnect()
        arrivals = [request.arrival for request in requests]
        assert arrivals == sorted(arrivals)
        link.engine.scheduler.audit()
        self.place(requests)

    def place(self, requests: Iterable[Request]) -> None:
        for request in requests:
            link = router.choose(request, [link for link in self.links if link.is_up])
            self.tracked[request.req_id].home = link
            if link is None:
                self.unplaced.append(request)
            else:
                link.engine.add(request)

    def guarded(self, link: Link, action: Callable[..., None], *args: object) -> None:
        """What the shell does: a ProtocolError costs the worker its stream."""
        try:
            action(*args)
        except ProtocolError as error:
            self.lose(link)
            reason = error.reason
        else:
            return
        # The last two: tampered Generations, or a result in their place.
        assert reason in (
            "TOO_MANY_RESETS",
            "LEASE_EXPIRED",
            "STEP_TIMEOUT",
            "MALFORMED_MESSAGE",
            "UNEXPECTED_MESSAGE",
        )

    def deliver_down(self, link: Link) -> None:
        link.to_control.extend(link.worker.feed(link.to_worker.popleft()))

    def deliver_up(self, link: Link) -> None:
        message = link.to_control.popleft()
        self.guarded(link, link.engine.receive, message, self.now)

    def pick(self, index: int) -> Link:
        return self.links[index % len(self.links)]

    # Work.

    @rule(
        shared=st.integers(0, 20),
        own=st.integers(1, 6),
        salt=st.integers(0, 3),
        max_tokens=st.integers(1, 20),
        seed=st.none() | st.integers(0, 3),
        num_known=st.integers(0, 3),
        priority=st.integers(0, 1),
    )
    def submit(
        self,
        shared: int,
        own: int,
        salt: int,
        max_tokens: int,
        seed: int | None,
        num_known: int,
        priority: int,
    ) -> None:
        prompt = [10 + i for i in range(shared)] + [100 + salt * 10 + i for i in range(own)]
        total = min(len(prompt) + max_tokens, MAX_MODEL_LEN)
        temperature = 0.0 if seed is None else 1.0
        expected, reason = expected_output(
            prompt,
            max_total_tokens=total,
            vocab_size=VOCAB_SIZE,
            sampling=RowSampling(temperature=temperature),
            eos_token_ids=(EOS,),
            seed=seed or 0,
        )
        # A resume: the client has some of the output already, but not its end.
        known = expected[: min(num_known, len(expected) - 1)]
        request = Request(
            req_id=f"q{len(self.tracked)}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(temperature=temperature, max_tokens=max_tokens),
            seed=seed or 0,
            max_total_tokens=total,
            arrival=len(self.tracked),
            eos_token_ids=(EOS,),
            priority=priority,
            resume={0: known} if known else None,
        )
        tracked = Tracked(request, expected, reason)
        tracked.received = list(known)
        self.tracked[request.req_id] = tracked
        self.place([request])

    @rule(worker=st.integers(0, 1), checks_index=st.booleans())
    def order_steps(self, worker: int, checks_index: bool) -> None:
        link = self.pick(worker)
        if link.is_up:
            if checks_index:
                link.engine.index.work()
            link.engine.order_steps(self.now)

    @rule(worker=st.integers(0, 1), count=st.integers(1, 6))
    def deliver_to_worker(self, worker: int, count: int) -> None:
        link = self.pick(worker)
        for _ in range(min(count, len(link.to_worker))):
            self.deliver_down(link)

    @rule(worker=st.integers(0, 1), count=st.integers(1, 4))
    def run_steps(self, worker: int, count: int) -> None:
        link = self.pick(worker)
        for _ in range(count):
            link.to_control.extend(link.worker.run_step())

    @rule(worker=st.integers(0, 1), count=st.integers(1, 4))
    def deliver_to_control(self, worker: int, count: int) -> None:
        link = self.pick(worker)
        for _ in range(count):
            if link.to_control:
                self.deliver_up(link)

    @rule(worker=st.integers(0, 1), rounds=st.integers(1, 6))
    def run_smoothly(self, worker: int, rounds: int) -> None:
        link = self.pick(worker)
        for _ in range(rounds):
            if link.is_up:
                self.round_trip(link)

    def round_trip(self, link: Link) -> None:
        """Order, execute one step, bring everything back."""
        link.engine.index.work()
        link.engine.order_steps(self.now)
        while link.to_worker:
            self.deliver_down(link)
        link.to_control.extend(link.worker.run_step())
        while link.to_control:
            self.deliver_up(link)

    @rule(which=st.integers(0, 30))
    def abort(self, which: int) -> None:
        live = [t for t in self.tracked.values() if not t.is_over]
        if not live:
            return
        tracked = live[which % len(live)]
        tracked.aborted = True
        if tracked.home is None:
            self.unplaced.remove(tracked.request)
        else:
            tracked.home.engine.abort(tracked.request)

    @rule(which=st.integers(0, 30), back=st.integers(0, 2))
    def stop_string(self, which: int, back: int) -> None:
        live = [t for t in self.tracked.values() if not t.is_over and len(t.received) > back]
        if not live:
            return
        tracked = live[which % len(live)]
        if tracked.home is None:
            return
        tracked.stopped_at = len(tracked.received) - back
        tracked.reason = FinishReason.STOP
        del tracked.received[tracked.stopped_at :]
        tracked.home.engine.finish(
            tracked.request.sequences[0],
            num_output_tokens=tracked.stopped_at,
            reason=FinishReason.STOP,
        )

    # Faults.

    @precondition(lambda self: any(not link.is_up for link in self.links))
    @rule(worker=st.integers(0, 1))
    def reconnect(self, worker: int) -> None:
        link = self.pick(worker)
        if not link.is_up:
            self.attach(link)

    @rule(worker=st.integers(0, 1))
    def drop_connection(self, worker: int) -> None:
        link = self.pick(worker)
        if link.is_up:
            self.lose(link)

    @rule(worker=st.integers(0, 1))
    def crash(self, worker: int) -> None:
        link = self.pick(worker)
        if link.is_up:
            self.lose(link)
        link.worker.crash()

    @rule(worker=st.integers(0, 1))
    def lose_a_plan(self, worker: int) -> None:
        """The next plan builds on a version that the worker is not at: Nack, plans behind it."""
        link = self.pick(worker)
        for message in link.to_worker:
            if message.HasField("plan"):
                link.to_worker.remove(message)
                return

    @rule(worker=st.integers(0, 1))
    def fail_a_step(self, worker: int) -> None:
        link = self.pick(worker)
        if link.worker.ordered:
            link.worker.runner.fail_launch.add(link.worker.ordered[-1].version)

    @rule(worker=st.integers(0, 1), kind=st.sampled_from(["twice", "lost", "swapped"]))
    def tamper_with_results(self, worker: int, kind: str) -> None:
        queue = self.pick(worker).to_control
        if kind == "twice" and queue:
            queue.append(queue[-1])
        elif kind == "lost" and queue:
            queue.popleft()
        elif kind == "swapped" and len(queue) > 1:
            queue[0], queue[1] = queue[1], queue[0]

    @rule(worker=st.integers(0, 1), delta=st.integers(-2, 2), wrong=st.booleans())
    def forge_a_result(self, worker: int, delta: int, wrong: bool) -> None:
        """Wrong counts for the right plan, or plausible counts for a wrong one."""
        link = self.pick(worker)
        if not link.is_up:
            return
        version = link.engine.confirmed_version + 1 + delta
        counts = bytes(7) if wrong else b"\x00" * link.engine.num_running
        if not wrong and delta == 0:
            # It could be true, and then the tokens would be missing: not for us to detect.
            return
        result = worker_pb2.StepResult(version=version, counts=counts)
        message = worker_pb2.WorkerMessage(step_result=result)
        self.guarded(link, link.engine.receive, message, self.now)

    @rule(seconds=st.sampled_from([1.0, LEASE_S, STEP_TIMEOUT_S]))
    def wait(self, seconds: float) -> None:
        self.let_time_pass(seconds)

    def let_time_pass(self, seconds: float) -> None:
        self.now += seconds
        for link in self.links:
            if link.is_up:
                assert link.engine.next_check() >= 0
                is_due = link.engine.next_check() <= self.now
                self.guarded(link, link.engine.check, self.now)
                assert link.is_up is not is_due

    # What always holds.

    @invariant()
    def what_came_back_is_a_prefix_of_the_undisturbed_run(self) -> None:
        for tracked in self.tracked.values():
            assert tracked.received == tracked.expected[: len(tracked.received)]
            log = tracked.request.sequences[0].output_token_ids
            assert log == tracked.received

    @invariant()
    def every_live_request_is_in_one_place(self) -> None:
        live = [tracked for tracked in self.tracked.values() if not tracked.is_over]
        assert {t.request.req_id for t in live if t.home is None} == {
            request.req_id for request in self.unplaced
        }
        for link in self.links:
            num_here = sum(tracked.home is link for tracked in live)
            if link.core is not None:
                assert link.num_live <= num_here
                assert link.core.scheduler.has_work == (num_here > 0)

    @invariant()
    def the_window_is_kept(self) -> None:
        for link in self.links:
            if link.core is not None:
                assert link.core.num_in_flight <= self.max_lookahead + 1
                assert link.core.num_in_flight == link.core.scheduler.num_in_flight_steps
                if not link.core.num_waiting + link.core.num_running:
                    assert link.core.unstarted_tokens == link.core.uncached_tokens == 0

    def teardown(self) -> None:
        if not self.links:
            return
        for link in self.links:
            link.worker.runner.fail_launch.clear()
            if not link.is_up:
                self.attach(link)
        for _ in range(3000):
            busy = [link for link in self.links if link.is_up and not link.engine.is_idle]
            if not busy and not self.unplaced:
                break
            before = [link.engine.confirmed_version for link in busy]
            # Twice: the first may only bring the Generations that the first plan waits for.
            for link in (*busy, *busy):
                if link.is_up:
                    self.round_trip(link)
            if before == [link.engine.confirmed_version for link in busy]:
                # The last message before the quiet was lost on a stream that lives on.
                self.let_time_pass(STEP_TIMEOUT_S)
            for link in self.links:
                if not link.is_up:
                    self.attach(link)
        for tracked in self.tracked.values():
            assert tracked.is_over, tracked
            if tracked.error is not None:
                assert tracked.request.num_losses == MAX_LOSSES
            elif tracked.stopped_at is not None:
                assert tracked.received == tracked.expected[: tracked.stopped_at]
            elif not tracked.aborted:
                assert tracked.received == tracked.expected
                assert tracked.reason == tracked.expected_reason
        for link in self.links:
            scheduler = link.engine.scheduler
            scheduler.audit()
            assert scheduler.num_free_blocks == scheduler.num_usable_blocks
