"""The suite itself: it sees what it is there to see, and a seed means the same every time."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from chaos.chaos_model import build_model
from chaos.comparison import compare_tokens
from chaos.fault_schedule import LANES, FaultKind, FaultLane, ScheduleConfig, schedule
from chaos.findings import Findings
from chaos.load_requests import (
    SHARES,
    PlannedBatch,
    PlannedRequest,
    RequestKind,
    lane_requests,
    make_documents,
)
from chaos.process_logs import LogSummary
from chaos.streams import StreamLoad, StreamRecord
from chaos.verifier import TieJudge, Verifier
from real_stack import Setting, load_shared_model, running_stack

from data_plane.sampler import SamplingBatch, gumbel_noise

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from pagewire_client import AsyncClient, BatchResult, Completion, GenerateOptions, Prompt

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
    first, again, other = (planned_of(lane, 64) for lane in (0, 0, 1))
    assert first == again != other
    requests = [request for request in first if isinstance(request, PlannedRequest)]
    assert {request.draws for request in requests} == {"greedy", "seeded", "unseeded"}
    assert {type(request.prompt) for request in requests} == {str, list}


def planned_of(lane: int, count: int) -> list[PlannedRequest | PlannedBatch]:
    return list(itertools.islice(lane_requests(2, lane, make_documents(2)), count))


def test_every_kind_of_request_has_its_share_of_every_lane() -> None:
    num_packs = 6
    planned = planned_of(3, num_packs * sum(SHARES.values()))
    kinds = Counter(
        RequestKind.BATCH if isinstance(one, PlannedBatch) else one.kind for one in planned
    )
    assert kinds == {kind: num_packs * share for kind, share in SHARES.items()}
    batches = [one for one in planned if isinstance(one, PlannedBatch)]
    assert all(r.kind is RequestKind.BATCH for batch in batches for r in batch.requests)
    assert {batch.leave_after is None for batch in batches} == {False, True}
    streams = [one for one in planned if isinstance(one, PlannedRequest)]
    given_up = [one for one in streams if one.kind is RequestKind.CANCELLED]
    assert all((one.cancel_after is None) != (one.leave_after_s is None) for one in given_up)
    chats = [one for one in streams if one.kind is RequestKind.CHAT]
    assert all(isinstance(message, dict) for one in chats for message in one.prompt)
    assert all(one.options.get("stop") for one in streams if one.kind is RequestKind.STOP_STRING)


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


@contextlib.asynccontextmanager
async def verifying(
    model_dir: Path, findings: Findings
) -> AsyncGenerator[tuple[Verifier, AsyncClient]]:
    async with running_stack(load_shared_model(model_dir), Setting()) as stack:
        client: AsyncClient = stack.api.client
        verifier = Verifier(client, model_dir, findings)
        running = asyncio.create_task(verifier.run())
        yield verifier, client
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def planned(draws: str, options: GenerateOptions, prompt: Prompt = "hello world") -> PlannedRequest:
    return PlannedRequest(
        name=draws,
        kind=RequestKind.PLAIN,
        draws=draws,
        prompt=prompt,
        options={"max_tokens": 24, "ignore_eos": True, **options},
    )


@pytest.mark.slow
async def test_the_verifier_sees_planted_faults_and_nothing_else(chaos_model: Path) -> None:
    draws: list[tuple[str, GenerateOptions]] = [
        ("greedy", {"temperature": 0.0}),
        ("seeded", {"temperature": 1.0, "seed": 2**64 - 1}),
        ("unseeded", {"temperature": 0.8, "top_k": 20, "stop": [" the"]}),
    ]
    findings = Findings()
    async with verifying(chaos_model, findings) as (verifier, client):
        for kind, options in draws:
            request = planned(kind, options)
            completion = await client.complete(request.prompt, **request.options)
            ids = completion.token_ids
            assert await findings_of(verifier, findings, record_of(request, completion)) == []
            for broken, seen in (
                (ids[:9] + ids[10:], "lost"),
                (ids[:9] + ids[8:], "doubled"),
                ([*ids[:9], (ids[9] + 1) % 400, *ids[10:]], "wrong"),
                (ids[:-1], "lost"),
            ):
                record = record_of(request, completion, broken)
                assert await findings_of(verifier, findings, record) == [seen]
        assert verifier.num_ties == 0
        assert verifier.tallies[RequestKind.PLAIN].num_requests == len(draws)
        assert findings.count("lost", RequestKind.PLAIN) == 2 * len(draws)
        assert findings.count("lost", RequestKind.CHAT) == 0


@pytest.mark.slow
async def test_the_verifier_sees_text_that_is_not_that_of_its_tokens(chaos_model: Path) -> None:
    messages = [{"role": "user", "content": "hello 世界"}]
    findings = Findings()
    async with verifying(chaos_model, findings) as (verifier, client):

        async def found(request: PlannedRequest, text: str, *cuts: tuple[int, int]) -> list[str]:
            record = record_of(request, await client.complete(request.prompt, **request.options))
            record.text, record.resumed_at = text, list(cuts)
            return await findings_of(verifier, findings, record)

        for request in (
            planned("greedy", {"temperature": 0.0}, messages),
            # Half a character, which the first ids may complete.
            planned("seeded", {"temperature": 1.0, "seed": 3}, [5, 6, 230, 189]),
            planned("seeded", {"temperature": 1.0, "seed": 4, "skip_special_tokens": False}),
        ):
            generation = client.generate(request.prompt, **request.options)
            cuts = [(0, 0)]
            async for chunk in generation:
                num_ids, num_chars = cuts[-1]
                cuts.append((num_ids + len(chunk.token_ids), num_chars + len(chunk.text)))
            text = generation.log.completion().text
            assert await found(request, text, *cuts) == []
            assert await found(request, text[:5] + text[6:]) == ["lost"]
            assert await found(request, text[:8] + text[2:]) == ["doubled"]
            assert await found(request, f"{text[:5]}\0{text[6:]}") == ["wrong"]
            num_ids, num_chars = cuts[len(cuts) // 2]
            assert await found(request, text, (num_ids, num_chars + 1)) == ["doubled"]
            assert await found(request, text, (num_ids, num_chars - 1)) == ["lost"]


@pytest.mark.slow
@pytest.mark.parametrize("includes", [False, True])
async def test_the_verifier_knows_where_a_stop_string_cuts(
    chaos_model: Path, *, includes: bool
) -> None:
    findings = Findings()
    free = planned("greedy", {"temperature": 0.0, "max_tokens": 60})
    async with verifying(chaos_model, findings) as (verifier, client):
        text = (await client.complete(free.prompt, **free.options)).text
        # Of two that begin together the one that the text completes.
        stop = text[12:15]
        options: GenerateOptions = {"stop": [stop, text[12:14] + "\n!"]}
        request = planned(
            "greedy",
            {**free.options, **options, "include_stop_str_in_output": includes},
        )
        completion = await client.complete(request.prompt, **request.options)
        at = text.index(stop) + len(stop) * includes
        assert completion.text == text[:at]
        assert await findings_of(verifier, findings, record_of(request, completion)) == []
        uncut = record_of(request, completion)
        uncut.text = text[: at + 1]
        assert await findings_of(verifier, findings, uncut) == ["doubled"]
        other = record_of(request, completion)
        other.stop_string = None
        assert await findings_of(verifier, findings, other) != []


@pytest.mark.slow
async def test_the_load_sees_what_a_batch_leaves_out_answers_twice_or_refuses(
    chaos_model: Path,
) -> None:
    request = dataclasses.replace(
        planned("seeded", {"temperature": 1.0, "seed": 3}), kind=RequestKind.BATCH
    )
    refused = dataclasses.replace(request, options={"temperature": -1.0})

    async def found(load: StreamLoad, client: Any, *requests: PlannedRequest) -> list[str]:
        findings.items.clear()
        await load.run_lane(client, iter([PlannedBatch(name="batch", requests=requests)]))
        assert load.calls.num_active == 0
        return [f"{item.kind} {item.request_kind}" for item in findings.items]

    findings = Findings()
    async with verifying(chaos_model, findings) as (verifier, client):
        load = StreamLoad(findings, verifier.put, stall_limit_s=60.0)
        assert await found(load, client, request, request) == []
        await verifier.finish()
        assert verifier.tallies[RequestKind.BATCH].num_complete == 2
        assert await found(load, client, request, refused) == ["failed of a batch"]
        assert await found(load, TwistedClient(client, [0]), request, request) == [
            "lost of a batch"
        ]
        assert await found(load, TwistedClient(client, [0, 1, 1]), request, request) == [
            "doubled of a batch"
        ]


class TwistedClient:
    """Passes on the answers of a batch that it is told to, in the order of its requests."""

    def __init__(self, client: AsyncClient, answers: list[int]) -> None:
        self._client = client
        self._answers = answers
        self.num_resumes = 0

    def batch(self, requests: Any) -> TwistedClient:
        self._requests = requests
        return self

    async def __aenter__(self) -> TwistedClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def __aiter__(self) -> AsyncGenerator[BatchResult]:
        results = [result async for result in self._client.batch(self._requests)]
        results.sort(key=lambda result: int(result.request_id))
        for i in self._answers:
            yield results[i]


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
