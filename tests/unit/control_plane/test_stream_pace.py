"""How often open streams get a response."""

from __future__ import annotations

from contextlib import ExitStack

from control_plane.stream_pace import StreamPace


def test_few_streams_get_every_step() -> None:
    pace = StreamPace()
    with ExitStack() as streams:
        for _ in range(16):
            streams.enter_context(pace.open())
            assert pace.interval_s() == 0


def test_many_streams_share_a_part_of_the_process() -> None:
    pace = StreamPace()
    with ExitStack() as streams:
        for _ in range(256):
            streams.enter_context(pace.open())
        per_second = pace.num_streams / pace.interval_s()
        for _ in range(256):
            streams.enter_context(pace.open())
        assert pace.num_streams / pace.interval_s() == per_second
        for _ in range(8192):
            streams.enter_context(pace.open())
        assert pace.interval_s() <= 0.2


def test_streams_that_ended_do_not_count() -> None:
    pace = StreamPace()
    with ExitStack() as streams:
        for _ in range(100):
            streams.enter_context(pace.open())
        assert pace.interval_s() > 0
    assert pace.num_streams == 0
    assert pace.interval_s() == 0
