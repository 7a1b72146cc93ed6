from __future__ import annotations

from control_plane.trust import FIRST_DOUBT_S, LONGEST_DOUBT_S, WINDOW_S, Trust


def test_one_trouble_raises_no_doubt() -> None:
    trust = Trust()
    assert trust.note("r", 0.0) == 0
    assert not trust.is_doubted("r", 0.0)


def test_doubt_doubles_with_each_trouble_and_ends_by_itself() -> None:
    trust = Trust()
    trust.note("r", 0.0)
    for count in range(3):
        assert trust.note("r", 1.0) == FIRST_DOUBT_S * 2**count
    ends_at = 1.0 + 4 * FIRST_DOUBT_S
    assert trust.is_doubted("r", ends_at - 0.1)
    assert not trust.is_doubted("r", ends_at)
    assert not trust.is_doubted("other", 1.0)
    for _ in range(100):
        longest = trust.note("r", 1.0)
    assert longest == LONGEST_DOUBT_S


def test_troubles_of_long_ago_are_forgotten() -> None:
    trust = Trust()
    for _ in range(5):
        trust.note("r", 0.0)
    assert trust.note("r", WINDOW_S + 1.0) == 0
    assert trust.note("r", WINDOW_S + 2.0) == FIRST_DOUBT_S


def test_what_is_remembered_is_bounded() -> None:
    trust = Trust()
    for i in range(10_000):
        trust.note(f"r{i}", 0.0)
        trust.note(f"r{i}", 0.0)
    assert len(trust._troubles) <= 4096
    assert len(trust._doubted_until) <= 4096
    assert trust.is_doubted("r9999", 1.0)
    trust.note("r", 2 * WINDOW_S)
    assert len(trust._troubles) == 1
