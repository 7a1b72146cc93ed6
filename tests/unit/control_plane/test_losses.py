from __future__ import annotations

from control_plane.losses import MAX_LOSSES, mark_lost
from control_plane.request import Request, SamplingParams


def test_a_request_fails_at_its_last_loss_and_not_before() -> None:
    request = Request(
        req_id="q",
        prompt_token_ids=[1],
        sampling=SamplingParams(),
        seed=0,
        max_total_tokens=9,
        arrival=0,
    )
    for _ in range(MAX_LOSSES - 1):
        assert mark_lost([request]) == []
    ((failed, error),) = mark_lost([request])
    assert failed is request
    assert error.reason == "REPLAY_LIMIT"
    assert error.metadata == {"num_losses": "3", "limit": "3"}
