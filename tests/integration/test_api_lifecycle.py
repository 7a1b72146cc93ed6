"""How calls end: cancelled, late, replaced, unread, refused by a full queue or a drain."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from api_harness import Api, read_all, running_api, until
from pagewire_client import (
    AbortedError,
    AsyncClient,
    DeadlineError,
    DuplicateRequestError,
    OverloadedError,
    UnavailableError,
    build_request,
)

from control_plane.cluster_config import ClusterConfig
from control_plane.errors import InvariantError
from control_plane.service_limits import ServiceLimits
from protos.pagewire.v1 import inference_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from control_plane.model_catalog import CatalogModel

LONG: dict[str, Any] = {"max_tokens": 2000, "temperature": 0, "ignore_eos": True}


@pytest.fixture
async def api(model: CatalogModel, model_dir: Path) -> AsyncGenerator[Api]:
    async with running_api(model, model_dir) as api, api.ready_worker():
        yield api


def live(api: Api) -> int:
    return api.control_plane.cluster.stats().num_requests_live


async def test_a_cancelled_call_gives_its_blocks_back(model: CatalogModel, model_dir: Path) -> None:
    async with running_api(model, model_dir) as api, api.ready_worker() as worker:
        generation = api.client.generate([5, 6, 7], **LONG)
        async for _ in generation:
            break
        # The request cannot end by itself any more.
        worker.runner.gate.clear()
        assert live(api) == 1
        generation.cancel()
        await until(lambda: live(api) == 0, what="the request is gone")
        worker.runner.gate.set()
        await until(api.is_idle, what="blocks are free")
        assert api.num_generated() < 2000
        api.control_plane.cluster.audit()


async def test_a_call_cancelled_while_it_waits_for_a_replica_leaves_nothing(
    model: CatalogModel, model_dir: Path
) -> None:
    async with running_api(model, model_dir) as api:
        call = api.stub.Generate(build_request("x", {"max_tokens": 2}))
        await call.read()
        call.cancel()
        await until(lambda: live(api) == 0, what="request is gone")


async def test_a_deadline_ends_the_call_and_gives_its_blocks_back(
    model: CatalogModel, model_dir: Path
) -> None:
    async with running_api(model, model_dir) as api, api.ready_worker() as worker:
        worker.runner.gate.clear()
        with pytest.raises(DeadlineError) as error:
            await api.client.complete([5], timeout_s=0.3, **LONG)
        assert error.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: live(api) == 0, what="the request is gone")
        worker.runner.gate.set()
        await until(api.is_idle, what="blocks are free")


async def test_a_live_request_id_is_refused(api: Api) -> None:
    async with api.client.generate([5, 6, 7], request_id="one", **LONG) as first:
        async for _ in first:
            break
        with pytest.raises(DuplicateRequestError) as error:
            await api.client.complete([1], request_id="one")
    assert error.value.reason == "DUPLICATE_REQUEST_ID"
    assert error.value.metadata["value"] == "one"


async def test_an_id_is_free_again_after_its_request(api: Api) -> None:
    for _ in range(2):
        await api.client.complete([5], max_tokens=2, request_id="again")


async def test_a_resume_replaces_the_live_request_of_the_same_id(api: Api) -> None:
    first = api.client.generate([5, 6, 7], request_id="mine", **LONG)
    async for _ in first:
        if len(first.log.outputs[0].token_ids) > 4:
            break
    second = api.client.start(first.log.resume_request())
    with pytest.raises(AbortedError) as error:
        await first.result()
    assert "taken over" in error.value.message
    whole = await second.result()
    received = first.log.outputs[0].token_ids
    # The first call may have got more before it was replaced: only what was sent counts.
    resumed_after = 2000 - len(whole.token_ids)
    expected = api.expected([5, 6, 7], max_tokens=2000, ignore_eos=True)
    assert received[:resumed_after] + whole.token_ids == expected
    await until(api.is_idle, what="blocks are free")


async def test_a_client_that_does_not_read_loses_its_own_stream_only(
    model: CatalogModel, model_dir: Path
) -> None:
    limits = ServiceLimits(write_timeout_s=0.3)
    async with running_api(model, model_dir, limits=limits) as api, api.ready_worker():
        # A window of one byte: the server's write waits for a read.
        options = (("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0))
        async with grpc.aio.insecure_channel(api.address, options=options) as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            call = stub.Generate(build_request([5, 6, 7], LONG))
            await call.read()
            other = await api.client.complete([1, 2, 3], max_tokens=50)
            assert other.usage.completion_tokens == 50
            await until(api.is_idle, what="blocks of the slow client are free")
            assert api.num_generated() < 2000 + 50
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await read_all(call)
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "0.3 seconds" in str(error.value.details())
    assert api.control_plane.metrics.failures["SLOW_CLIENT"] == 1


async def test_a_stall_of_the_server_is_not_held_against_a_client(
    model: CatalogModel, model_dir: Path
) -> None:
    limits = ServiceLimits(write_timeout_s=6.0)
    async with running_api(model, model_dir, limits=limits) as api, api.ready_worker():
        options = (("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0))
        async with grpc.aio.insecure_channel(api.address, options=options) as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            call = stub.Generate(build_request([5, 6, 7], LONG))
            await call.read()
            # More than the window takes: a write waits for a read.
            await until(lambda: api.num_generated() >= 1900, what="much is unread")
            time.sleep(6.5)  # noqa: ASYNC251 - the stall
            await read_all(call)
            assert await call.code() is grpc.StatusCode.OK
    assert "SLOW_CLIENT" not in api.control_plane.metrics.failures


async def test_a_full_queue_refuses_with_a_time_to_retry(
    model: CatalogModel, model_dir: Path
) -> None:
    cluster = ClusterConfig(max_queued_requests=1, replica_wait_s=20.0)
    async with running_api(model, model_dir, cluster=cluster) as api:
        call = api.stub.Generate(build_request("x", {"max_tokens": 2}))
        await call.read()
        with pytest.raises(OverloadedError) as error:
            await api.client.complete("y", max_tokens=2)
        assert error.value.reason == "OVERLOADED"
        assert (error.value.retry_after_s or 0) > 0
        call.cancel()


async def test_without_a_replica_a_request_is_unavailable_in_the_end(
    model: CatalogModel, model_dir: Path
) -> None:
    cluster = ClusterConfig(replica_wait_s=0.05)
    async with running_api(model, model_dir, cluster=cluster) as api:
        with pytest.raises(UnavailableError) as error:
            await api.client.complete("x", max_tokens=2)
        assert error.value.reason == "NO_REPLICA"


async def test_a_drain_lets_what_runs_finish_and_refuses_the_rest(api: Api) -> None:
    running = api.client.generate([5, 6, 7], **LONG)
    async for _ in running:
        break
    drain = asyncio.create_task(api.control_plane.drain(30.0))
    with pytest.raises(UnavailableError) as error:
        await until_refused(api)
    assert error.value.reason == "SHUTTING_DOWN"
    result = await running.result()
    assert result.usage.completion_tokens == 2000
    assert await drain


async def until_refused(api: Api) -> None:
    while True:
        await api.client.complete("x", max_tokens=1)


async def test_a_drain_that_runs_out_of_time_tells_its_clients(api: Api) -> None:
    # A client that goes on by itself would wait a minute for the next control plane.
    async with AsyncClient(api.address, resume=None) as client:
        running = client.generate([5, 6, 7], **LONG)
        async for _ in running:
            break
        assert not await api.control_plane.drain(0.0)
        with pytest.raises(UnavailableError) as error:
            await running.result()
        assert error.value.reason == "SHUTTING_DOWN"


async def test_a_broken_invariant_ends_the_process(api: Api) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise InvariantError("state")

    api.control_plane.cluster.submit = broken  # type: ignore[method-assign]
    running = asyncio.create_task(api.control_plane.run_until(asyncio.Event()))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await api.generate(build_request("x", {}))
    assert error.value.code() is grpc.StatusCode.INTERNAL
    with pytest.raises(InvariantError):
        await running


async def test_many_requests_at_once_all_get_their_own_tokens(api: Api) -> None:
    prompts = [[i, i + 1, i + 2] for i in range(100, 148)]
    results = await asyncio.gather(
        *(api.client.complete(p, max_tokens=12, temperature=0, ignore_eos=True) for p in prompts)
    )
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == api.expected(prompt, max_tokens=12, ignore_eos=True)
    await until(api.is_idle, what="blocks are free")
