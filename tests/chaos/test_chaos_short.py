"""Four faults of each kind under sixteen streams: the short form of `make chaos`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from chaos.chaos_report import render
from chaos.chaos_run import ChaosConfig, run_chaos
from chaos.fault_schedule import FaultKind, FaultLane
from chaos.load_requests import RequestKind

if TYPE_CHECKING:
    from pathlib import Path

SEED = 1
NUM_PACKS = 4
KINDS_PER_LANE = len(FaultKind) // len(FaultLane)

# With whole systems: two of them at a time would run into each other's leases.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.redis,
    pytest.mark.timeout(1500),
    pytest.mark.xdist_group("e2e"),
]


async def test_no_token_is_wrong_lost_or_doubled_whatever_dies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ChaosConfig(
        base_dir=tmp_path,
        seed=SEED,
        # Only if the machine can do next to nothing; otherwise the number of faults ends it.
        seconds=600.0,
        max_faults_per_lane=NUM_PACKS * KINDS_PER_LANE,
    )
    report = await run_chaos(config, print)
    with capsys.disabled():
        print(f"\n{render(report)}")
    assert not report.findings.items
    assert report.faults == dict.fromkeys(FaultKind, NUM_PACKS)
    assert report.num_active_faults >= 0.8 * report.num_faults
    for kind in RequestKind:
        # What a machine with much else to do gets done within deadlines is its own matter.
        if kind is not RequestKind.DEADLINE:
            assert report.tallies[kind].num_tokens > 0
            assert report.tallies[kind].num_chars > 0
        if kind not in (RequestKind.DEADLINE, RequestKind.CANCELLED):
            assert report.tallies[kind].num_complete > 0
    assert report.ends["cancelled"] > 0
    assert report.ends["resumes"] > 0
    assert report.ends["batch resumes"] > 0
    assert report.tallies[RequestKind.STOP_STRING].num_stopped > 0
    assert report.tallies[RequestKind.STOP_TOKEN].num_stopped > 0
    assert report.logged["adopted blocks"] > 0
    assert report.departures is not None
    assert report.departures.were_noticed
    warm = report.warm_restart
    assert warm is not None
    assert warm.is_same
    assert warm.hits_after == warm.hits_before == 2000
