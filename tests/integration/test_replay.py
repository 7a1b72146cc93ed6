"""What was recorded of real workers is replayed on others without a difference, and with one.

A tiny random model in float32, small blocks and few of them, so that prefixes are hit, sequences
are preempted and rows change hands all the time.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest
from api_harness import until
from replay_harness import (
    TinyModel,
    attached_worker,
    gone,
    ready,
    recording_api,
    records,
    replay,
    rewrite,
    segments,
    tiny_model,
)

if TYPE_CHECKING:
    from pathlib import Path

    from api_harness import Api

    from protos.pagewire.v1 import recording_pb2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def workload(seed: int, count: int, vocab_size: int) -> list[dict[str, Any]]:
    """Greedy, seeded and unseeded requests that share beginnings and stop in all ways."""
    rng = random.Random(seed)
    shared = [[rng.randrange(4, vocab_size) for _ in range(20)] for _ in range(2)]
    requests: list[dict[str, Any]] = []
    for index in range(count):
        tail = [rng.randrange(4, vocab_size) for _ in range(rng.randrange(1, 12))]
        request: dict[str, Any] = {
            "prompt": shared[index % 2] + tail,
            "max_tokens": rng.randrange(1, 40),
            "ignore_eos": rng.random() < 0.5,
        }
        request |= ({"temperature": 0.0}, {"temperature": 1.0, "seed": index}, {})[index % 3]
        requests.append(request)
    return requests


async def run(api: Api, requests: list[dict[str, Any]]) -> list[list[int]]:
    completions = await asyncio.gather(
        *(api.client.complete(**request, timeout_s=120.0) for request in requests)
    )
    return [list(completion.token_ids) for completion in completions]


async def cancelled(api: Api, request: dict[str, Any]) -> None:
    """A client that leaves after its first token."""
    async with asyncio.timeout(60):
        async for _ in api.client.generate(**{**request, "max_tokens": 30}):
            return


async def test_a_run_with_everything_in_it_replays_without_a_difference(
    model: TinyModel, tmp_path: Path
) -> None:
    vocab_size = model.catalog.served.vocab_size
    async with recording_api(model, tmp_path) as api:
        async with attached_worker(model, api.worker_address):
            await ready(api)
            requests = workload(1, 24, vocab_size)
            await asyncio.gather(run(api, requests), *(cancelled(api, r) for r in requests[:3]))
            stats = api.control_plane.cluster.stats().replicas[0]
            assert stats.num_preemptions > 0
            assert stats.prefix_hits > 0
            # Killed in the midst of the next ones, which go on with its successor.
            running = asyncio.create_task(run(api, workload(2, 12, vocab_size)))
            before = stats.generation_tokens
            await until(lambda: api.num_generated() >= before + 20, what="they run")
        await gone(api)
        async with attached_worker(model, api.worker_address):
            await running
    summary = await replay(model, tmp_path)
    assert summary.difference is None
    assert summary.num_streams == 2
    assert summary.num_results > 50
    assert summary.num_tokens > 200
    assert (summary.num_restored_rows, summary.num_restored_blocks) == (0, 0)


async def test_one_altered_token_is_the_first_difference(model: TinyModel, tmp_path: Path) -> None:
    async with (
        recording_api(model, tmp_path) as api,
        attached_worker(model, api.worker_address),
    ):
        await ready(api)
        await run(api, workload(3, 6, model.catalog.served.vocab_size))
    [path] = segments(tmp_path)
    altered: list[int] = []

    def alter(record: recording_pb2.Record) -> bool:
        result = record.received.step_result
        if not record.HasField("received") or len(result.token_ids) < 4 or result.version < 9:
            return False
        # The last token of the step, which is that of its highest row.
        token = int.from_bytes(result.token_ids[-4:], "little") ^ 1
        altered.extend((result.version, token))
        result.token_ids = result.token_ids[:-4] + token.to_bytes(4, "little")
        return True

    rewrite(path, alter)
    difference = (await replay(model, tmp_path)).difference
    assert difference is not None
    version, token = altered
    assert f"plan {version}, step 0, row" in difference.where
    assert "prompt of" in difference.sequence
    assert difference.expected.startswith(f"token {token},")
    assert difference.got.startswith(f"token {token ^ 1},")


async def test_every_segment_of_a_rotated_recording_replays_by_itself(
    model: TinyModel, tmp_path: Path
) -> None:
    async with (
        recording_api(model, tmp_path, max_bytes=48 << 10) as api,
        attached_worker(model, api.worker_address, num_blocks=80),
    ):
        await ready(api)
        for _ in range(6):
            # The same every time, so that cached blocks are hit long after they were written.
            await run(api, workload(10, 16, model.catalog.served.vocab_size))
    paths = segments(tmp_path)
    assert len(paths) >= 4
    assert sum(path.stat().st_size for path in paths) <= 48 << 10
    # The first ones are gone.
    assert not any(r.received.HasField("hello") for r in records(paths[0]))
    num_results = 0
    restored_rows = restored_blocks = 0
    for path in paths:
        summary = await replay(model, path, num_blocks=80)
        assert summary.difference is None
        num_results += summary.num_results
        restored_rows += summary.num_restored_rows
        restored_blocks += summary.num_restored_blocks
    assert restored_rows > 0
    assert restored_blocks > 0
    whole = await replay(model, tmp_path, num_blocks=80)
    assert whole.difference is None
    assert whole.num_results == num_results
