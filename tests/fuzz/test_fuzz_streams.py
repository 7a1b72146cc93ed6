"""Damaged messages at either end of the control stream; `make fuzz` sends as many as you like."""

from __future__ import annotations

import pytest
from fuzz_streams import fuzz_control_messages, fuzz_worker_messages

COUNT = 6_000


@pytest.mark.parametrize("fuzz", [fuzz_worker_messages, fuzz_control_messages])
def test_damaged_messages_that_are_refused_change_nothing(fuzz: object) -> None:
    outcomes = fuzz(COUNT, seed=4)  # type: ignore[operator]
    assert outcomes.total == COUNT
    assert outcomes.num_played_on > 0
    # The mix is one of all kinds of end.
    assert min(outcomes.counts[kind] for kind in ("refused", "ignored", "accepted")) > COUNT // 50
