from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from control_plane.block_hash import BlockHasher
from control_plane.errors import InvariantError, RequestTooLongError
from control_plane.kv_cache_manager import KVCacheConfig, KVCacheManager
from control_plane.request import FinishReason, Request, SamplingParams, Version
from control_plane.scheduler import Scheduler
from control_plane.scheduler_config import SchedulerConfig

if TYPE_CHECKING:
    from collections.abc import Iterable

    from control_plane.scheduled_step import ScheduledStep, StepUpdate

BLOCK_SIZE = 4


class Driver:
    """A scheduler and the shortest way to drive it."""

    def __init__(
        self,
        *,
        num_blocks: int = 41,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 64,
        max_bypass: int = 0,
        watermark: float = 0.0,
    ) -> None:
        manager = KVCacheManager(
            KVCacheConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks, watermark=watermark),
            BlockHasher(deployment_seed=b"d", model_fingerprint=b"m", block_size=BLOCK_SIZE),
            max_num_seqs=max_num_seqs,
            max_model_len=64,
        )
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=64,
            max_bypass=max_bypass,
        )
        self.scheduler = Scheduler(config, manager)
        self.pool = manager.pool
        self.version = 0
        self.num_requests = 0

    def add(
        self, prompt: Iterable[int], *, max_tokens: int = 9, n: int = 1, **fields: object
    ) -> Request:
        prompt = list(prompt)
        request = Request(
            req_id=f"r{self.num_requests}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(n=n),
            seed=0,
            max_total_tokens=len(prompt) + max_tokens,
            arrival=self.num_requests,
            **fields,  # type: ignore[arg-type]
        )
        self.num_requests += 1
        self.scheduler.add(request)
        return request

    def order(self) -> ScheduledStep | None:
        step = self.scheduler.schedule(Version(self.version + 1))
        self.version += step is not None
        self.scheduler.audit()
        return step

    def must_order(self) -> ScheduledStep:
        step = self.order()
        assert step is not None
        return step

    def answer(
        self,
        step: ScheduledStep,
        finished: dict[int, FinishReason] | None = None,
        silent: Iterable[int] = (),
        token: int = 7,
    ) -> StepUpdate:
        rows = step.sampled_rows.tolist()
        finished = finished or {}
        counts = np.array([row not in silent for row in rows], dtype=np.uint8)
        update = self.scheduler.update(
            step.version,
            0,
            counts,
            np.full(int(counts.sum()), token, dtype=np.int32),
            np.array(sorted(finished), dtype=np.int32),
            np.array([finished[row] for row in sorted(finished)], dtype=np.uint8),
        )
        self.scheduler.audit()
        return update

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.answer(self.must_order())


def prompt(start: int, length: int) -> range:
    return range(start, start + length)


# Steps and their rows.


def test_row_computes_chunk_by_chunk_and_samples_with_the_last_known_token():
    driver = Driver(max_num_seqs=2, max_num_batched_tokens=6)
    request = driver.add(prompt(0, 10))
    first, second, third = (driver.must_order() for _ in range(3))
    assert first.added[0].block_ids.size == 3
    assert [s.chunk_num_tokens.tolist() for s in (first, second, third)] == [[6], [4], []]
    assert [s.sampled_rows.tolist() for s in (first, second, third)] == [[], [0], [0]]
    assert [s.num_tokens for s in (first, second, third)] == [6, 4, 1]
    for step in (first, second, third):
        driver.answer(step)
    assert request.sequences[0].output_token_ids == [7, 7]


def test_block_is_appended_when_the_next_token_needs_it():
    driver = Driver()
    driver.add(prompt(0, 3))
    driver.add(prompt(50, 4))
    driver.run(1)
    step = driver.must_order()
    assert step.appended_rows.tolist() == [1]
    assert step.appended_counts.tolist() == [1]
    step = driver.must_order()
    assert step.appended_rows.tolist() == [0]


def test_row_stops_at_its_length_limit_before_results_come():
    driver = Driver()
    request = driver.add(prompt(0, 3), max_tokens=3)
    steps = [driver.must_order() for _ in range(3)]
    assert driver.order() is None
    driver.answer(steps[0])
    driver.answer(steps[1])
    update = driver.answer(steps[2], {0: FinishReason.LENGTH})
    assert update.finished == request.sequences
    assert request.sequences[0].output_token_ids == [7, 7, 7]
    assert not driver.scheduler.has_work


def test_one_token_request_samples_once():
    driver = Driver()
    driver.add(prompt(0, 3), max_tokens=1)
    step = driver.must_order()
    assert driver.order() is None
    driver.answer(step, {0: FinishReason.LENGTH})
    assert not driver.scheduler.has_work


def test_rows_after_the_end_are_reported_empty_and_removed_with_the_next_work():
    driver = Driver()
    driver.add(prompt(0, 3))
    first, late = driver.must_order(), driver.must_order()
    driver.answer(first, {0: FinishReason.STOP})
    update = driver.answer(late, silent=[0])
    assert (update.sequences, update.finished) == ([], [])
    assert (update.num_wasted, update.is_wasted) == (1, True)
    assert driver.order() is None
    driver.add(prompt(9, 3))
    step = driver.must_order()
    assert step.removed_rows.tolist() == [0]
    assert step.added[0].row == 0


def test_decoding_rows_go_before_prefills_and_prefills_before_waiting_requests():
    driver = Driver(max_num_seqs=3, max_num_batched_tokens=8)
    driver.add(prompt(0, 4))
    driver.run(1)
    driver.add(prompt(20, 10))
    driver.add(prompt(40, 4))
    step = driver.must_order()
    assert (step.num_tokens, step.chunk_rows.tolist()) == (8, [1])
    step = driver.must_order()
    assert step.sampled_rows.tolist() == [0, 1, 2]
    assert step.chunk_num_tokens.tolist() == [3, 4]


def test_versions_only_go_up():
    driver = Driver()
    driver.add(prompt(0, 3))
    driver.run(2)
    with pytest.raises(InvariantError, match="plan 2 follows plan 2"):
        driver.scheduler.schedule(Version(2))


# Sharing.


def test_request_waits_for_the_next_plan_when_this_one_computes_its_prefix():
    driver = Driver()
    driver.add(prompt(0, 9))
    twin = driver.add(prompt(0, 9))
    other = driver.add(prompt(30, 3))
    assert [one.sequence.request for one in driver.must_order().added] != [twin]
    step = driver.must_order()
    assert twin.sequences[0] in [one.sequence for one in step.added]
    assert twin.sequences[0].num_cached_tokens == 8
    assert other.sequences[0].num_cached_tokens == 0


def test_whatever_a_sequence_decoded_is_found_by_the_next():
    driver = Driver()
    request = driver.add(prompt(0, 3), max_tokens=10)
    driver.run(9)
    driver.scheduler.finish(request.sequences[0], num_output_tokens=9, reason=FinishReason.STOP)
    again = driver.add([0, 1, 2] + [7] * 9)
    assert driver.scheduler.count_cached_tokens(again) == 8
    driver.must_order()
    assert again.sequences[0].num_cached_tokens == 8


def test_other_salt_or_adapter_shares_nothing():
    driver = Driver()
    driver.add(prompt(0, 9))
    driver.run(1)
    for fields in ({"cache_salt": "x"}, {"adapter": "a"}, {"adapter_version": "2"}):
        request = driver.add(prompt(0, 9), **fields)
        assert driver.scheduler.count_cached_tokens(request) == 0


def test_values_that_cannot_be_trusted_lose_their_names():
    driver = Driver()
    driver.add(prompt(0, 9))
    step = driver.must_order()
    assert driver.scheduler.num_cached_blocks == 2
    update = driver.answer(step, {0: FinishReason.ERROR}, silent=[0])
    assert update.finished[0].finish_reason is FinishReason.ERROR
    assert driver.scheduler.num_cached_blocks == 0
    assert driver.pool.take_changes() in ({}, {1: None, 2: None})


# Preemption.


def full_pool() -> tuple[Driver, list[Request]]:
    """Three requests that fill all six blocks and need one more each."""
    driver = Driver(num_blocks=7)
    requests = [driver.add(prompt(20 * i, 8), max_tokens=8) for i in range(3)]
    return driver, requests


def test_youngest_is_preempted_and_nobody_admitted_in_that_step():
    driver, requests = full_pool()
    driver.run(1)
    late = driver.add(prompt(70, 1))
    step = driver.must_order()
    assert step.removed_rows.tolist() == [2]
    assert step.sampled_rows.tolist() == [0, 1]
    assert step.added == []
    assert driver.scheduler.num_preemptions == 1
    assert driver.scheduler.num_waiting == 2
    assert late.sequences[0].num_admissions == 0
    assert requests[2].sequences[0].output_token_ids == [7]


def test_lowest_priority_is_preempted_even_if_it_is_the_oldest():
    driver = Driver(num_blocks=7)
    low = driver.add(prompt(0, 8), max_tokens=8, priority=-1)
    driver.add(prompt(20, 8), max_tokens=8)
    driver.add(prompt(40, 8), max_tokens=8)
    driver.run(1)
    driver.must_order()
    assert driver.scheduler._batch.row_of(low.sequences[0]) is None
    assert driver.scheduler.num_running == 2


def test_tokens_of_steps_in_flight_are_kept_and_awaited_by_a_preempted_sequence():
    driver, requests = full_pool()
    first = driver.must_order()
    second = driver.must_order()
    assert second.removed_rows.tolist() == [2]
    driver.scheduler.abort(requests[0])
    third = driver.must_order()
    assert requests[2].sequences[0] not in [one.sequence for one in third.added]
    driver.answer(first)
    assert requests[2].sequences[0].output_token_ids == [7]
    fourth = driver.must_order()
    assert [one.sequence for one in fourth.added] == requests[2].sequences
    assert fourth.added[0].token_ids.tolist() == [*prompt(40, 8), 7]
    assert requests[2].sequences[0].num_replays == 1


def test_preempted_sequence_can_end_while_its_steps_come_back():
    driver, requests = full_pool()
    first = driver.must_order()
    driver.must_order()
    update = driver.answer(first, {2: FinishReason.STOP})
    assert update.finished == requests[2].sequences
    assert driver.scheduler.num_waiting == 0


def test_blocks_of_a_row_that_has_nothing_to_compute_go_before_a_preemption():
    driver = Driver(num_blocks=7)
    driver.add(prompt(0, 8), max_tokens=8)
    driver.add(prompt(20, 8), max_tokens=8)
    ending = driver.add(prompt(40, 8), max_tokens=1)
    first = driver.must_order()
    second = driver.must_order()
    assert second.removed_rows.tolist() == [2]
    assert second.appended_rows.tolist() == [0, 1]
    assert driver.scheduler.num_preemptions == 0
    update = driver.answer(first, {2: FinishReason.LENGTH})
    assert update.finished == ending.sequences
    assert ending.sequences[0].output_token_ids == [7]


def test_reset_forgets_pending_blocks_and_replays_confirmed_tokens():
    driver = Driver()
    request = driver.add(prompt(0, 9))
    driver.run(2)
    young = driver.add(prompt(30, 9))
    driver.must_order()
    driver.scheduler.reset()
    driver.scheduler.audit()
    assert driver.scheduler.num_in_flight_steps == 0
    assert driver.scheduler.num_free_blocks == driver.scheduler.num_usable_blocks
    step = driver.must_order()
    assert step.removed_rows.size == 0
    replayed, fresh = step.added
    assert replayed.token_ids.tolist() == [*range(9), 7, 7]
    assert (replayed.num_hit_blocks, replayed.num_computed_tokens) == (2, 8)
    assert fresh.num_hit_blocks == 0
    sequence = request.sequences[0]
    assert (sequence.num_cached_tokens, sequence.num_replays) == (0, 1)
    assert young.sequences[0].num_replays == 1


def test_evacuate_hands_back_every_live_request_in_order_of_arrival():
    driver, requests = full_pool()
    driver.must_order()
    driver.must_order()
    waiting = driver.add(prompt(60, 3))
    driver.scheduler.abort(requests[0])
    assert driver.scheduler.requests_in_flight() == requests[1:]
    assert driver.scheduler.evacuate() == [*requests[1:], waiting]
    assert not driver.scheduler.has_work
    driver.scheduler.audit()


def test_withdraw_waiting_leaves_those_who_run():
    driver = Driver(max_num_seqs=1)
    driver.add(prompt(0, 3))
    driver.run(1)
    waiting = driver.add(prompt(9, 3))
    assert driver.scheduler.withdraw_waiting() == [waiting]
    assert driver.scheduler.num_running == 1
    assert driver.scheduler.num_waiting == 0


# Ends.


def test_abort_frees_blocks_for_the_next_plan_and_drops_late_tokens():
    driver = Driver()
    request = driver.add(prompt(0, 8))
    steps = [driver.must_order(), driver.must_order()]
    driver.scheduler.abort(request)
    assert request.sequences[0].finish_reason is FinishReason.ABORT
    assert driver.scheduler.num_free_blocks == driver.scheduler.num_usable_blocks
    updates = [driver.answer(step) for step in steps]
    # The first also computed the prompt, which later requests may hit.
    assert [(u.num_wasted, u.is_wasted) for u in updates] == [(1, False), (1, True)]
    assert request.sequences[0].output_token_ids == []


def test_abort_takes_a_waiting_request_out_of_the_queue():
    driver = Driver()
    request = driver.add(prompt(0, 8))
    driver.scheduler.abort(request)
    driver.scheduler.abort(request)
    assert driver.order() is None
    assert not driver.scheduler.has_work


def test_finish_truncates_the_log_and_drops_what_was_computed_past_it():
    driver = Driver()
    request = driver.add(prompt(0, 3))
    driver.run(4)
    late = driver.must_order()
    sequence = request.sequences[0]
    driver.scheduler.finish(sequence, num_output_tokens=2, reason=FinishReason.STOP)
    assert sequence.output_token_ids == [7, 7]
    assert driver.answer(late).num_wasted == 1
    driver.scheduler.finish(sequence, num_output_tokens=1, reason=FinishReason.STOP)
    assert sequence.output_token_ids == [7]
    with pytest.raises(ValueError, match="cannot end at output token 2"):
        driver.scheduler.finish(sequence, num_output_tokens=2, reason=FinishReason.STOP)


def test_request_that_can_never_fit_is_refused():
    driver = Driver(num_blocks=5)
    assert driver.scheduler.fits(17)
    assert not driver.scheduler.fits(18)
    assert not driver.scheduler.fits(9, num_sequences=3)
    with pytest.raises(RequestTooLongError) as caught:
        driver.add(prompt(0, 10), max_tokens=8)
    assert caught.value.metadata["max_total_tokens"] == "18"
    assert not driver.scheduler.has_work


def test_resumed_sequence_without_room_for_a_token_ends_at_once():
    driver = Driver()
    request = driver.add(prompt(0, 3), max_tokens=2, resume={0: [7, 7]})
    assert request.sequences[0].finish_reason is FinishReason.LENGTH
    assert not driver.scheduler.has_work


def test_resumed_sequence_goes_on_after_its_known_tokens():
    driver = Driver()
    request = driver.add(prompt(0, 3), max_tokens=4, resume={0: [5, 6]})
    step = driver.must_order()
    assert step.added[0].token_ids.tolist() == [0, 1, 2, 5, 6]
    driver.answer(step)
    driver.answer(driver.must_order(), {0: FinishReason.LENGTH})
    assert request.sequences[0].output_token_ids == [5, 6, 7, 7]


# Admission.


def test_nobody_passes_a_request_that_does_not_fit_more_often_than_allowed():
    driver = Driver(num_blocks=11, max_num_seqs=8, max_bypass=2)
    driver.add(prompt(0, 15))
    driver.run(1)
    large = driver.add(prompt(20, 28))
    small = [driver.add(prompt(100 + 5 * i, 3), max_tokens=1) for i in range(4)]
    step = driver.must_order()
    assert [one.sequence.request for one in step.added] == small[:2]
    assert large in driver.scheduler._waiting
    assert driver.must_order().added == []


def test_group_is_admitted_whole_or_not_at_all():
    driver = Driver(max_num_seqs=3)
    driver.add(prompt(0, 3))
    driver.add(prompt(10, 3))
    driver.run(1)
    group = driver.add(prompt(20, 3), n=2)
    assert driver.must_order().added == []
    assert group in driver.scheduler._waiting
    driver = Driver(max_num_seqs=3)
    driver.add(prompt(0, 3))
    group = driver.add(prompt(20, 3), n=2)
    assert [one.sequence for one in driver.must_order().added[1:]] == group.sequences


def test_request_with_two_losses_runs_alone_until_it_has_got_somewhere():
    driver = Driver()
    suspect = driver.add(prompt(0, 3))
    suspect.num_losses = 2
    other = driver.add(prompt(10, 3))
    for _ in range(8):
        step = driver.must_order()
        assert step.sampled_rows.tolist() == [0]
        driver.answer(step)
    assert [one.sequence for one in driver.must_order().added] == other.sequences


def test_request_with_two_losses_waits_until_nobody_runs():
    driver = Driver()
    other = driver.add(prompt(10, 3))
    suspect = driver.add(prompt(0, 3))
    suspect.num_losses = 2
    steps = [driver.must_order(), driver.must_order()]
    driver.scheduler.abort(other)
    assert driver.order() is None, "steps of others are in flight"
    for step in steps:
        driver.answer(step)
    assert [one.sequence for one in driver.must_order().added] == suspect.sequences


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": 3},
        {"max_model_len": 1},
        {"max_bypass": -1},
    ],
)
def test_config_refuses_limits_that_cannot_work(wrong: dict[str, int]):
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 8, **wrong}
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SchedulerConfig(**limits)
