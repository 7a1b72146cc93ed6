"""GenerateBatch: many requests over one stream."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from api_harness import Api, running_api, until
from pagewire_client import DuplicateRequestError, InvalidRequestError, build_request

from control_plane.service_limits import ServiceLimits
from protos.pagewire.v1 import inference_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from control_plane.model_catalog import CatalogModel

WINDOW = 4
GREEDY: Any = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture
async def api(model: CatalogModel, model_dir: Path) -> AsyncGenerator[Api]:
    limits = ServiceLimits(batch_window=WINDOW)
    async with running_api(model, model_dir, limits=limits) as api, api.ready_worker():
        yield api


def message(request_id: str, prompt: list[int], **options: Any) -> pb.GenerateBatchRequest:
    request = build_request(prompt, {**GREEDY, "request_id": request_id, **options})
    return pb.GenerateBatchRequest(request=request)


async def test_every_request_gets_its_answer_and_half_close_ends_the_stream(api: Api) -> None:
    prompts = {str(i): [i, 7, 9] for i in range(100, 125)}
    requests = [build_request(p, {**GREEDY, "request_id": i}) for i, p in prompts.items()]
    results = [result async for result in api.client.batch(requests)]
    assert sorted(r.request_id for r in results) == sorted(prompts)
    for result in results:
        assert result.completion is not None
        prompt = prompts[result.request_id]
        assert result.completion.token_ids == api.expected(prompt, max_tokens=6, ignore_eos=True)
        assert result.completion.text == api.text(prompt, result.completion.token_ids)
        assert result.completion.usage.completion_tokens == 6
    await until(api.is_idle, what="blocks are free")


async def test_an_error_concerns_its_request_only(api: Api) -> None:
    requests = [
        build_request([5], {**GREEDY, "request_id": "good"}),
        build_request("", {"request_id": "empty"}),
        build_request([5], {"request_id": "hot", "temperature": -1.0}),
    ]
    results = {r.request_id: r async for r in api.client.batch(requests)}
    assert results["good"].completion is not None
    for bad, field in (("empty", "text"), ("hot", "temperature")):
        error = results[bad].error
        assert isinstance(error, InvalidRequestError)
        assert error.metadata["field"] == field


async def test_bytes_that_are_no_text_are_an_error_of_one_response(api: Api) -> None:
    call = api.channel.stream_stream(
        "/pagewire.v1.InferenceService/GenerateBatch",
        response_deserializer=pb.GenerateBatchResponse.FromString,
    )()
    bad = pb.GenerateBatchRequest(request=pb.GenerateRequest(text="@@@")).SerializeToString()
    await call.write(bad.replace(b"@@@", b"\xed\xa0\xbd"))
    first: Any = await call.read()
    assert first.error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    await call.write(message("ok", [5]).SerializeToString())
    second: Any = await call.read()
    assert second.response.outputs
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


async def test_an_id_is_required_and_unique_among_the_unfinished(
    model: CatalogModel, model_dir: Path
) -> None:
    async with running_api(model, model_dir) as api:
        call = api.stub.GenerateBatch()
        for request_id in ("same", "same", ""):
            await call.write(message(request_id, [5]))
        responses: list[Any] = [await call.read(), await call.read()]
        codes = {r.request_id: r.error.code for r in responses}
        assert codes == {
            "same": grpc.StatusCode.ALREADY_EXISTS.value[0],
            "": grpc.StatusCode.INVALID_ARGUMENT.value[0],
        }
        async with api.ready_worker():
            assert (await call.read()).response.outputs
        # Finished, hence free again.
        async with api.ready_worker():
            await call.write(message("same", [5]))
            assert (await call.read()).response.outputs
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


async def test_no_more_than_the_window_is_read(model: CatalogModel, model_dir: Path) -> None:
    limits = ServiceLimits(batch_window=WINDOW)
    async with running_api(model, model_dir, limits=limits) as api, api.ready_worker() as worker:
        worker.runner.gate.clear()
        call = api.stub.GenerateBatch()
        for i in range(3 * WINDOW):
            await call.write(message(str(i), [i + 5]))
        stats = api.control_plane.cluster.stats
        await until(lambda: stats().num_requests_live == WINDOW, what="the window is full")
        # The server has its turns meanwhile, and reads no further.
        for _ in range(5):
            await api.client.models()
            assert stats().num_requests_live == WINDOW
        worker.runner.gate.set()
        for _ in range(3 * WINDOW):
            assert (await call.read()).response.outputs
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


async def test_an_unread_answer_keeps_its_slot(api: Api) -> None:
    options = (("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0))
    async with grpc.aio.insecure_channel(api.address, options=options) as channel:
        call = channel.stream_stream(
            "/pagewire.v1.InferenceService/GenerateBatch",
            request_serializer=pb.GenerateBatchRequest.SerializeToString,
            response_deserializer=pb.GenerateBatchResponse.FromString,
        )()
        answered = api.control_plane.metrics.successes
        for i in range(5 * WINDOW):
            await call.write(message(str(i), [i + 5]))
        # Whatever the transport takes is written; behind it at most a window is finished.
        await until(lambda: answered["length"] >= WINDOW, what="a window is answered")
        await until(api.is_idle, what="nothing runs, as nobody reads")
        assert answered["length"] < 5 * WINDOW
        await call.done_writing()
        ids = set()
        while (response := await call.read()) is not grpc.aio.EOF:
            ids.add(response.request_id)
        assert len(ids) == 5 * WINDOW


async def test_a_cancelled_batch_gives_everything_back(
    model: CatalogModel, model_dir: Path
) -> None:
    async with running_api(model, model_dir) as api, api.ready_worker() as worker:
        worker.runner.gate.clear()
        call = api.stub.GenerateBatch()
        for i in range(WINDOW):
            await call.write(message(str(i), [i + 5], max_tokens=2000))
        stats = api.control_plane.cluster.stats
        await until(lambda: stats().num_requests_live == WINDOW, what="all are admitted")
        call.cancel()
        await until(lambda: stats().num_requests_live == 0, what="all are gone")
        worker.runner.gate.set()
        await until(api.is_idle, what="blocks are free")


async def test_a_batch_sends_no_partial_answers(api: Api) -> None:
    request = build_request([5, 6], {"max_tokens": 300, "temperature": 0, "ignore_eos": True})
    results = [r async for r in api.client.batch([request])]
    assert len(results) == 1
    assert results[0].completion is not None
    assert len(results[0].completion.token_ids) == 300


async def test_an_id_that_is_live_on_another_call_is_refused(api: Api) -> None:
    async with api.client.generate([5], request_id="0", max_tokens=2000, ignore_eos=True) as first:
        async for _ in first:
            break
        results = [
            r async for r in api.client.batch([build_request([5], {**GREEDY, "request_id": "0"})])
        ]
        assert isinstance(results[0].error, DuplicateRequestError)


async def test_two_batches_without_ids_do_not_meet(api: Api) -> None:
    async def batch(first: int) -> list[str]:
        requests = [build_request([first + i], GREEDY) for i in range(10)]
        return sorted([r.request_id async for r in api.client.batch(requests) if r.completion])

    assert await asyncio.gather(batch(100), batch(200)) == [list("0123456789")] * 2


async def test_two_batches_do_not_disturb_each_other(api: Api) -> None:
    async def batch(first: int) -> int:
        requests = [
            build_request([first + i], {**GREEDY, "request_id": f"{first}-{i}"}) for i in range(10)
        ]
        return len([r async for r in api.client.batch(requests) if r.completion])

    assert await asyncio.gather(batch(100), batch(200)) == [10, 10]


async def test_parameters_that_were_seen_before_are_judged_as_the_first_time(api: Api) -> None:
    requests = [
        build_request([5, 6], {**GREEDY, "request_id": f"{temperature}{i}", "temperature": value})
        for i in range(2)
        for temperature, value in (("cold", 0.0), ("hot", -1.0))
    ]
    results = {r.request_id: r async for r in api.client.batch(requests)}
    expected = api.expected([5, 6], max_tokens=6, ignore_eos=True)
    for i in range(2):
        completion = results[f"cold{i}"].completion
        assert completion is not None
        assert completion.token_ids == expected
        assert isinstance(results[f"hot{i}"].error, InvalidRequestError)
