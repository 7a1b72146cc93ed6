"""How the Redis prefix store reaches its server, and what it lets it see: password, TLS, keys."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import ssl
import subprocess
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest
from conditions import until
from prefix_store_helpers import SCOPE, Recorder, entries, redis_store, until_held, until_loaded
from valkey_process import ValkeyProcess

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


pytestmark = pytest.mark.redis


async def test_password_is_used_and_never_shown(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    server = ValkeyProcess(tmp_path)
    await server.start(requirepass="s3cr3t/#?")
    good = f"redis://:s3cr3t%2F%23%3F@127.0.0.1:{server.port}"
    async with redis_store(good) as store:
        store.record(SCOPE, entries(1))
        await until(lambda: store.num_pending == 0 and store.describe() == "redis: ok")
    for url in (f"redis://:wr0ng@127.0.0.1:{server.port}", server.url):
        async with redis_store(url) as store:
            await until(lambda store=store: store.describe().startswith("redis: denied since"))
            assert await store.load(SCOPE) is None
    await server.kill()
    assert "s3cr3t" not in caplog.text
    assert "wr0ng" not in caplog.text
    assert "denied" in caplog.text


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate that nobody signed but itself, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command to make a certificate")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


@pytest.fixture
async def tls_port(valkey: ValkeyProcess, certificate: tuple[Path, Path]) -> AsyncIterator[int]:
    """A TLS front before the server."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def front(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        plain_reader, plain_writer = await asyncio.open_connection("127.0.0.1", valkey.port)
        await asyncio.gather(pump(reader, plain_writer), pump(plain_reader, writer))

    server = await asyncio.start_server(front, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_tls_is_spoken_and_the_certificate_is_checked(valkey, tls_port, certificate):
    authority = quote(str(certificate[0]), safe="")
    good = f"rediss://127.0.0.1:{tls_port}/0?ssl_ca_certs={authority}"
    async with redis_store(good) as store:
        store.record(SCOPE, entries(3))
        await until(lambda: store.num_pending == 0)
        await until_held(valkey.url, SCOPE, entries(3))
    observer = Recorder()
    async with redis_store(f"rediss://127.0.0.1:{tls_port}/0", observer=observer) as store:
        await until(lambda: observer.failures["unreachable"] >= 2)
        assert await store.load(SCOPE) is None


async def test_no_token_and_no_text_reaches_the_server(valkey):
    async with redis_store(valkey.url) as store, valkey.admin() as admin:
        store.renew(SCOPE, lambda: entries(2))
        await until_loaded(store, SCOPE, entries(2))

        async def are_both_there() -> bool:
            return len(await admin.keys("*")) == 2

        await until(are_both_there)
        [key] = await admin.keys("pagewire:1:blocks:*")
        [listing] = await admin.keys("pagewire:1:scopes:*")
        assert await admin.smembers(listing) == {key.split(b":", 4)[-1]}
        stored = await admin.hgetall(key)
        assert set(stored) == {b"writer", b"1", b"2"}
        assert {len(value) for name, value in stored.items() if name != b"writer"} == {49}
