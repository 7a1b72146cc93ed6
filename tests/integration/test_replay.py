"""What was recorded of real workers is replayed on others without a difference, and with one.

A tiny random model in float32, small blocks and few of them, so that prefixes are hit, sequences
are preempted and rows change hands all the time.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import conditions
import pytest
from api_harness import until
from fake_model import FakeModelRunner
from fake_worker import FakeWorker
from pagewire_client.replay.worker_port import WorkerGoneError, WorkerPort
from replay_harness import (
    TinyModel,
    attached_worker,
    gone,
    play,
    ready,
    recording_api,
    records,
    replay,
    rewrite,
    segments,
    tiny_model,
)
from valkey_process import ValkeyProcess

from data_plane.plan_refused import PlanRefused, Refusal
from protos.model_fingerprint import served_fingerprint

if TYPE_CHECKING:
    from pathlib import Path

    from api_harness import Api
    from pagewire_client.replay.player import Summary

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
        attached_worker(model, api.worker_address, num_blocks=400),
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
        summary = await replay(model, path, num_blocks=400)
        assert summary.difference is None
        num_results += summary.num_results
        restored_rows += summary.num_restored_rows
        restored_blocks += summary.num_restored_blocks
    assert restored_rows > 0
    assert restored_blocks > 0
    whole = await replay(model, tmp_path, num_blocks=400)
    assert whole.difference is None
    assert whole.num_results == num_results


async def test_hits_on_blocks_of_an_earlier_control_plane_are_computed_anew(
    model: TinyModel, tmp_path: Path
) -> None:
    valkey = ValkeyProcess(tmp_path)
    await valkey.start()
    try:
        before, after = tmp_path / "before", tmp_path / "after"
        requests = workload(20, 6, model.catalog.served.vocab_size)
        before.mkdir()
        after.mkdir()
        async with (
            recording_api(model, before, redis_url=valkey.url) as api,
            attached_worker(model, api.worker_address, num_blocks=80) as worker,
        ):
            await ready(api)
            outputs = await run(api, requests)
            [replica] = api.control_plane.cluster.stats().replicas
            async with valkey.admin() as store:

                async def is_written() -> bool:
                    [key] = await store.keys("pagewire:1:blocks:*")
                    return await store.hlen(key) == replica.cached_blocks + 1

                await conditions.until(is_written)
        async with (
            recording_api(model, after, redis_url=valkey.url, adoption_wait_s=60.0) as api,
            attached_worker(model, api.worker_address, worker=worker),
        ):
            await ready(api)
            again = await run(api, requests)
            [replica] = api.control_plane.cluster.stats().replicas
            assert replica.adopted_blocks > 0
            assert replica.prefix_hits > 0
    finally:
        await valkey.kill()
    for request, one, other in zip(requests, outputs, again, strict=True):
        # Without a seed every call draws one of its own.
        assert one == other or not {"seed", "temperature"} & request.keys()
    summary = await replay(model, after, num_blocks=80)
    assert summary.difference is None
    assert summary.num_restored_blocks > 0
    assert summary.num_restored_rows == 0


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_blocks": 30}, "num_blocks is 30, that of the recording is 26"),
        ({"block_size": 8}, "block size is 8, that of the recording is 4. .*--block-size 4"),
        ({"max_num_seqs": 5}, "max_num_seqs is 5, that of the recording is 4"),
    ],
)
async def test_a_worker_of_another_shape_is_refused(
    model: TinyModel, tmp_path: Path, changes: dict[str, int], problem: str
) -> None:
    async with (
        recording_api(model, tmp_path) as api,
        attached_worker(model, api.worker_address),
    ):
        await ready(api)
    with pytest.raises(WorkerGoneError, match=problem):
        await replay(model, tmp_path, **changes)


# With fake workers, which can be made to fail.


def fake_worker(
    model: TinyModel, address: str, runner: FakeModelRunner | None = None
) -> FakeWorker:
    served = model.catalog.served
    return FakeWorker(
        address,
        runner=runner or FakeModelRunner(vocab_size=served.vocab_size),
        model_fingerprint=served_fingerprint(served.base_fingerprint, kv_dtype="float32"),
    )


async def record_fake(
    model: TinyModel, directory: Path, runner: FakeModelRunner, *, nacks_at: int = 0
) -> None:
    """Twelve requests on a fake worker that fails or refuses on the way.

    At most two plans are in flight, so that whatever happens to a plan, the result of the last but
    one before it is in the recording.
    """
    async with recording_api(model, directory, max_lookahead=1) as api:
        worker = fake_worker(model, api.worker_address, runner)
        refuse_at(worker, nacks_at)
        async with worker:
            await ready(api)
            await run(api, workload(30, 12, model.catalog.served.vocab_size))


def refuse_at(worker: FakeWorker, version: int) -> None:
    """Refuse one plan, if its version is not 0."""
    table = worker.protocol.row_table
    apply = table.apply

    def refuse(plan: Any) -> Any:
        if plan.version == version:
            raise PlanRefused(Refusal.ROW_EMPTY, "as the test wants it", field="row")
        return apply(plan)

    table.apply = refuse  # type: ignore[method-assign]


async def replay_fake(
    model: TinyModel, directory: Path, runner: FakeModelRunner | None = None, *, nacks_at: int = 0
) -> Summary:
    async with WorkerPort() as port:
        worker = fake_worker(model, port.address, runner)
        refuse_at(worker, nacks_at)
        async with worker:
            return await play(directory, port)


def fake_runner(model: TinyModel, **fails: set[int]) -> FakeModelRunner:
    return FakeModelRunner(vocab_size=model.catalog.served.vocab_size, **fails)


async def test_a_step_that_failed_when_recorded_is_noted_and_what_follows_compared(
    model: TinyModel, tmp_path: Path
) -> None:
    await record_fake(model, tmp_path, fake_runner(model, fail_wait={9}, fail_launch={25}))
    summary = await replay_fake(model, tmp_path)
    assert summary.difference is None
    assert [note.split(" failed")[0] for note in summary.notes] == [
        "the step of plan 9",
        "the step of plan 25",
    ]
    assert summary.num_tokens > 100


async def test_a_step_that_fails_in_the_replay_is_a_difference(
    model: TinyModel, tmp_path: Path
) -> None:
    await record_fake(model, tmp_path, fake_runner(model))
    difference = (await replay_fake(model, tmp_path, fake_runner(model, fail_wait={9}))).difference
    assert difference is not None
    assert difference.where == "plan 9, step 0"
    assert difference.got == "failed at the step: injected device failure"


async def test_a_recorded_refusal_is_expected_again(model: TinyModel, tmp_path: Path) -> None:
    await record_fake(model, tmp_path, fake_runner(model), nacks_at=9)
    assert (await replay_fake(model, tmp_path, nacks_at=9)).difference is None
    difference = (await replay_fake(model, tmp_path)).difference
    assert difference is not None
    assert difference.where == "plan 9"
    assert difference.expected == "refused the plan: as the test wants it"
    assert difference.got == "a result"
    difference = (await replay_fake(model, tmp_path, nacks_at=7)).difference
    assert difference is not None
    assert (difference.where, difference.expected) == ("plan 7, step 0", "a result")


async def test_a_worker_that_served_before_replays_under_later_versions(
    model: TinyModel, tmp_path: Path
) -> None:
    await record_fake(model, tmp_path, fake_runner(model))
    async with WorkerPort() as port, fake_worker(model, port.address):
        for _ in range(2):
            assert (await play(tmp_path, port)).difference is None


async def test_a_worker_of_another_model_is_refused(model: TinyModel, tmp_path: Path) -> None:
    await record_fake(model, tmp_path, fake_runner(model))
    async with WorkerPort() as port:
        worker = FakeWorker(port.address, runner=fake_runner(model), model_fingerprint=bytes(32))
        async with worker:
            with pytest.raises(WorkerGoneError, match=r"fingerprint 0000.* made with .*smol"):
                await play(tmp_path, port)
            assert await worker.exited() == 3


async def test_a_hit_on_a_block_that_nobody_wrote_counts_as_one_from_before(
    model: TinyModel, tmp_path: Path
) -> None:
    # So many that the last ones are never handed out.
    vocab_size = model.catalog.served.vocab_size
    await record_fake(model, tmp_path, FakeModelRunner(num_blocks=512, vocab_size=vocab_size))
    [path] = segments(tmp_path)

    def alter(record: recording_pb2.Record) -> bool:
        for added in record.sent.plan.added_rows:
            if added.num_hit_blocks:
                added.block_ids = (511).to_bytes(4, "little") + added.block_ids[4:]
                return True
        return False

    rewrite(path, alter)
    runner = FakeModelRunner(num_blocks=512, vocab_size=vocab_size)
    summary = await replay_fake(model, tmp_path, runner)
    assert summary.difference is None
    assert summary.num_restored_blocks == 1
