"""Many callers at once: each gets an answer that says what to do, and costs no more than it may."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import urllib.request
from collections import Counter
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from api_harness import read_all, running_api, until

from control_plane import generation, metrics_server
from control_plane.cluster_config import ClusterConfig
from protos.pagewire.v1 import inference_pb2

if TYPE_CHECKING:
    from pathlib import Path

    from control_plane.model_catalog import CatalogModel

pb = inference_pb2
NUM_CALLS = 4000
MAX_QUEUED = 50


async def test_a_burst_of_calls_is_taken_or_refused_as_overload(
    model: CatalogModel, model_dir: Path
) -> None:
    cluster = ClusterConfig(term_gather_s=0.01, max_queued_requests=MAX_QUEUED)
    async with running_api(model, model_dir, cluster=cluster) as api, api.ready_worker() as worker:
        worker.runner.gate.clear()
        request = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=9))
        answers: Counter[str] = Counter()

        async def call() -> Any:
            stream: Any = api.stub.Generate(request)
            try:
                await stream.read()
                answers["taken"] += 1
            except grpc.aio.AioRpcError as error:
                answers[error.code().name] += 1
            return stream

        streams = await asyncio.gather(*(call() for _ in range(NUM_CALLS)))
        assert set(answers) == {"taken", "RESOURCE_EXHAUSTED"}
        assert MAX_QUEUED <= answers["taken"] < NUM_CALLS
        for stream in streams:
            stream.cancel()
        worker.runner.gate.set()
        await until(api.is_idle, what="every block is free")


async def test_idle_connections_to_the_metrics_port_are_few_and_end(
    model: CatalogModel, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "_IDLE_TIMEOUT_S", 0.5)

    def scrape(port: int) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
            return response.read()

    async with running_api(model, model_dir) as api:
        port = api.control_plane.metrics_port
        num_threads = threading.active_count()
        with contextlib.ExitStack() as stack:
            for _ in range(200):
                stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            await until(lambda: threading.active_count() > num_threads, what="some are served")
            most = threading.active_count()
            # None of them says a word or hangs up, and yet their threads end.
            await until(lambda: threading.active_count() <= num_threads, what="threads end")
            assert most <= num_threads + metrics_server._MAX_CONNECTIONS
            text = await asyncio.to_thread(scrape, port)
        assert b"pagewire_term" in text


async def test_a_peer_that_hangs_up_on_the_metrics_port_leaves_no_traceback(
    model: CatalogModel, model_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def raise_broken_pipe() -> None:
        raise BrokenPipeError

    async with running_api(model, model_dir) as api:
        server: Any = api.control_plane._metrics_server
        try:
            raise_broken_pipe()
        except BrokenPipeError:
            server._server.handle_error(None, ("127.0.0.1", 1))
    assert "Traceback" not in capfd.readouterr().err


async def test_a_missed_deadline_is_not_counted_as_a_cancellation(
    model: CatalogModel, model_dir: Path
) -> None:
    async with running_api(model, model_dir) as api, api.ready_worker() as worker:
        worker.runner.gate.clear()
        request = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=9))
        failures = api.control_plane.metrics.failures
        late: Any = api.stub.Generate(request, timeout=0.3)
        with pytest.raises(grpc.aio.AioRpcError):
            await read_all(late)
        await until(lambda: failures["DEADLINE_EXCEEDED"] == 1, what="the deadline is counted")
        gone: Any = api.stub.Generate(request, timeout=60)
        await gone.read()
        gone.cancel()
        await until(lambda: failures["CANCELLED"] == 1, what="the cancellation is counted")
        worker.runner.gate.set()
    assert failures == {"DEADLINE_EXCEEDED": 1, "CANCELLED": 1}


async def test_messages_of_live_requests_are_bounded_by_their_bytes(
    model: CatalogModel, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "_MAX_HELD_BYTES", 3_000_000)
    # No token of the prompt comes of it: a field that this server does not know.
    padding = b"\xa2\x06\xc0\x84\x3d" + b"x" * 1_000_000
    data = (
        pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=9)).SerializeToString()
        + padding
    )
    async with running_api(model, model_dir) as api, api.ready_worker() as worker:
        worker.runner.gate.clear()
        generate = api.channel.unary_stream("/pagewire.v1.InferenceService/Generate")
        taken: list[Any] = [generate(data), generate(data)]
        for call in taken:
            await call.read()
        refused: Any = generate(data)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await refused.read()
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "bytes" in (error.value.details() or "")
        taken[0].cancel()
        await until(
            lambda: api.control_plane.cluster.stats().num_requests_live == 1, what="one has ended"
        )
        again: Any = generate(data)
        await again.read()
        worker.runner.gate.set()
        await asyncio.gather(read_all(taken[1]), read_all(again))
        await until(api.is_idle, what="every block is free")
