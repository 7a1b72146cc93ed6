"""Certificates and tokens that change while the control plane runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from api_harness import Api, running_api, until
from grpc_status import rpc_status
from pagewire_client import AsyncClient, TlsFiles, UnavailableError, build_request
from tls_helpers import Pki, make_pki

from control_plane import port_security
from control_plane.security_config import SecurityConfig
from protos.pagewire.v1 import inference_pb2

if TYPE_CHECKING:
    from pathlib import Path

    from control_plane.model_catalog import CatalogModel

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"
PROMPT = list(range(100, 130))


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return make_pki(tmp_path / "pki")


@pytest.fixture
def renewed(tmp_path: Path) -> Pki:
    """Of another CA, so that a client can tell which certificate it was shown."""
    return make_pki(tmp_path / "renewed")


def replace(pki: Pki, renewed: Pki, *names: str) -> None:
    """Let files have the contents of the renewed ones."""
    for name in names:
        shutil.copyfile(renewed.path / name, pki.path / name)


async def answers(api: Api, tls: TlsFiles) -> bool:
    async with AsyncClient(api.address, tls=tls, timeout_s=20.0) as client:
        try:
            return bool(await client.models())
        except UnavailableError:
            return False


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_renewed_certificate_is_shown_without_a_restart(
    at_once: bool, model: CatalogModel, model_dir: Path, pki: Pki, renewed: Pki,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if not at_once:
        monkeypatch.setattr(port_security, "_LOOK_INTERVAL_S", 0.02)
    files = pki.files("server")
    new = TlsFiles(ca=renewed.ca)
    async with (
        running_api(model, model_dir, security=SecurityConfig(tls=files, worker_tls=files)) as api,
        AsyncClient(api.address, tls=pki.client(), timeout_s=20.0) as old,
    ):
        assert await old.models()
        assert not await answers(api, new)
        replace(pki, renewed, "server.pem", "server.key")
        if at_once:
            await api.control_plane.reread_secrets()
            assert await answers(api, new)
        else:
            async with asyncio.timeout(20.0):
                while not await answers(api, new):
                    pass
        assert not await answers(api, pki.client())
        # A connection that stands stays.
        assert await old.models()
        # The worker port has the same certificate.
        async with api.worker(tls=new.read()) as worker:
            await until(lambda: worker.is_serving, what="worker is attached")


async def test_half_of_a_renewal_changes_nothing(
    model: CatalogModel, model_dir: Path, pki: Pki, renewed: Pki,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(port_security, "_LOOK_INTERVAL_S", 0.02)
    caplog.set_level(logging.INFO)
    security = SecurityConfig(tls=pki.files("server"))
    async with running_api(model, model_dir, security=security) as api:
        replace(pki, renewed, "server.pem")
        await until(lambda: "certificates not read again" in caplog.text, what="it is seen")
        assert "is not the one of the certificate" in caplog.text
        assert "PRIVATE" not in caplog.text
        assert await answers(api, pki.client())
        replace(pki, renewed, "server.key")
        await until(lambda: "certificates read again" in caplog.text, what="the rest is seen")
        assert await answers(api, TlsFiles(ca=renewed.ca))


async def test_a_renewed_ca_decides_which_clients_may_connect(
    model: CatalogModel, model_dir: Path, pki: Pki, renewed: Pki
) -> None:
    security = SecurityConfig(tls=pki.files("server", ca=pki.ca))
    async with running_api(model, model_dir, security=security) as api:
        own_ca = tuple(p.files("client", ca=pki.path / "kept.pem") for p in (pki, renewed))
        shutil.copyfile(pki.ca, pki.path / "kept.pem")
        assert [await answers(api, tls) for tls in own_ca] == [True, False]
        replace(pki, renewed, "ca.pem")
        await api.control_plane.reread_secrets()
        assert [await answers(api, tls) for tls in own_ca] == [False, True]


async def test_changed_tokens_are_noticed(
    model: CatalogModel, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(port_security, "_LOOK_INTERVAL_S", 0.02)
    tokens, after = tmp_path / "tokens", tmp_path / "after"
    tokens.write_text(f"alice {ALICE}\n")
    async with (
        running_api(model, model_dir, security=SecurityConfig(auth_tokens_file=tokens)) as api,
        AsyncClient(api.address, token=BOB, timeout_s=20.0) as bob,
    ):
        with caplog.at_level(logging.INFO):
            # Wrong, gone and empty are all the same: who could call still can.
            tokens.write_text("alice\n")
            await until(lambda: "found 1 words" in caplog.text, what="a wrong file is seen")
            tokens.unlink()
            await until(lambda: "No such file" in caplog.text, what="a missing file is seen")
            async with AsyncClient(api.address, token=ALICE, timeout_s=20.0) as alice:
                assert await alice.models()
            after.write_text(f"alice {ALICE}\nbob {BOB}\n")
            after.rename(tokens)
            await until(lambda: "tokens=2" in caplog.text, what="it is read")
        assert await bob.models()


async def test_a_batch_does_not_outlive_its_token(
    model: CatalogModel, model_dir: Path, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"alice {ALICE}\n")
    security = SecurityConfig(auth_tokens_file=tokens)
    async with running_api(model, model_dir, security=security) as api, api.ready_worker():
        call: Any = api.stub.GenerateBatch(metadata=(("authorization", f"Bearer {ALICE}"),))

        async def ask(request_id: str) -> Any:
            request = build_request(PROMPT, {"max_tokens": 2, "request_id": request_id})
            await call.write(inference_pb2.GenerateBatchRequest(request=request))
            return await call.read()

        assert (await ask("a")).response.usage.completion_tokens == 2
        await asyncio.to_thread(tokens.write_text, f"bob {BOB}\n")
        await api.control_plane.reread_secrets()
        assert (await ask("b")).error.code == grpc.StatusCode.UNAUTHENTICATED.value[0]
        call.cancel()


async def test_secrets_that_everybody_can_read_are_worth_a_line(
    model: CatalogModel, model_dir: Path, pki: Pki, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"alice {ALICE}\n")
    security = SecurityConfig(tls=pki.files("server"), auth_tokens_file=tokens)
    for mode in (0o600, 0o644):
        caplog.clear()
        tokens.chmod(mode)
        (pki.path / "server.key").chmod(mode)
        async with running_api(model, model_dir, security=security):
            pass
        lines = [line for line in caplog.messages if "readable for every user" in line]
        assert len(lines) == (2 if mode == 0o644 else 0)
    assert f"file={tokens} mode=0644" in caplog.text


async def test_a_worker_at_the_public_port_is_told_so(
    model: CatalogModel, model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"alice {ALICE}\n")
    security = SecurityConfig(auth_tokens_file=tokens)
    async with running_api(model, model_dir, security=security) as api:
        api.control_plane.worker_port = api.control_plane.port
        async with api.worker(token="worker-0123456789abcdef") as worker:
            with contextlib.suppress(asyncio.CancelledError):
                assert await worker.exited() == 3
        assert "a control plane's public port does so" in caplog.text
        call: Any = api.stub.ListModels(inference_pb2.ListModelsRequest())
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        assert await rpc_status.aio.from_call(call) is not None
