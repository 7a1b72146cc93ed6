"""The suite itself: it sees what it is there to see, and a seed means the same every time."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from typing import TYPE_CHECKING

import pytest
import torch
from chaos.chaos_model import build_model
from chaos.comparison import compare_tokens
from chaos.fault_schedule import LANES, FaultKind, FaultLane, ScheduleConfig, schedule
from chaos.findings import Findings
from chaos.load_requests import PlannedRequest, lane_requests, make_documents
from chaos.process_logs import LogSummary
from chaos.streams import StreamRecord
from chaos.verifier import TieJudge, Verifier
from real_stack import Setting, load_shared_model, running_stack

from data_plane.sampler import SamplingBatch, gumbel_noise

if TYPE_CHECKING:
    from pathlib import Path

    from pagewire_client import AsyncClient, Completion, GenerateOptions

EXPECTED = list(range(100, 140))
SCHEDULE = ScheduleConfig(
    workers=("w0", "w1"),
    worker_links=("l0", "l1"),
    other_links=("c",),
    lease_s=3.0,
    mean_gap_s=1.0,
)


@pytest.fixture(scope="module")
def chaos_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("chaos-model"))


# Comparison.


@pytest.mark.parametrize(
    ("received", "kind", "at"),
    [
        (EXPECTED[:7] + EXPECTED[8:], "lost", 7),
        (EXPECTED[:7] + EXPECTED[11:], "lost", 7),
        (EXPECTED[:-1], "lost", 39),
        ([], "lost", 0),
        (EXPECTED[:7] + EXPECTED[6:], "doubled", 7),
        (EXPECTED[:9] + EXPECTED[5:], "doubled", 9),
        ([*EXPECTED, 139], "doubled", 40),
        ([*EXPECTED[:5], 1, *EXPECTED[6:]], "wrong", 5),
        ([*EXPECTED[:-1], 1], "wrong", 39),
    ],
)
def test_a_difference_is_found_and_named(received: list[int], kind: str, at: int) -> None:
    difference = compare_tokens(received, EXPECTED, is_complete=True)
    assert difference is not None
    assert (difference.kind, difference.at) == (kind, at)


def test_a_beginning_is_right_only_where_the_end_was_not_reached() -> None:
    assert compare_tokens(EXPECTED, EXPECTED, is_complete=True) is None
    assert compare_tokens(EXPECTED[:5], EXPECTED, is_complete=False) is None
    assert compare_tokens(EXPECTED[:5], EXPECTED, is_complete=True) is not None
    assert compare_tokens([*EXPECTED[:5], 1], EXPECTED, is_complete=False) is not None


# Schedules.


@pytest.mark.parametrize("lane", FaultLane)
def test_a_seed_means_the_same_faults_and_another_one_others(lane: FaultLane) -> None:
    first, again, other = (
        list(itertools.islice(schedule(seed, lane, SCHEDULE), 100)) for seed in (5, 5, 6)
    )
    assert first == again != other
    assert [fault.number for fault in first] == list(range(1, 101))


def test_every_kind_comes_equally_often_and_hits_every_target() -> None:
    faults = [
        fault
        for lane, kinds in LANES.items()
        for fault in itertools.islice(schedule(3, lane, SCHEDULE), 20 * len(kinds))
    ]
    assert Counter(fault.kind for fault in faults) == dict.fromkeys(FaultKind, 20)
    targets = {fault.target for fault in faults}
    assert targets == {"w0", "w1", "l0", "l1", "c", "control-plane", "store"}
    assert any(f.hold_s > SCHEDULE.lease_s for f in faults if f.kind is FaultKind.WORKER_STOP)


def test_a_seed_means_the_same_requests_and_lanes_differ() -> None:
    documents = make_documents(2)
    first, again, other = (
        list(itertools.islice(lane_requests(2, lane, documents), 50)) for lane in (0, 0, 1)
    )
    assert first == again != other
    assert {request.kind for request in first} == {"greedy", "seeded", "unseeded"}
    assert {type(request.prompt) for request in first} == {str, list}


def test_lines_that_must_not_be_logged_are_found(tmp_path: Path) -> None:
    path = tmp_path / "control-plane.log"
    path.write_text(
        "INFO prefix index recovered: adopted=7 refused=2 sent_version=9\n"
        "WARNING control_plane.fleet worker gone: worker=w0\n"
        "Traceback (most recent call last):\n"
    )
    logs = LogSummary()
    assert logs.read(path) == ["control-plane.log: Traceback (most recent call last):"]
    assert logs.counts["adopted blocks"] == 7
    assert logs.counts["losses"] == 1


# The verifier.


def record_of(
    request: PlannedRequest, completion: Completion, token_ids: list[int] | None = None
) -> StreamRecord:
    return StreamRecord(
        request,
        ("fault workers 3", "fault workers 4"),
        token_ids=list(completion.token_ids) if token_ids is None else token_ids,
        text=completion.text,
        seed=completion.seed,
        finish_reason=completion.finish_reason,
        stop_string=completion.outputs[0].stop_string,
        usage=completion.usage if token_ids is None else None,
    )


async def findings_of(verifier: Verifier, findings: Findings, record: StreamRecord) -> list[str]:
    before = len(findings.items)
    verifier.put(record)
    await verifier.finish()
    return [item.kind for item in findings.items[before:]]


@pytest.mark.slow
async def test_the_verifier_sees_planted_faults_and_nothing_else(chaos_model: Path) -> None:
    draws: list[tuple[str, GenerateOptions]] = [
        ("greedy", {"temperature": 0.0}),
        ("seeded", {"temperature": 1.0, "seed": 2**64 - 1}),
        ("unseeded", {"temperature": 0.8, "top_k": 20, "stop": [" the"]}),
    ]
    async with running_stack(load_shared_model(chaos_model), Setting()) as stack:
        client: AsyncClient = stack.api.client
        findings = Findings()
        verifier = Verifier(client, chaos_model, findings)
        running = asyncio.create_task(verifier.run())
        for kind, options in draws:
            request = PlannedRequest(
                name=kind,
                kind=kind,
                prompt="hello world",
                options={**options, "max_tokens": 24, "ignore_eos": True},
            )
            completion = await client.complete(request.prompt, **request.options)
            ids = completion.token_ids
            assert await findings_of(verifier, findings, record_of(request, completion)) == []
            for planted, seen in (
                (ids[:9] + ids[10:], "lost"),
                (ids[:9] + ids[8:], "doubled"),
                ([*ids[:9], (ids[9] + 1) % 400, *ids[10:]], "wrong"),
                (ids[:-1], "lost"),
            ):
                record = record_of(request, completion, planted)
                assert await findings_of(verifier, findings, record) == [seen]
            other_text = record_of(request, completion)
            other_text.text += "."
            assert await findings_of(verifier, findings, other_text) == ["wrong"]
        assert verifier.num_ties == 0
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def test_a_tie_is_what_rounding_decides_and_nothing_else(chaos_model: Path) -> None:
    # Wider than what rounding does, so that few draws have to be looked through for a near one.
    judge = TieJudge(chaos_model, rounding=4e-3)
    prompt, num_seeds = [5, 6, 7, 8], 4_000
    options: GenerateOptions = {"temperature": 1.0}
    seeds = torch.arange(num_seeds)
    with torch.inference_mode():
        logits = judge.logits(prompt)
        column = torch.ones(num_seeds)
        batch = SamplingBatch(
            temperature=column,
            top_k=column.long(),
            top_p=column,
            min_p=column,
            seed=seeds,
            sequence_index=torch.zeros(num_seeds, dtype=torch.int64),
            position=torch.full((num_seeds,), len(prompt)),
        )
        ids = torch.arange(logits.shape[-1]).expand(num_seeds, -1)
        best = (logits.float() + gumbel_noise(ids, batch)).topk(2, dim=-1)
    gaps = best.values[:, 0] - best.values[:, 1]
    near, far = int(gaps.argmin()), int(gaps.argmax())

    def is_tie(seed: int) -> bool:
        first, second = best.indices[seed].tolist()
        return judge.is_tie(prompt, [], (first, second), options, seed)

    assert gaps[near] < 2e-3
    assert is_tie(near)
    assert not is_tie(far)
