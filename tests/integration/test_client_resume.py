"""Clients go on by themselves when the control plane goes away in their midst and comes back.

Over real gRPC: the control plane is cut off and another one takes its ports, fake workers attach
again or are new. Oracle: what an undisturbed run gives for the seed that the first response named.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from api_harness import Api, running_api, until
from pagewire_client import (
    AsyncClient,
    CancelledError,
    Client,
    PagewireError,
    ResumePolicy,
    UnavailableError,
    async_client,
    build_request,
    client,
    resume,
)

from demo.ports import any_free_port

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from fake_worker import FakeWorker
    from pagewire_client import AsyncGeneration

    from control_plane.model_catalog import CatalogModel

NUM_TOKENS = 300
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1, "seed": 11},
    "unseeded": {"temperature": 1},
}
POLICY = ResumePolicy(limit_s=30.0, backoff_min_s=0.01, backoff_max_s=0.1)


class Site:
    """Control planes on the same ports, one after the other, and a worker that outlives them."""

    def __init__(self, model: CatalogModel, model_dir: Path) -> None:
        self._model = model
        self._model_dir = model_dir
        self._ports = {"port": any_free_port(), "worker_port": any_free_port()}
        self._stack = contextlib.AsyncExitStack()
        self._workers = contextlib.AsyncExitStack()
        self.api: Api
        self.worker: FakeWorker

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._ports['port']}"

    async def start(self) -> None:
        self.api = await self._stack.enter_async_context(
            running_api(self._model, self._model_dir, **self._ports)
        )

    async def crash(self) -> None:
        """Connections break, nobody is told why."""
        await self.api.control_plane._public_server.stop(None)
        await self._stack.aclose()

    async def new_worker(self) -> None:
        await self._workers.aclose()
        self.worker = await self._workers.enter_async_context(self.api.worker())

    async def ready(self) -> None:
        await until(lambda: self.api.control_plane.cluster.num_ready("smol") == 1, what="ready")

    async def close(self) -> None:
        await self._workers.aclose()
        await self._stack.aclose()

    def expected(self, prompt: list[int], seed: int, options: dict[str, Any]) -> list[int]:
        return self.api.expected(
            prompt,
            max_tokens=NUM_TOKENS,
            seed=seed,
            temperature=float(options["temperature"]),
            ignore_eos=True,
        )


@pytest.fixture
async def site(model: CatalogModel, model_dir: Path) -> AsyncGenerator[Site]:
    site = Site(model, model_dir)
    await site.start()
    try:
        await site.new_worker()
        await site.ready()
        yield site
    finally:
        await site.close()


def options(kind: str) -> Any:
    return {**KINDS[kind], "max_tokens": NUM_TOKENS, "ignore_eos": True}


async def replace_control_plane(site: Site, *, with_worker: bool) -> None:
    """While the worker is held in a step, so that the streams are in their midst."""
    await site.crash()
    site.worker.runner.gate.set()
    await site.start()
    if with_worker:
        await site.new_worker()


@pytest.mark.parametrize("with_worker", [False, True], ids=["worker stays", "worker dies too"])
@pytest.mark.parametrize("kind", KINDS)
async def test_an_async_stream_goes_on(site: Site, kind: str, *, with_worker: bool) -> None:
    prompt = site.api.encode("Once upon a time")
    async with AsyncClient(site.address, resume=POLICY) as client:
        generation = client.generate(prompt, **options(kind))
        text, ids = "", []
        async for chunk in generation:
            text += chunk.text
            ids += chunk.token_ids
            if len(ids) >= 20 and site.worker.runner.gate.is_set() and not generation.num_resumes:
                site.worker.runner.gate.clear()
                await replace_control_plane(site, with_worker=with_worker)
        completion = await generation.result()
    assert generation.num_resumes >= 1
    expected = site.expected(prompt, completion.seed, KINDS[kind])
    assert ids == completion.token_ids == expected
    assert text == completion.text == site.api.text(prompt, expected)
    assert completion.usage.completion_tokens == NUM_TOKENS


@pytest.mark.parametrize("kind", KINDS)
async def test_a_sync_stream_goes_on(site: Site, kind: str) -> None:
    prompt = site.api.encode("Once upon a time")
    loop = asyncio.get_running_loop()
    in_midst = asyncio.Event()

    def read() -> Any:
        with Client(site.address, resume=POLICY) as client:
            generation = client.generate(prompt, **options(kind))
            ids: list[int] = []
            for chunk in generation:
                ids += chunk.token_ids
                if len(ids) >= 20 and not in_midst.is_set():
                    site.worker.runner.gate.clear()
                    loop.call_soon_threadsafe(in_midst.set)
            return ids, generation.num_resumes, generation.result()

    reading = asyncio.create_task(asyncio.to_thread(read))
    await in_midst.wait()
    await replace_control_plane(site, with_worker=False)
    ids, num_resumes, completion = await reading
    assert num_resumes >= 1
    assert ids == completion.token_ids == site.expected(prompt, completion.seed, KINDS[kind])


async def test_several_restarts_in_one_stream(site: Site) -> None:
    prompt = site.api.encode("Once upon a time")
    async with AsyncClient(site.address, resume=POLICY) as client:
        generation = client.generate(prompt, **options("unseeded"))
        ids: list[int] = []
        marks = [0, 60, 120]
        async for chunk in generation:
            ids += chunk.token_ids
            if marks and len(ids) > marks[0]:
                del marks[0]
                site.worker.runner.gate.clear()
                await replace_control_plane(site, with_worker=False)
    assert generation.num_resumes >= 3
    assert generation.log.seed is not None
    assert ids == site.expected(prompt, generation.log.seed, KINDS["unseeded"])


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_a_batch_goes_on_and_answers_each_once(site: Site, *, is_async: bool) -> None:
    prompts = [site.api.encode(f"Number {i}") for i in range(8)]
    requests = [build_request(prompt, options("seeded")) for prompt in prompts]
    site.worker.runner.gate.clear()
    # It is the first thing that the client does, and breaks before any answer.
    if is_async:

        async def run() -> tuple[list[Any], int]:
            async with (
                AsyncClient(site.address, resume=POLICY) as client,
                client.batch(requests) as batch,
            ):
                return [result async for result in batch], batch.num_resumes

        running = asyncio.create_task(run())
    else:

        def read() -> tuple[list[Any], int]:
            with (
                Client(site.address, resume=POLICY) as client,
                client.batch(iter(requests)) as batch,
            ):
                return list(batch), batch.num_resumes

        running = asyncio.create_task(asyncio.to_thread(read))
    await until(lambda: site.api.control_plane.cluster.stats().num_requests_live == 8, what="all")
    await replace_control_plane(site, with_worker=False)
    answers, num_resumes = await running
    results = {result.request_id: result for result in answers}
    assert len(answers) == 8
    assert num_resumes >= 1
    assert sorted(results) == [str(i) for i in range(8)]
    for i, prompt in enumerate(prompts):
        completion = results[str(i)].completion
        assert completion is not None, results[str(i)].error
        assert completion.token_ids == site.expected(prompt, 11, KINDS["seeded"])


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_a_batch_of_long_answers_outlives_breaks_that_are_far_apart(
    site: Site, monkeypatch: pytest.MonkeyPatch, *, is_async: bool
) -> None:
    """Nothing is answered between two breaks, but the server has the batch all the time."""
    later_s = 0.0
    clients_time = SimpleNamespace(monotonic=lambda: time.monotonic() + later_s)
    for module in (resume, client, async_client):
        monkeypatch.setattr(module, "time", clients_time)
    site.worker.runner.gate.clear()
    requests = [build_request([5, 6], options("seeded"))]

    def read() -> list[Any]:
        with Client(site.address, resume=POLICY) as client:
            return list(client.batch(requests))

    async def run() -> list[Any]:
        async with AsyncClient(site.address, resume=POLICY) as client:
            return [result async for result in client.batch(requests)]

    running = asyncio.create_task(run() if is_async else asyncio.to_thread(read))
    for _ in range(2):
        live = site.api.control_plane.cluster.stats
        await until(lambda live=live: live().num_requests_live == 1, what="it is in")
        later_s += 10 * POLICY.limit_s
        await site.crash()
        await site.start()
    site.worker.runner.gate.set()
    [result] = await running
    assert result.completion is not None
    assert result.completion.token_ids == site.expected([5, 6], 11, KINDS["seeded"])


@pytest.mark.parametrize("call", ["generate", "batch"])
async def test_a_call_that_is_cancelled_by_name_does_not_cancel_who_reads_it(
    site: Site, call: str
) -> None:
    site.worker.runner.gate.clear()
    async with AsyncClient(site.address, resume=POLICY) as client:
        running: Any = (
            client.generate([5, 6], **options("greedy"))
            if call == "generate"
            else client.batch([build_request([5, 6], options("greedy"))])
        )

        async def read() -> None:
            async for _ in running:
                pass

        reading = asyncio.create_task(read())
        stats = site.api.control_plane.cluster.stats
        await until(lambda: stats().num_requests_live == 1, what="it is in")
        running.cancel()
        with pytest.raises(CancelledError):
            await reading
    await until(lambda: stats().num_requests_live == 0, what="it is gone")
    site.worker.runner.gate.set()
    await until(site.api.is_idle, what="blocks are free")


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_who_leaves_a_batch_frees_what_is_not_answered(site: Site, *, is_async: bool) -> None:
    short: Any = {"max_tokens": 1}
    endless: Any = {"max_tokens": 1500, "ignore_eos": True}
    requests = [build_request([5], short), *(build_request([i], endless) for i in range(6, 12))]
    may_leave = threading.Event()

    def read() -> None:
        with Client(site.address, resume=POLICY) as client, client.batch(requests) as batch:
            next(batch)
            may_leave.wait()

    async def run() -> None:
        async with (
            AsyncClient(site.address, resume=POLICY) as client,
            client.batch(requests) as batch,
        ):
            await anext(batch)
            await asyncio.to_thread(may_leave.wait)

    reading = asyncio.create_task(run() if is_async else asyncio.to_thread(read))
    stats = site.api.control_plane.cluster.stats
    await until(lambda: stats().num_requests_live == 6, what="one is answered")
    site.worker.runner.gate.clear()
    may_leave.set()
    await reading
    await until(lambda: stats().num_requests_live == 0, what="all are gone")
    site.worker.runner.gate.set()
    await until(site.api.is_idle, what="blocks are free")


async def read_and_crash(site: Site, generation: AsyncGeneration) -> None:
    async for _ in generation:
        if site.worker.runner.gate.is_set():
            site.worker.runner.gate.clear()
            await site.crash()


async def test_without_a_policy_the_stream_breaks(site: Site) -> None:
    async with AsyncClient(site.address, resume=None) as client:
        generation = client.generate("Once upon a time", **options("greedy"))
        with pytest.raises(PagewireError):
            await read_and_crash(site, generation)
        site.worker.runner.gate.set()
        assert generation.num_resumes == 0


async def test_an_outage_that_lasts_ends_with_what_began_it(site: Site) -> None:
    policy = ResumePolicy(limit_s=0.3, backoff_min_s=0.01, backoff_max_s=0.05)
    async with AsyncClient(site.address, resume=policy) as client:
        generation = client.generate("Once upon a time", **options("greedy"))
        with pytest.raises(UnavailableError, match="Nothing answers"):
            await read_and_crash(site, generation)
        site.worker.runner.gate.set()
        assert generation.num_resumes >= 2


async def test_a_cancel_is_heard_during_an_outage(site: Site) -> None:
    policy = ResumePolicy(limit_s=600.0, backoff_min_s=300.0, backoff_max_s=300.0)
    is_broken = threading.Event()
    generations: list[Any] = []

    def read() -> None:
        with Client(site.address, resume=policy) as client:
            generation = client.generate("Once upon a time", **options("greedy"))
            generations.append(generation)
            for _ in generation:
                site.worker.runner.gate.clear()
                is_broken.set()

    reading = asyncio.create_task(asyncio.to_thread(read))
    await asyncio.to_thread(is_broken.wait)
    await site.crash()
    site.worker.runner.gate.set()
    generations[0].cancel()
    with pytest.raises((UnavailableError, CancelledError)):
        await reading
