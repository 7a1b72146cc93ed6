"""Listeners, health, reflection, metrics and the process itself."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from api_harness import Api, running_api, until
from fake_worker import FakeWorker
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from pagewire_client import AsyncClient, build_request

from control_plane.server import PortTakenError
from protos.model_fingerprint import served_fingerprint
from protos.pagewire.v1 import inference_pb2, inference_pb2_grpc, worker_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from control_plane.model_catalog import CatalogModel

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
async def api(model: CatalogModel, model_dir: Path) -> AsyncGenerator[Api]:
    async with running_api(model, model_dir) as api:
        yield api


async def health_of(channel: grpc.aio.Channel, service: str) -> int:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    response = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return response.status


async def test_the_process_is_healthy_before_a_model_is_ready(api: Api) -> None:
    assert await health_of(api.channel, "") == SERVING
    assert await health_of(api.channel, "pagewire.v1.InferenceService") == SERVING
    assert await health_of(api.channel, "smol") == NOT_SERVING


async def test_readiness_of_a_model_follows_its_replicas(api: Api) -> None:
    stub: Any = health_pb2_grpc.HealthStub(api.channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service="smol"))
    assert (await watch.read()).status == NOT_SERVING
    async with api.worker():
        assert (await watch.read()).status == SERVING
    assert (await watch.read()).status == NOT_SERVING


async def test_health_of_an_unknown_service_is_not_found(api: Api) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await health_of(api.channel, "other")
    assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_drain_is_visible_at_once_and_ends_every_watch(
    model: CatalogModel, model_dir: Path
) -> None:
    async with running_api(model, model_dir) as api, api.ready_worker():
        stub: Any = health_pb2_grpc.HealthStub(api.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        await api.control_plane.drain(1.0)
        assert (await watch.read()).status == NOT_SERVING
        assert await health_of(api.channel, "smol") == NOT_SERVING


async def test_reflection_lists_the_public_services_only(api: Api) -> None:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(api.channel)
    call = stub.ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    response = await call.read()
    names = {service.name for service in response.list_services_response.service}
    assert names == {
        "pagewire.v1.InferenceService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


async def test_the_worker_port_serves_workers_only(api: Api) -> None:
    async with grpc.aio.insecure_channel(api.worker_address) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.ListModels(inference_pb2.ListModelsRequest())
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await health_of(channel, "")
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_the_public_port_serves_no_workers(api: Api) -> None:
    stub: Any = worker_pb2_grpc.WorkerServiceStub(api.channel)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.Attach().read()
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


def scrape(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as response:
        return response.read().decode()


def metric(text: str, name: str) -> float:
    [value] = re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(value)


async def test_metrics_have_the_names_that_dashboards_know(
    model: CatalogModel, model_dir: Path
) -> None:
    async with running_api(model, model_dir) as api, api.ready_worker():
        await api.client.complete([5, 6, 7], max_tokens=9, temperature=0, ignore_eos=True)
        await until(api.is_idle, what="the request is over")
        text = await asyncio.to_thread(scrape, api.control_plane.metrics_port)
        labels = '{model_name="smol",replica_id="r0"}'
        assert metric(text, "pagewire_prompt_tokens_total") == 3
        assert metric(text, "pagewire_generation_tokens_total") == 9
        assert metric(text, 'pagewire_request_success_total{finished_reason="length"}') == 1
        assert metric(text, "pagewire_time_to_first_token_seconds_count") == 1
        assert metric(text, "pagewire_inter_token_latency_seconds_count") == 8
        assert metric(text, "pagewire_e2e_request_latency_seconds_count") == 1
        assert metric(text, f"pagewire_num_requests_running{labels}") == 0
        assert metric(text, f"pagewire_num_requests_waiting{labels}") == 0
        assert metric(text, f"pagewire_kv_cache_usage_perc{labels}") == 0
        assert metric(text, f"pagewire_prefix_cache_queries_total{labels}") == 3
        assert metric(text, f"pagewire_prefix_cache_hits_total{labels}") == 0
        assert metric(text, f"pagewire_num_preemptions_total{labels}") == 0
        assert metric(text, f"pagewire_plans_refused_total{labels}") == 0
        assert metric(text, f"pagewire_steps_failed_total{labels}") == 0
        assert metric(text, f"pagewire_device_time_seconds_total{labels}") > 0
        assert metric(text, "pagewire_prefix_store_up") == 1
        assert metric(text, "pagewire_prefix_store_resyncs_total") == 1


async def test_metrics_tell_that_the_prefix_store_is_gone(
    model: CatalogModel, model_dir: Path
) -> None:
    with socket.socket() as taken:
        # Bound and not listening: every connection is refused.
        taken.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{taken.getsockname()[1]}"
        async with running_api(model, model_dir, redis_url=url) as api:
            failures = api.control_plane.metrics.store.failures
            await until(lambda: failures["unreachable"] > 0, what="the store was asked")
            text = await asyncio.to_thread(scrape, api.control_plane.metrics_port)
    assert metric(text, "pagewire_prefix_store_up") == 0
    assert metric(text, 'pagewire_prefix_store_failure_total{kind="unreachable"}') > 0


async def test_the_metrics_port_serves_metrics_only(api: Api) -> None:
    with pytest.raises(urllib.error.HTTPError) as error:
        await asyncio.to_thread(scrape, api.control_plane.metrics_port, "/")
    assert error.value.code == 404
    error.value.close()


@pytest.mark.parametrize("field", ["port", "worker_port", "metrics_port"])
async def test_a_taken_port_is_named_with_its_flag(
    model: CatalogModel, model_dir: Path, field: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortTakenError) as error:
            async with running_api(model, model_dir, **{field: port}):
                pass
    flag = "--" + field.replace("_", "-")
    assert f"127.0.0.1:{port} ({flag} {port})" in str(error.value)


async def test_a_second_server_on_the_same_port_is_refused(
    api: Api, model: CatalogModel, model_dir: Path
) -> None:
    with pytest.raises(PortTakenError):
        async with running_api(model, model_dir, port=api.control_plane.port):
            pass


async def test_stats_mirror_the_cluster(model: CatalogModel, model_dir: Path) -> None:
    async with running_api(model, model_dir) as api, api.ready_worker():
        stats = await api.client.stats()
        assert (stats.prefix_store, stats.term) == ("memory", 1)
        [replica] = stats.replicas
        assert (replica.replica_id, replica.model, replica.block_size) == ("r0", "smol", 16)
        assert [worker.worker_id for worker in replica.workers] == ["w0"]
        [served] = await api.client.models()
        assert (served.name, served.ready_replicas, served.vocab_size) == ("smol", 1, 49152)


async def start_process(model_dir: Path, *flags: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "control_plane", "--model", str(model_dir), *flags,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def test_sigterm_finishes_what_runs_and_exits_with_zero(
    model: CatalogModel, model_dir: Path
) -> None:
    ports = ("--port", "0", "--worker-port", "0", "--metrics-port", "0")
    process = await start_process(model_dir, *ports, "--served-model-name", "demo")
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()
    found = re.search(r"public=(\S+) workers=(\S+) metrics=(\S+) models=demo$", line.strip())
    assert found, line
    public, workers, _ = found.groups()
    served = model.served
    worker = FakeWorker(
        workers,
        model_fingerprint=served_fingerprint(served.base_fingerprint, kv_dtype="float32"),
        max_model_len=250,
    )
    async with worker, AsyncClient(public, timeout_s=60) as client:
        request = build_request([5, 6], {"max_tokens": 200, "temperature": 0, "ignore_eos": True})
        generation = client.start(request)
        worker.runner.gate.clear()
        ended = asyncio.create_task(generation.result())
        await until(lambda: generation.log.seed is not None, what="the request is admitted")
        process.send_signal(signal.SIGTERM)
        async with grpc.aio.insecure_channel(public) as channel:
            await until_not_serving(channel)
        worker.runner.gate.set()
        result = await ended
    assert result.usage.completion_tokens == 200
    assert await process.wait() == 0
    errors = (await process.stderr.read()).decode() if process.stderr else ""
    assert "Traceback" not in errors
    assert "signal: name=SIGTERM" in errors


async def until_not_serving(channel: grpc.aio.Channel) -> None:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest())
    while (await watch.read()).status == SERVING:
        pass


async def test_a_taken_port_ends_the_process_with_a_clear_line(api: Api, model_dir: Path) -> None:
    port = str(api.control_plane.port)
    process = await start_process(model_dir, "--port", port)
    _, errors = await process.communicate()
    assert process.returncode == 2
    assert f"(--port {port}): the port is taken" in errors.decode()
    assert "Traceback" not in errors.decode()
