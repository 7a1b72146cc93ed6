"""What people get wrong when they name a server, and what the command tells them."""

from __future__ import annotations

import asyncio
import datetime
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest
import trustme
from api_harness import Api, running_api
from pagewire_client import AsyncClient, Chunk, Client, TlsFiles
from pagewire_client import cli as command

from control_plane.security_config import SecurityConfig

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from control_plane.model_catalog import CatalogModel


@pytest.fixture
async def api(model: CatalogModel, model_dir: Path) -> AsyncGenerator[Api]:
    async with running_api(model, model_dir) as api:
        yield api


async def said(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and error output of `pagewire`."""
    capfd.readouterr()
    code = await asyncio.to_thread(command.main, [*arguments])
    return code, capfd.readouterr().err


@pytest.mark.parametrize("arguments", [["models"], ["generate", "x"], ["chat", "x"], ["status"]])
async def test_the_worker_port_is_recognized(
    arguments: list[str], api: Api, capfd: pytest.CaptureFixture[str]
) -> None:
    code, text = await said(capfd, *arguments, "--server", api.worker_address)
    assert code == 1
    assert "not the public API" in text
    assert "call its public port, 50051 by default" in text


async def test_the_metrics_port_is_recognized(api: Api, capfd: pytest.CaptureFixture[str]) -> None:
    address = f"127.0.0.1:{api.control_plane.metrics_port}"
    code, text = await said(capfd, "models", "--server", address)
    assert code == 1
    assert "speaks no gRPC; a metrics port does not" in text


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ("http://h:50051", "not as a URL: give h:50051 instead of http://h:50051"),
        ("https://h:50051/", "give h:50051 and the TLS options instead"),
        ("GRPC://h:50051", "give h:50051 instead"),
        ("somewhere", "HOST:PORT, got 'somewhere'"),
    ],
)
async def test_an_address_that_is_none_is_told(
    server: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code, text = await said(capfd, "models", "--server", server)
    assert code == 2
    assert message in text
    with pytest.raises(ValueError, match="HOST:PORT"):
        AsyncClient(server)


def test_addresses_of_other_kinds_are_left_to_grpc(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    trustme.CA().cert_pem.write_to_path(ca)
    for server in ("dns:///h:1", "unix:/run/x", "[::1]:1", "ipv4:127.0.0.1:1"):
        Client(server).close()
    # With TLS a name alone means port 443.
    Client("llm.example", tls=TlsFiles(ca=ca)).close()


async def test_an_expired_certificate_is_told(
    model: CatalogModel, model_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ca = trustme.CA()
    yesterday = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    cert = ca.issue_cert("127.0.0.1", not_after=yesterday)
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    cert.private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    files = TlsFiles(cert=tmp_path / "server.pem", key=tmp_path / "server.pem")
    async with running_api(model, model_dir, security=SecurityConfig(tls=files)) as api:
        flags = ("--server", api.address, "--tls-ca", str(tmp_path / "ca.pem"))
        code, text = await said(capfd, "models", *flags)
    assert code == 1
    assert "Its certificate has expired" in text


def test_what_a_model_writes_does_not_steer_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    def printed() -> str:
        chunks: Any = [Chunk(index=0, text="a\x1b[2J\tb\x9b1m\x07c\n", token_ids=[1])]
        ours, theirs = os.openpty()
        with os.fdopen(theirs, "w", encoding="utf-8") as terminal:
            monkeypatch.setattr(sys, "stdout", terminal)
            command._print_stream(chunks)
            terminal.flush()
            text = os.read(ours, 1000).decode()
        os.close(ours)
        return text

    # The terminal itself makes \r\n of \n.
    assert printed().replace("\r\n", "\n") == "a\ufffd[2J\tb\ufffd1m\ufffdc\n"
