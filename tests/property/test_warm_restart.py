"""Control planes that die, come back and serve beside each other never hit a wrong block.

The machine of the control stream, and around it: control planes that end or are cut off and live
on, a store behind each that lags, loses, mixes up and corrupts, and clients that resume. Workers
compute from what their blocks really hold, so an adopted block with a wrong hash gives a wrong
token.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from control_stream_machine import HOLD_S, MODEL, ControlStreamMachine
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from control_plane.cluster_config import ClusterConfig
from control_plane.engine_core import EngineCore
from control_plane.errors import ProtocolError
from control_plane.prefix_store import EntryCodec, PrefixScope
from control_plane.replica import build_scheduler
from control_plane.request import Request

if TYPE_CHECKING:
    from collections.abc import Mapping

    from control_stream_link import Link

    from control_plane.engine_config import EngineConfig
    from control_plane.errors import ServingError
    from control_plane.replica import ReplicaShape
    from control_plane.request import BlockHash, BlockId, Version
    from control_plane.scheduled_step import StepUpdate
    from protos.pagewire.v1 import worker_pb2

    Changes = Mapping[BlockId, tuple[BlockHash, Version] | None]


def scope_of(shape: ReplicaShape, deployment: str = "default") -> PrefixScope:
    return PrefixScope(deployment, shape.model_fingerprint, shape.replica_epoch)


@dataclass(eq=False)
class Plane:
    """One control plane process: its cores, and what it has not written to the store yet."""

    cores: dict[Link, tuple[EngineCore, ReplicaShape]] = field(default_factory=dict)
    unwritten: deque[tuple[PrefixScope, Changes]] = field(default_factory=deque)
    is_cut_off: bool = False


@dataclass(eq=False)
class Output:
    """Where a core's messages go: nowhere, once its process is cut off from worker and clients."""

    link: Link
    plane: Plane
    shape: ReplicaShape

    def send(self, message: worker_pb2.ControlMessage) -> None:
        if not self.plane.is_cut_off:
            self.link.send(message)

    def advance(self, update: StepUpdate) -> None:
        if not self.plane.is_cut_off:
            self.link.advance(update)

    def started(self, request: Request) -> None:
        """Nothing that a client would see."""

    def fail(self, request: Request, error: ServingError) -> None:
        if not self.plane.is_cut_off:
            self.link.fail(request, error)

    def index_changed(self, changes: Changes) -> None:
        self.plane.unwritten.append((scope_of(self.shape), dict(changes)))


class WarmRestartMachine(ControlStreamMachine):
    """Adds restarts, a store, and an old control plane beside its successor."""

    def __init__(self) -> None:
        super().__init__()
        self.plane = Plane()
        self.others: list[Plane] = []
        self.store: dict[PrefixScope, dict[int, bytes]] = {}
        self.saved: dict[PrefixScope, dict[int, bytes]] = {}
        self.asked: list[tuple[EngineCore, PrefixScope]] = []
        self.is_quiet = False

    def new_core(self, link: Link, shape: ReplicaShape, config: EngineConfig) -> EngineCore:
        output = Output(link, self.plane, shape)
        core = EngineCore(config, build_scheduler(shape, MODEL, self.config), output)
        self.plane.cores[link] = (core, shape)
        return core

    def attach(self, link: Link) -> None:
        self.config = ClusterConfig(prefix_caching=True)
        super().attach(link)

    # Long ways in one step: random ones alone seldom get there.

    @rule(is_written=st.booleans())
    def all_work_is_done(self, is_written: bool) -> None:
        for link in self.links:
            if not link.is_up:
                self.attach(link)
        for _ in range(40):
            busy = [link for link in self.links if link.is_up and not link.engine.is_idle]
            for link in busy:
                self.round_trip(link)
            if not busy:
                break
        while is_written and self.plane.unwritten:
            self.write(*self.plane.unwritten.popleft())

    @rule(
        goes_back=st.booleans(),
        lives_on=st.booleans(),
        answers=st.sampled_from(["before", "late", "never"]),
        waits=st.booleans(),
    )
    def another_control_plane_serves(
        self, goes_back: bool, lives_on: bool, answers: str, waits: bool
    ) -> None:
        if goes_back and self.others:
            self.an_old_control_plane_comes_back(lives_on=lives_on, results=9, which=0)
        else:
            self.the_control_plane_is_replaced(lives_on=lives_on, results=9)
        for link in self.links:
            self.attach(link)
            if answers == "before":
                while self.asked:
                    self.the_store_answers(0)
            if waits:
                # Plans come before Generations.
                self.let_time_pass(HOLD_S)
                if link.is_up:
                    link.engine.order_steps(self.now)
            if link.is_up:
                self.round_trip(link)
        while self.asked and answers == "late":
            self.the_store_answers(0)

    # The store: whoever writes, writes late.

    def ask_store(self, link: Link) -> None:
        assert link.core is not None
        assert link.shape is not None
        link.core.expect_entries()
        self.asked.append((link.core, scope_of(link.shape)))
        if self.is_quiet:
            self.the_store_answers(0)

    @rule(which=st.integers(0, 3))
    def the_store_answers(self, which: int) -> None:
        if self.asked:
            core, scope = self.asked.pop(which % len(self.asked))
            codec = EntryCodec(scope)
            entries = {i: codec.decode(i, value) for i, value in self.store.get(scope, {}).items()}
            core.offer_entries({i: entry for i, entry in entries.items() if entry is not None})  # type: ignore[misc]

    @rule(count=st.integers(1, 8), by_other=st.integers(0, 2), is_lost=st.booleans())
    def changes_are_written(self, count: int, by_other: int, is_lost: bool) -> None:
        """By the present control plane or by an old one; or they are lost on the way."""
        planes = [self.plane, *self.others]
        plane = planes[by_other % len(planes)]
        for _ in range(min(count, len(plane.unwritten))):
            scope, changes = plane.unwritten.popleft()
            if not is_lost:
                self.write(scope, changes)

    def write(self, scope: PrefixScope, changes: Changes) -> None:
        values, codec = self.store.setdefault(scope, {}), EntryCodec(scope)
        for block_id, entry in changes.items():
            if entry is None:
                values.pop(block_id, None)
            else:
                values[block_id] = codec.encode(block_id, *entry)

    @rule(by_other=st.integers(0, 2))
    def everything_live_is_written_again(self, by_other: int) -> None:
        planes = [self.plane, *self.others]
        plane = planes[by_other % len(planes)]
        plane.unwritten.clear()
        for core, shape in plane.cores.values():
            self.write(scope_of(shape), core.live_entries())

    @rule()
    def the_store_is_saved(self) -> None:
        self.saved = {scope: dict(values) for scope, values in self.store.items()}

    @rule()
    def the_store_comes_back_as_it_was_saved(self) -> None:
        self.store = {scope: dict(values) for scope, values in self.saved.items()}

    @rule()
    def the_store_is_wiped(self) -> None:
        self.store.clear()

    @rule(
        kind=st.sampled_from(["evicted", "flipped", "swapped", "moved", "of another deployment"]),
        which=st.integers(0, 30),
        other=st.integers(0, 30),
        byte=st.integers(0, 48),
    )
    def a_value_is_damaged(self, kind: str, which: int, other: int, byte: int) -> None:
        for scope, values in self.store.items():
            if not values:
                continue
            ids = sorted(values)
            first, second = ids[which % len(ids)], ids[other % len(ids)]
            value = values[first]
            if kind == "evicted":
                del values[first]
            elif kind == "flipped":
                values[first] = value[:byte] + bytes([value[byte] ^ 1]) + value[byte + 1 :]
            elif kind == "swapped":
                values[first], values[second] = values[second], value
            elif kind == "moved":
                values[second % 24] = value
            else:
                _, *rest = EntryCodec(scope).decode(first, value) or (None,)
                codec = EntryCodec(PrefixScope("other", scope.model_fingerprint, b"other"))
                values[first] = codec.encode(first, bytes(32), rest[0] if rest else 1)

    # Control planes come and go.

    @rule(lives_on=st.booleans(), results=st.integers(0, 6))
    def the_control_plane_is_replaced(self, lives_on: bool, results: int) -> None:
        """It dies, or it is cut off and still reads what the workers had sent by then."""
        self.leave(lives_on=lives_on, results=results)
        self.plane = Plane()

    @precondition(lambda self: self.others)
    @rule(lives_on=st.booleans(), results=st.integers(0, 6), which=st.integers(0, 3))
    def an_old_control_plane_comes_back(self, lives_on: bool, results: int, which: int) -> None:
        """With an equal term, as when the store was away at the successor's start."""
        plane = self.others.pop(which % len(self.others))
        self.leave(lives_on=lives_on, results=results)
        plane.is_cut_off = False
        self.plane = plane
        for link in self.links:
            link.core, link.shape = plane.cores.get(link, (None, None))

    def leave(self, *, lives_on: bool, results: int) -> None:
        old = self.plane
        old.is_cut_off = True
        for link in self.links:
            if link.is_up:
                link.worker.disconnect()
                for message in list(link.to_control)[: results if lives_on else 0]:
                    try:
                        link.engine.receive(message, self.now)
                    except ProtocolError:
                        break
                link.engine.detach(lost=True)
                link.engine.scheduler.audit()
            link.to_worker.clear()
            link.to_control.clear()
            link.core = link.shape = None
        if lives_on:
            self.others.append(old)
        else:
            gone = [core for core, _ in old.cores.values()]
            self.asked = [(core, scope) for core, scope in self.asked if core not in gone]
        self.resume()

    def resume(self) -> None:
        """Every client whose stream broke sends its request again, with what it has."""
        self.unplaced = []
        for tracked in self.tracked.values():
            if tracked.is_over:
                continue
            old = tracked.request
            tracked.request = Request(
                req_id=old.req_id,
                prompt_token_ids=old.prompt_token_ids,
                sampling=old.sampling,
                seed=old.seed,
                max_total_tokens=old.max_total_tokens,
                arrival=old.arrival,
                eos_token_ids=old.eos_token_ids,
                priority=old.priority,
                resume={0: list(tracked.received)} if tracked.received else None,
            )
            self.place([tracked.request])

    def place(self, requests: object) -> None:
        super().place(requests)  # type: ignore[arg-type]
        self.unplaced.sort(key=lambda request: request.arrival)

    def teardown(self) -> None:
        self.is_quiet = True
        while self.asked:
            self.the_store_answers(0)
        super().teardown()


TestWarmRestart = WarmRestartMachine.TestCase
TestWarmRestart.settings = settings(
    max_examples=100,
    stateful_step_count=70,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
