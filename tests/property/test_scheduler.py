"""The scheduler against a simulated device that obeys and checks the row rules by itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulated_device import EOS, SimulatedDevice, expected_output, kv_before, kv_of

from control_plane.block_hash import BlockHasher, hash_block, hash_root
from control_plane.kv_cache_manager import KVCacheConfig, KVCacheManager
from control_plane.request import FinishReason, Request, SamplingParams, Sequence, Version
from control_plane.scheduled_step import ResultMismatchError
from control_plane.scheduler import Scheduler
from control_plane.scheduler_config import SchedulerConfig

SEED, FINGERPRINT = b"deployment", b"model"
# Prompts are cut from few texts, so that prefixes are shared by accident as often as not.
TEXTS = [
    [1, 2, 3, 4, 5, 6, 8, 10, 11, 1, 3, 5] * 3,
    [1, 2, 3, 4, 9, 9, 2, 1, 5] * 4,
    [9, 1, 2] * 12,
]


class SchedulerMachine(RuleBasedStateMachine):
    """Whatever happens in whatever order, every sequence gets exactly its tokens."""

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        spare_blocks=st.integers(0, 12),
        max_num_seqs=st.integers(1, 5),
        spare_tokens=st.integers(0, 12),
        lookahead=st.integers(0, 16),
        max_bypass=st.integers(0, 3),
        watermark=st.sampled_from([0.0, 0.1, 0.5]),
        caching=st.sampled_from([True, True, True, False]),
    )
    def start(
        self,
        block_size: int,
        spare_blocks: int,
        max_num_seqs: int,
        spare_tokens: int,
        lookahead: int,
        max_bypass: int,
        watermark: float,
        caching: bool,
    ) -> None:
        self.max_model_len = 20
        self.block_size = block_size
        num_blocks = 1 + -(-(self.max_model_len - 1) // block_size) + spare_blocks
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + spare_tokens,
            max_model_len=self.max_model_len,
            max_bypass=max_bypass,
        )
        manager = KVCacheManager(
            KVCacheConfig(
                block_size=block_size,
                num_blocks=num_blocks,
                watermark=watermark,
                enable_prefix_caching=caching,
            ),
            BlockHasher(deployment_seed=SEED, model_fingerprint=FINGERPRINT, block_size=block_size),
            max_num_seqs=max_num_seqs,
            max_model_len=self.max_model_len,
        )
        self.lookahead = lookahead
        self.scheduler = Scheduler(config, manager)
        self.pool = manager.pool
        self.device = SimulatedDevice(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            pool=self.pool,
        )
        self.version = 0
        self.requests: list[Request] = []
        self.expected: dict[Sequence, tuple[list[int], FinishReason]] = {}
        self.emitted: dict[Sequence, int] = {}
        self.overtaken: dict[Request, int] = {}
        self.store: dict[int, tuple[bytes, int]] = {}
        self.started_with: dict[Request, int] = {}

    # What clients and the edge do.

    @rule(
        text=st.sampled_from(TEXTS),
        offset=st.sampled_from([0, 0, 0, 1, 3]),
        num_prompt=st.integers(1, 18),
        max_tokens=st.integers(1, 19),
        n=st.sampled_from([1, 1, 1, 2]),
        priority=st.integers(0, 1),
        tenant=st.sampled_from("ab"),
        salt=st.sampled_from(["", "", "x"]),
        ignore_eos=st.booleans(),
        seed=st.integers(0, 2),
        num_resumed=st.sampled_from([0, 0, 1, 5]),
        num_losses=st.sampled_from([0, 0, 0, 0, 0, 2]),
        times=st.integers(1, 3),
    )
    def submit(
        self,
        text: list[int],
        offset: int,
        num_prompt: int,
        max_tokens: int,
        n: int,
        priority: int,
        tenant: str,
        salt: str,
        ignore_eos: bool,
        seed: int,
        num_resumed: int,
        num_losses: int,
        times: int,
    ) -> None:
        for _ in range(times):
            request = self.request(
                text[offset : offset + num_prompt],
                SamplingParams(
                    n=n,
                    max_tokens=max_tokens,
                    ignore_eos=ignore_eos,
                    min_tokens=min(seed, max_tokens),
                ),
                seed=seed,
                priority=priority,
                tenant=tenant,
                cache_salt=salt,
            )
            assume(self.scheduler.fits(request.max_total_tokens, n))
            request.num_losses = num_losses
            for sequence in request.sequences:
                self.expected[sequence] = expected_output(sequence)
                output, _ = self.expected[sequence]
                # What a client has of a sequence that has not ended.
                sequence.output_token_ids += output[: min(num_resumed, len(output) - 1)]
                self.emitted[sequence] = len(sequence.output_token_ids)
            self.requests.append(request)
            self.scheduler.add(request)
            num_prompt = max(1, num_prompt - 1)

    def request(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        *,
        seed: int,
        priority: int,
        tenant: str,
        cache_salt: str,
    ) -> Request:
        assert sampling.max_tokens is not None
        return Request(
            req_id=f"r{len(self.requests)}",
            prompt_token_ids=prompt,
            sampling=sampling,
            seed=seed,
            max_total_tokens=min(len(prompt) + sampling.max_tokens, self.max_model_len),
            arrival=len(self.requests),
            eos_token_ids=(EOS,),
            priority=priority,
            tenant=tenant,
            cache_salt=cache_salt,
        )

    def live(self) -> list[Request]:
        return [request for request in self.requests if not request.is_finished]

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.live()))
        for sequence in request.live_sequences:
            self.cut(sequence, len(sequence.output_token_ids), FinishReason.ABORT)
        self.scheduler.abort(request)
        self.scheduler.abort(request)
        assert request.is_finished

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def find_stop_string(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.live()))
        sequence = data.draw(st.sampled_from(request.live_sequences))
        length = data.draw(st.integers(0, len(sequence.output_token_ids)))
        self.cut(sequence, length, FinishReason.STOP)
        self.scheduler.finish(sequence, num_output_tokens=length, reason=FinishReason.STOP)

    def cut(self, sequence: Sequence, length: int, reason: FinishReason) -> None:
        self.expected[sequence] = (self.expected[sequence][0][:length], reason)

    # What the engine does.

    @rule(times=st.integers(1, 4))
    def schedule(self, times: int) -> None:
        for _ in range(times):
            if self.scheduler.num_in_flight_steps <= self.lookahead:
                self.order_step()

    def order_step(self) -> bool:
        waited = self.scheduler._waiting.requests()
        num_preempted = self.scheduler.num_preemptions
        before = self.scheduler._batch.sequences
        step = self.scheduler.schedule(Version(self.version + 1))
        if step is None:
            return False
        self.version += 1
        self.device.apply(step)
        added = list(dict.fromkeys(one.sequence.request for one in step.added))
        self.check_order(waited, added)
        self.check_alone(added)
        if self.scheduler.num_preemptions > num_preempted:
            assert not step.added, "admitted in a step that preempted"
            self.check_victims(before)
        return True

    def check_order(self, waited: list[Request], added: list[Request]) -> None:
        for request in added:
            self.overtaken.pop(request, None)
        for request in set(waited) - set(added):
            # Whom it stands before in every round, whatever the tenants' turns are.
            later = {
                other
                for other in added
                if other.priority < request.priority
                or (
                    other.priority == request.priority
                    and other.tenant == request.tenant
                    and other.arrival > request.arrival
                    and not any(s.num_replays for s in other.sequences)
                )
            }
            self.overtaken[request] = self.overtaken.get(request, 0) + len(later)
            assert self.overtaken[request] <= self.scheduler.config.max_bypass

    def check_alone(self, added: list[Request]) -> None:
        """Who was in flight at two losses runs alone for a while."""

        def num_output(request: Request) -> int:
            return sum(len(s.output_token_ids) for s in request.sequences)

        running = {s.request for s in self.scheduler._batch.sequences}
        for request in added:
            self.started_with[request] = num_output(request)
        for request in running:
            if request.num_losses >= 2 and num_output(request) < self.started_with[request] + 8:
                assert not added or added == [request] == list(running)

    def check_victims(self, before: list[Sequence]) -> None:
        rows = self.scheduler._batch
        live = [s for s in before if s.finish_reason is None]
        preempted = {s.request for s in live if s.request in self.scheduler._draining} | {
            s.request for s in live if s.request in self.scheduler._waiting
        }
        kept = {s.request for s in live if rows.row_of(s) is not None}

        def rank(request: Request) -> tuple[int, int]:
            return -request.priority, request.arrival

        assert preempted
        assert kept, "nobody is left running"
        assert max(map(rank, kept)) < min(map(rank, preempted))

    @precondition(lambda self: self.device.queue)
    @rule()
    def run_step(self) -> None:
        self.device.run_step()

    @rule(lookahead=st.integers(0, 16))
    def resize_window(self, lookahead: int) -> None:
        self.lookahead = lookahead

    @precondition(lambda self: self.scheduler.num_in_flight_steps)
    @rule(times=st.integers(1, 4))
    def deliver(self, times: int) -> None:
        for _ in range(min(times, self.scheduler.num_in_flight_steps)):
            self.deliver_one()

    def deliver_one(self) -> None:
        result = self.device.next_result()
        update = self.scheduler.update(Version(result.version), 0, *result.columns())
        assert len(update.sequences) == len(update.token_ids)
        num_errors = sum(s.finish_reason is FinishReason.ERROR for s in update.finished)
        assert len(update.sequences) + update.num_wasted + num_errors == result.counts.size
        for sequence, token in zip(update.sequences, update.token_ids, strict=True):
            assert sequence.output_token_ids[self.emitted[sequence]] == token
            self.emitted[sequence] += 1
        for sequence in update.finished:
            assert sequence.finish_reason is not None
        self.save_changes()

    @precondition(lambda self: self.scheduler.num_in_flight_steps)
    @rule(data=st.data())
    def deliver_nonsense(self, data: st.DataObject) -> None:
        result = self.device.next_result()
        self.device.results.appendleft(result)
        counts, tokens, rows, reasons = (column.copy() for column in result.columns())
        version, step = result.version, 0
        kind = data.draw(st.sampled_from(["version", "step", "count", "tokens", "row", "reason"]))
        if kind == "version":
            version += data.draw(st.sampled_from([-1, 1]))
        elif kind == "step":
            step = 1
        elif kind == "count":
            assume(counts.size)
            counts[0] = 2
        elif kind == "tokens":
            tokens = np.append(tokens, np.int32(1))
        elif kind == "row":
            rows = np.append(rows, np.int32(99))
            reasons = np.append(reasons, np.uint8(1))
        else:
            assume(rows.size)
            reasons[0] = 3
        before = [list(s.output_token_ids) for r in self.requests for s in r.sequences]
        with pytest.raises(ResultMismatchError):
            self.scheduler.update(Version(version), step, counts, tokens, rows, reasons)
        assert before == [list(s.output_token_ids) for r in self.requests for s in r.sequences]

    @rule(num_run=st.integers(0, 5))
    def reset(self, num_run: int) -> None:
        # The worker may have run steps whose results are lost.
        for _ in range(min(num_run, len(self.device.queue))):
            self.device.run_step()
        self.version += 5
        self.device.reset(self.version)
        self.scheduler.reset()
        assert self.scheduler.num_running == 0
        assert self.scheduler.num_free_blocks == self.scheduler.num_usable_blocks

    @rule(num_run=st.integers(0, 5))
    def lose_worker(self, num_run: int) -> None:
        in_flight = set(self.scheduler.requests_in_flight())
        for _ in range(min(num_run, len(self.device.queue))):
            self.device.run_step()
        self.version += 1
        self.device.reset(self.version)
        requests = self.scheduler.evacuate()
        assert requests == self.live()
        assert not self.scheduler.has_work
        assert self.scheduler.num_free_blocks == self.scheduler.num_usable_blocks
        for request in requests:
            request.num_losses += request in in_flight
            self.scheduler.add(request)

    @rule()
    def withdraw_waiting(self) -> None:
        waited = self.scheduler._waiting.requests()
        num_running = self.scheduler.num_running
        requests = self.scheduler.withdraw_waiting()
        assert requests == sorted(waited, key=lambda request: request.arrival)
        assert self.scheduler.num_running == num_running
        for request in requests:
            self.scheduler.add(request)
            # As on another replica, its turn is counted anew.
            self.overtaken.pop(request, None)

    # What always holds.

    @invariant()
    def nothing_contradicts(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.audit()
            for sequence, (output, _) in self.expected.items():
                got = sequence.output_token_ids
                assert got == output[: len(got)], "a wrong token"

    def save_changes(self) -> None:
        for block_id, entry in self.pool.take_changes().items():
            if entry is None:
                # It may have come and gone within one result.
                self.store.pop(block_id, None)
            else:
                self.store[block_id] = entry

    def check_store(self) -> None:
        """The store's copy is exact, and every entry is true of the device's memory."""
        self.save_changes()
        assert self.store == self.pool.permanent_entries()
        contents: dict[bytes, list[int]] = {}
        for request in self.requests:
            for sequence in request.sequences:
                self.add_contents(sequence, contents)
        for block_id, (block_hash, generation) in self.store.items():
            assert self.device.generations[block_id] == generation
            if block_hash in contents:
                assert self.device.contents[block_id] == contents[block_hash]
            else:
                # Only what was computed past a stop string or an abort has no log any more.
                assert any(r.is_finished for r in self.requests)

    def add_contents(self, sequence: Sequence, contents: dict[bytes, list[int]]) -> None:
        tokens = sequence.token_ids().tolist()
        parent = hash_root(
            deployment_seed=SEED,
            model_fingerprint=FINGERPRINT,
            cache_salt=sequence.request.cache_salt,
        )
        values: list[int] = []
        for token in tokens:
            values.append(kv_of(values[-1] if values else kv_before(sequence), token))
        for at in range(0, len(tokens) - self.block_size + 1, self.block_size):
            chunk = np.array(tokens[at : at + self.block_size], dtype="<i4").tobytes()
            parent = hash_block(parent, chunk)
            contents[parent] = values[at : at + self.block_size]

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        # Every step computes something for somebody; replays are the only work done twice.
        budget = 200 + 60 * len(self.requests) * 18
        while self.scheduler.has_work or self.scheduler.num_in_flight_steps:
            budget -= 1
            assert budget > 0, f"no end in sight: {self.live()}"
            has_ordered = False
            if self.scheduler.num_in_flight_steps <= self.lookahead:
                has_ordered = self.order_step()
            if not has_ordered:
                assert self.scheduler.num_in_flight_steps, f"stuck with {self.live()}"
                self.deliver_one()
            self.scheduler.audit()
        for sequence, (output, reason) in self.expected.items():
            assert sequence.output_token_ids == output
            assert sequence.finish_reason == reason
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.scheduler.num_free_blocks == self.scheduler.num_usable_blocks
        self.check_store()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
