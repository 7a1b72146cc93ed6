"""What a peer can hold without ever showing a token: connections, handshakes, streams, messages."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import ssl
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from api_harness import Api, running_api, until
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from pagewire_client import AsyncClient, InvalidRequestError
from tls_helpers import Pki, make_pki

from control_plane import health, port_options
from control_plane.security_config import SecurityConfig
from control_plane.service_limits import ServiceLimits
from protos.pagewire.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from control_plane.model_catalog import CatalogModel

TOKEN = "alice-0123456789abcdef"
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return make_pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture
async def api(model: CatalogModel, model_dir: Path) -> AsyncGenerator[Api]:
    async with running_api(
        model, model_dir, limits=ServiceLimits(read_timeout_s=0.2, write_timeout_s=60.0)
    ) as api:
        yield api


def silent_call(api: Api, method: str) -> Any:
    """A call whose message never comes."""
    return api.channel.stream_stream(method)(timeout=60.0)


@pytest.mark.parametrize("method", ["Generate", "Tokenize", "Detokenize", "ListModels", "GetStats"])
async def test_a_call_whose_message_never_comes_ends(method: str, api: Api) -> None:
    call = silent_call(api, f"/pagewire.v1.InferenceService/{method}")
    assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "did not arrive within 0.2 seconds" in await call.details()
    assert await rpc_status.aio.from_call(call) is not None
    assert api.control_plane.metrics.failures["SLOW_CLIENT"] == 1


async def test_a_call_that_goes_away_before_its_message_counts_as_that(
    model: CatalogModel, model_dir: Path
) -> None:
    async with running_api(model, model_dir) as api:
        failures = api.control_plane.metrics.failures
        method = "/pagewire.v1.InferenceService/Generate"
        num_calls = 20
        for _ in range(num_calls):
            late = api.channel.stream_stream(method)(timeout=0.05)
            assert await late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        for _ in range(num_calls):
            gone = api.channel.stream_stream(method)(timeout=60.0)
            # So that the server has heard of the call before it hears of its end.
            await gone.wait_for_connection()
            await api.stub.ListModels(inference_pb2.ListModelsRequest())
            gone.cancel()
        await until(lambda: failures["CANCELLED"] >= num_calls, what="all are counted")
    # Of a deadline that short the server may not even have heard.
    assert set(failures) <= {"CANCELLED", "DEADLINE_EXCEEDED"}


async def test_a_call_that_ends_before_its_message_is_told(api: Api) -> None:
    call = silent_call(api, "/pagewire.v1.InferenceService/Generate")
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "ended before its message" in await call.details()


@pytest.mark.parametrize("method", ["Check", "Watch"])
async def test_a_health_check_whose_message_never_comes_ends(
    method: str, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "_REQUEST_TIMEOUT_S", 0.2)
    call = silent_call(api, f"/{health.SERVICE_NAME}/{method}")
    assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "did not come within 0.2 s" in await call.details()


async def test_a_health_check_that_is_none_is_told(api: Api) -> None:
    call: Any = api.channel.unary_unary(f"/{health.SERVICE_NAME}/Check")
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call(b"\xff\xff")
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_health_watchers_are_bounded(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_MAX_WATCHERS", 2)
    stub: Any = health_pb2_grpc.HealthStub(api.channel)
    watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
    for watch in watches:
        await watch.read()
    refused = stub.Watch(health_pb2.HealthCheckRequest())
    assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    response = await stub.Check(health_pb2.HealthCheckRequest())
    assert response.status == health_pb2.HealthCheckResponse.SERVING
    watches[0].cancel()

    async def can_watch() -> bool:
        return await stub.Watch(health_pb2.HealthCheckRequest()).read() is not grpc.aio.EOF

    # Its place is free as soon as the server has heard of it.
    async with asyncio.timeout(20.0):
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                if await can_watch():
                    return


@pytest.mark.parametrize("port", ["port", "worker_port"])
async def test_a_compressed_message_counts_by_what_it_becomes(port: str, api: Api) -> None:
    address = f"127.0.0.1:{getattr(api.control_plane, port)}"
    methods = {
        "port": f"/{health.SERVICE_NAME}/Check",
        "worker_port": "/pagewire.v1.WorkerService/Attach",
    }
    async with grpc.aio.insecure_channel(
        address,
        options=[("grpc.max_send_message_length", -1)],
        compression=grpc.Compression.Gzip,
    ) as channel:
        call = channel.stream_stream(methods[port])(timeout=60.0)
        await call.write(bytes(64 << 20))
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def _closed(reader: asyncio.StreamReader) -> None:
    """Wait until the other end hangs up."""
    with contextlib.suppress(ConnectionError):
        while await reader.read(1 << 16):
            pass


@pytest.mark.parametrize("with_tls", [False, True])
async def test_a_connection_that_never_says_a_word_is_closed(
    with_tls: bool, model: CatalogModel, model_dir: Path, pki: Pki, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port_options, "_HANDSHAKE_TIMEOUT_MS", 500)
    tls = pki.files("server") if with_tls else None
    security = SecurityConfig(tls=tls, worker_tls=tls)
    async with running_api(model, model_dir, security=security) as api:
        control_plane = api.control_plane
        for port in (control_plane.port, control_plane.worker_port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            async with asyncio.timeout(30.0):
                await _closed(reader)
            writer.close()


async def test_a_flood_of_connections_at_one_port_leaves_the_other_alone(
    model: CatalogModel, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port_options, "_share_of_files", lambda _n, _d: 4)
    async with running_api(model, model_dir) as api, contextlib.AsyncExitStack() as stack:
        num_closed = 0
        for _ in range(12):
            reader, writer = await asyncio.open_connection("127.0.0.1", api.control_plane.port)
            stack.callback(writer.close)
            writer.write(HTTP2_PREFACE)
            with contextlib.suppress(ConnectionError):
                num_closed += not await reader.read(1)
        assert num_closed == 8
        async with api.ready_worker():
            pass


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
async def test_tls_older_than_1_2_is_refused(
    model: CatalogModel, model_dir: Path, pki: Pki
) -> None:
    security = SecurityConfig(tls=pki.files("server"))
    async with running_api(model, model_dir, security=security) as api:
        for version, works in (("TLSv1_2", True), ("TLSv1_1", False)):
            context = ssl.create_default_context(cafile=str(pki.ca))
            context.set_alpn_protocols(["h2"])
            context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
            context.set_ciphers("ALL:@SECLEVEL=0")
            context.maximum_version = ssl.TLSVersion[version]
            try:
                _, writer = await asyncio.open_connection(
                    "127.0.0.1", api.control_plane.port, ssl=context
                )
            except (ssl.SSLError, ConnectionError):
                assert not works, version
            else:
                assert works, version
                writer.transport.abort()


def test_a_process_may_open_as_many_files_as_the_system_lets_it() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    script = (
        "import resource as r; from control_plane import port_options as p; "
        f"r.setrlimit(r.RLIMIT_NOFILE, (256, {hard})); "
        "few = p._share_of_files(3, 4); p.raise_open_files(); "
        "print(few, r.getrlimit(r.RLIMIT_NOFILE)[0], p._share_of_files(3, 4))"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    few, soft, share = map(int, out.stdout.split())
    most = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    assert few == 96
    assert soft == most
    assert share == (most - 128) * 3 // 4


async def test_a_detokenization_of_millions_is_refused(api: Api) -> None:
    async with AsyncClient(api.address, timeout_s=60.0) as client:
        assert await client.detokenize([500] * (1 << 16))
        with pytest.raises(InvalidRequestError, match="at most 65536 are accepted"):
            await client.detokenize([5] * ((1 << 16) + 1))


async def test_the_python_client_reaches_a_server_with_bounds(api: Api) -> None:
    async with AsyncClient(api.address, timeout_s=60.0) as client:
        assert [model.name for model in await client.models()] == [api.model.served.name]
    await until(api.is_idle, what="nothing is held")
