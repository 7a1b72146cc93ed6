"""Times that travel to the other side: as long as they can be told, and no longer."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from google.protobuf import duration_pb2

from control_plane.engine_config import MAX_LEASE_S, EngineConfig
from data_plane.config import MAX_GRACE_S, WorkerConfig

TOO_LONG = [math.inf, math.nan, 1e300, -1.0]


def worker_config(grace_s: float) -> WorkerConfig:
    return WorkerConfig(model=Path(), worker_id="w", replica_id="w", grace_s=grace_s)


@pytest.mark.parametrize("seconds", TOO_LONG)
def test_a_lease_that_no_worker_can_be_told_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"lease_s must be in \(0, 86400\]"):
        EngineConfig(lease_s=seconds)


@pytest.mark.parametrize("seconds", TOO_LONG)
def test_a_grace_that_no_control_plane_can_be_told_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"--grace-s must be in \[0, 604800\]"):
        worker_config(seconds)


def test_the_longest_ones_can_be_told() -> None:
    for seconds in (EngineConfig(lease_s=MAX_LEASE_S).lease_s, worker_config(MAX_GRACE_S).grace_s):
        duration = duration_pb2.Duration()
        duration.FromNanoseconds(int(seconds * 1e9))
        assert duration.ToNanoseconds() == int(seconds * 1e9)
