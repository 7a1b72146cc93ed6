from __future__ import annotations

from control_plane.step_window import StepWindow


def test_the_window_has_room_for_one_step_more_than_the_lookahead() -> None:
    window = StepWindow(lookahead=1)
    for version in (4, 5):
        assert window.has_room
        window.sent(version, now=0.0)
    assert not window.has_room
    assert (window.oldest, len(window)) == (4, 2)


def test_a_step_can_be_running_since_it_was_sent_or_its_predecessor_was_confirmed() -> None:
    window = StepWindow(lookahead=2)
    assert (window.oldest, window.since) == (None, None)
    window.sent(4, now=1.0)
    window.sent(5, now=2.0)
    assert window.since == 1.0
    window.confirm(now=7.0)
    assert (window.oldest, window.since) == (5, 7.0)
    window.confirm(now=8.0)
    assert window.since is None
    window.sent(6, now=9.0)
    assert window.since == 9.0
    window.clear()
    assert (window.oldest, window.since) == (None, None)
