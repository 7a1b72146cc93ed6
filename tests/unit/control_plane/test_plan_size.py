"""How large a plan can become: prompts travel with it, whether they are cached or not."""

from __future__ import annotations

from scheduler_driver import Driver, prompt

from control_plane.plan import encode_plan
from control_plane.request import FinishReason
from control_plane.scheduler_config import SchedulerConfig
from data_plane.control_stream import MAX_MESSAGE_BYTES


def test_cached_prompts_that_start_together_come_in_several_plans():
    driver = Driver(max_num_seqs=8, num_blocks=200, max_added_tokens=70)
    first = driver.add(prompt(0, 33), max_tokens=1)
    step = driver.must_order()
    row = int(step.sampled_rows[0])
    driver.answer(step, {row: FinishReason.LENGTH})
    assert first.is_finished
    requests = [driver.add([*prompt(0, 32), 100 + i], max_tokens=9) for i in range(5)]
    # One token of each is left to compute: they would all fit into one step.
    started = [driver.must_order().added for _ in range(3)]
    assert [len(added) for added in started] == [3, 2, 0]
    assert [one.sequence.request for added in started for one in added] == requests
    assert all(one.num_computed_tokens == 32 for added in started for one in added)


def test_a_prompt_that_is_longer_than_all_others_together_may_be_starts_alone():
    driver = Driver(max_num_seqs=8, max_added_tokens=4)
    driver.add(prompt(0, 20))
    driver.add(prompt(100, 3))
    assert [len(driver.must_order().added) for _ in range(2)] == [1, 1]


def test_a_worker_takes_the_largest_plan():
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=8, max_model_len=1 << 22)
    driver = Driver()
    driver.add(prompt(0, 20))
    step = driver.must_order()
    num_bytes = len(encode_plan(step).SerializeToString()) - 4 * 20
    # As many tokens as are sent before the last one is added, and that one as long as may be.
    assert 4 * (config.max_added_tokens + config.max_model_len) + num_bytes < MAX_MESSAGE_BYTES
