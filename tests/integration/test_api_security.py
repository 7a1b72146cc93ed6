"""Who may talk to the two ports: TLS, client certificates, tokens, and prefixes kept apart."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from api_harness import Api, running_api, until
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc
from pagewire_client import (
    AsyncClient,
    Client,
    DuplicateRequestError,
    InvalidRequestError,
    TlsFiles,
    UnauthenticatedError,
    UnavailableError,
    build_request,
)
from tls_helpers import Pki, make_pki

from control_plane.security_config import SecurityConfig
from data_plane.control_stream import EXIT_REFUSED
from protos.pagewire.v1 import inference_pb2, inference_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from control_plane.model_catalog import CatalogModel

ALICE, BOB, WORKER = "alice-0123456789abcdef", "bob-0123456789abcdef", "worker-0123456789abcdef"
PROMPT = list(range(100, 180))
SHORT: dict[str, Any] = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
LONG: dict[str, Any] = {"max_tokens": 1500, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return make_pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def other_pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return make_pki(tmp_path_factory.mktemp("other"))


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"alice {ALICE}\nbob {BOB}\n")
    return path


@pytest.fixture
async def guarded(model: CatalogModel, model_dir: Path, tokens_file: Path) -> AsyncGenerator[Api]:
    security = SecurityConfig(auth_tokens_file=tokens_file, enforce_cache_salt=True)
    async with running_api(model, model_dir, security=security) as api, api.ready_worker():
        yield api


@contextlib.asynccontextmanager
async def two_clients(api: Api) -> AsyncGenerator[tuple[AsyncClient, AsyncClient]]:
    async with (
        AsyncClient(api.address, token=ALICE, timeout_s=60.0) as alice,
        AsyncClient(api.address, token=BOB, timeout_s=60.0) as bob,
    ):
        yield alice, bob


async def answers(api: Api, tls: TlsFiles | None) -> bool:
    """Whether a client is served; a refused handshake is UnavailableError to it."""
    async with AsyncClient(api.address, tls=tls, timeout_s=20.0) as client:
        return [model.name for model in await client.models()] == [api.model.served.name]


async def attaches(api: Api, tls: TlsFiles | None) -> None:
    async with api.worker(tls=tls and tls.read()) as worker:
        await until(lambda: worker.is_serving, what="worker is attached")


async def is_turned_away(api: Api, tls: TlsFiles | None, caplog: pytest.LogCaptureFixture) -> bool:
    """Whether a worker's attempts fail before its Hello, and it keeps trying."""
    caplog.clear()
    async with api.worker(tls=tls and tls.read()) as worker:
        await until(lambda: "not attached, retrying" in caplog.text, what="worker was refused")
        return not worker.is_serving and worker.exit_code is None


async def test_tls_on_both_ports(
    model: CatalogModel, model_dir: Path, pki: Pki, other_pki: Pki,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    security = SecurityConfig(tls=pki.files("server"), worker_tls=pki.files("server"))
    async with running_api(model, model_dir, security=security) as api:
        await attaches(api, pki.client())
        assert await answers(api, pki.client())
        for wrong, message in (
            (None, "may speak TLS"),
            (other_pki.client(), "descends from none that was given as CA"),
        ):
            with pytest.raises(UnavailableError, match=message):
                await answers(api, wrong)
            assert await is_turned_away(api, wrong, caplog)


async def test_tls_towards_plain_text_is_told(
    model: CatalogModel, model_dir: Path, pki: Pki, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_api(model, model_dir) as api:
        with pytest.raises(UnavailableError, match="does not speak TLS"):
            await answers(api, pki.client())
        assert await is_turned_away(api, pki.client(), caplog)


async def test_a_certificate_for_another_host_is_told(
    model: CatalogModel, model_dir: Path, pki: Pki
) -> None:
    security = SecurityConfig(tls=pki.files("server"))
    async with running_api(model, model_dir, security=security) as api:
        address = api.address.replace("127.0.0.1", "localhost")
        async with AsyncClient(address, tls=pki.client(), timeout_s=20.0) as client:
            with pytest.raises(UnavailableError, match="for another host"):
                await client.models()


async def test_mtls_on_both_ports(
    model: CatalogModel, model_dir: Path, pki: Pki, other_pki: Pki,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    tls = pki.files("server", ca=pki.ca)
    security = SecurityConfig(tls=tls, worker_tls=tls)
    async with running_api(model, model_dir, security=security) as api:
        await attaches(api, pki.client(with_certificate=True))
        assert await answers(api, pki.client(with_certificate=True))
        foreign = other_pki.files("client", ca=pki.ca)
        for wrong in (None, pki.client(), foreign):
            with pytest.raises(UnavailableError, match="want a certificate of the client"):
                await answers(api, wrong)
            assert await is_turned_away(api, wrong, caplog)


async def test_the_synchronous_client_speaks_tls(
    model: CatalogModel, model_dir: Path, pki: Pki, tokens_file: Path
) -> None:
    security = SecurityConfig(tls=pki.files("server"), auth_tokens_file=tokens_file)
    async with running_api(model, model_dir, security=security) as api, api.ready_worker():

        def ask() -> list[int]:
            with Client(api.address, tls=pki.client(), token=ALICE, timeout_s=60.0) as client:
                assert client.tokenize("a") == api.encode("a")
                return client.complete(PROMPT, **SHORT).outputs[0].token_ids

        assert await asyncio.to_thread(ask) == api.expected(PROMPT, max_tokens=3)


async def test_a_client_refuses_files_that_are_none(pki: Pki) -> None:
    with pytest.raises(ValueError, match="ca: cannot read"):
        AsyncClient("127.0.0.1:1", tls=TlsFiles(ca=pki.path / "nothing"))
    with pytest.raises(ValueError, match="one word") as error:
        AsyncClient("127.0.0.1:1", token="two words")
    assert "two" not in str(error.value)


@pytest.mark.parametrize(
    ("token", "problem"), [(None, "missing"), ("carol-0123456789abcdef", "unknown")]
)
async def test_every_method_asks_for_a_token(
    token: str | None, problem: str, guarded: Api, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        async with AsyncClient(guarded.address, token=token, timeout_s=20.0) as client:
            requests = [build_request(PROMPT, SHORT)]
            for call in (
                client.generate(PROMPT, **SHORT).result(),
                client.tokenize("a"),
                client.detokenize([5]),
                client.models(),
                client.stats(),
                anext(aiter(client.batch(requests))),
            ):
                with pytest.raises(UnauthenticatedError) as error:
                    await call
                assert error.value.reason == "UNAUTHENTICATED"
                assert error.value.metadata == {"problem": problem}
                assert "carol-" not in error.value.message
    assert guarded.control_plane.metrics.failures["UNAUTHENTICATED"] == 6
    assert "carol-" not in caplog.text


async def test_health_is_open_and_reflection_is_not(guarded: Api) -> None:
    health: Any = health_pb2_grpc.HealthStub(guarded.channel)
    response = await health.Check(health_pb2.HealthCheckRequest())
    assert response.status == health_pb2.HealthCheckResponse.SERVING
    reflection: Any = reflection_pb2_grpc.ServerReflectionStub(guarded.channel)
    call = reflection.ServerReflectionInfo()
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_call_without_a_token_is_refused_before_its_messages_are_read(
    guarded: Api,
) -> None:
    stub: Any = inference_pb2_grpc.InferenceServiceStub(guarded.channel)
    # Nothing is ever sent on it.
    assert await stub.GenerateBatch().code() is grpc.StatusCode.UNAUTHENTICATED


async def test_tokens_are_read_again(guarded: Api, tokens_file: Path) -> None:
    async with two_clients(guarded) as (alice, bob):
        await bob.models()
        await asyncio.to_thread(tokens_file.write_text, f"alice {ALICE}\n")
        await guarded.control_plane.reread_secrets()
        await alice.models()
        with pytest.raises(UnauthenticatedError):
            await bob.models()


async def test_principals_do_not_meet_in_request_ids(
    model: CatalogModel, model_dir: Path, tokens_file: Path
) -> None:
    security = SecurityConfig(auth_tokens_file=tokens_file)
    async with (
        running_api(model, model_dir, security=security) as api,
        api.ready_worker() as worker,
        two_clients(api) as (alice, bob),
    ):
        hers = alice.generate(PROMPT, request_id="the-same", **LONG)
        async for _ in hers:
            break
        worker.runner.gate.clear()
        with pytest.raises(DuplicateRequestError):
            await alice.generate(PROMPT, request_id="the-same", **SHORT).result()
        # What takes her own request over from herself leaves it alone when it comes from him.
        his = bob.start(hers.log.resume_request())
        await until(
            lambda: api.control_plane.cluster.stats().num_requests_live == 2, what="both are live"
        )
        worker.runner.gate.set()
        mine, other = await hers.result(), await his.result()
        expected = api.expected(PROMPT, max_tokens=1500)
        assert mine.outputs[0].token_ids == expected
        assert hers.log.outputs[0].token_ids == expected
        assert hers.num_resumes == 0
        assert other.outputs[0].token_ids


async def cached(client: AsyncClient, **options: Any) -> int:
    completion = await client.generate(PROMPT, **SHORT, **options).result()
    return completion.usage.cached_tokens


async def test_principals_share_no_prefix_whatever_salt_they_send(guarded: Api) -> None:
    async with two_clients(guarded) as (alice, bob):
        assert await cached(alice) == 0
        assert await cached(alice) == 64
        for salt in ("", "alice", "alice/", "/"):
            assert await cached(bob, cache_salt=salt) == 0
        assert await cached(bob) == 64
        # Within a principal a salt still keeps apart.
        assert await cached(alice, cache_salt="a") == 0
        assert await cached(alice, cache_salt="a") == 64


async def test_batches_belong_to_principals_too(guarded: Api) -> None:
    async def cached_in_batch(client: AsyncClient) -> int:
        results = [result async for result in client.batch([build_request(PROMPT, SHORT)])]
        assert results[0].error is None
        assert results[0].completion is not None
        return results[0].completion.usage.cached_tokens

    async with two_clients(guarded) as (alice, bob):
        assert await cached_in_batch(alice) == 0
        assert await cached(alice) == 64
        assert await cached_in_batch(bob) == 0


async def test_without_enforcement_the_clients_salt_counts(
    model: CatalogModel, model_dir: Path, tokens_file: Path
) -> None:
    security = SecurityConfig(auth_tokens_file=tokens_file)
    async with (
        running_api(model, model_dir, security=security) as api,
        api.ready_worker(),
        two_clients(api) as (alice, bob),
    ):
        assert await cached(alice) == 0
        assert await cached(bob) == 64
        assert await cached(bob, cache_salt="bob") == 0


async def test_workers_need_their_token(
    model: CatalogModel, model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "worker-tokens"
    path.write_text(f"{WORKER}\n")
    security = SecurityConfig(worker_token_file=path)
    async with running_api(model, model_dir, security=security) as api:
        with caplog.at_level(logging.DEBUG):
            for wrong in (None, "another-0123456789abcdef"):
                async with api.worker(token=wrong) as worker:
                    assert await worker.exited() == EXIT_REFUSED
        assert "code=UNAUTHENTICATED reason=UNAUTHENTICATED" in caplog.text
        assert "another-" not in caplog.text
        assert WORKER not in caplog.text
        async with api.ready_worker(token=WORKER):
            assert await answers(api, None)


@pytest.mark.parametrize("with_tls", [False, True])
async def test_tokens_in_plain_text_for_other_machines_are_worth_a_line(
    with_tls: bool,
    model: CatalogModel,
    model_dir: Path,
    pki: Pki,
    tokens_file: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tls = pki.files("server") if with_tls else None
    security = SecurityConfig(tls=tls, auth_tokens_file=tokens_file)
    async with running_api(model, model_dir, security=security):
        assert "plain text" not in caplog.text
    async with running_api(model, model_dir, security=security, host="0.0.0.0"):
        assert ("missing=--tls-cert" in caplog.text) == (not with_tls)


async def test_a_request_without_token_reaches_nothing(guarded: Api) -> None:
    stub: Any = inference_pb2_grpc.InferenceServiceStub(guarded.channel)
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.Tokenize(inference_pb2.TokenizeRequest(text="x" * 1000))
    assert guarded.control_plane.cluster.stats().num_requests_live == 0


async def test_long_texts_wait_in_turn_for_whom_they_are_from(
    guarded: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenants: list[str] = []
    pool = guarded.control_plane._pool
    run = pool.run

    async def noted(num_chars: int, work: Any, *, tenant: str = "") -> Any:
        tenants.append(tenant)
        return await run(num_chars, work, tenant=tenant)

    monkeypatch.setattr(pool, "run", noted)
    async with two_clients(guarded) as (alice, bob):
        await alice.tokenize("a")
        await bob.detokenize([5])
        await alice.generate("a", **SHORT).result()
        await bob.chat([{"role": "user", "content": "a"}], **SHORT).result()
    assert tenants == ["alice", "bob", "alice", "bob"]


async def test_no_principal_puts_itself_before_the_others(
    model: CatalogModel, model_dir: Path, tokens_file: Path
) -> None:
    security = SecurityConfig(auth_tokens_file=tokens_file, max_priority=0)
    async with (
        running_api(model, model_dir, security=security) as api,
        api.ready_worker(),
        AsyncClient(api.address, token=ALICE, timeout_s=60.0) as alice,
    ):
        with pytest.raises(InvalidRequestError, match="priority is 1, at most 0") as error:
            await alice.generate(PROMPT, priority=1, **SHORT).result()
        assert error.value.metadata["field"] == "priority"
        for priority in (0, -5):
            assert await alice.generate(PROMPT, priority=priority, **SHORT).result()
