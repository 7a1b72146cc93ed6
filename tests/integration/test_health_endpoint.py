"""The container's health check, as the Dockerfile has it, against a server that trusts nobody."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from api_harness import Api, running_api
from tls_helpers import make_pki

from control_plane import metrics_server
from control_plane.security_config import SecurityConfig

if TYPE_CHECKING:
    from control_plane.model_catalog import CatalogModel

ROOT = Path(__file__).resolve().parents[2]


def health_check(port: int) -> list[str]:
    """The Dockerfile's command, for another port."""
    text = (ROOT / "deploy/docker/control-plane.Dockerfile").read_text().replace("\\\n", "")
    [command] = re.findall(r"^HEALTHCHECK .* CMD (\[.*\])$", text, re.MULTILINE)
    python, *arguments = json.loads(command)
    assert python == "python"
    return [sys.executable, *(word.replace(":9464/", f":{port}/") for word in arguments)]


async def is_healthy(api: Api) -> bool:
    process = await asyncio.create_subprocess_exec(
        *health_check(api.control_plane.metrics_port), stderr=asyncio.subprocess.DEVNULL
    )
    return await process.wait() == 0


async def test_the_health_check_of_the_image_needs_neither_certificate_nor_token(
    model: CatalogModel, model_dir: Path, tmp_path: Path
) -> None:
    pki = make_pki(tmp_path / "pki")
    tokens = tmp_path / "tokens"
    tokens.write_text("alice alice-0123456789abcdef\n")
    security = SecurityConfig(tls=pki.files("server", ca=pki.ca), auth_tokens_file=tokens)
    async with running_api(model, model_dir, security=security) as api:
        assert await is_healthy(api)
        await api.control_plane.drain(0.0)
        assert not await is_healthy(api)


async def test_a_loop_that_does_not_answer_is_not_healthy(
    model: CatalogModel, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "_HEALTH_TIMEOUT_S", 0.2)
    async with running_api(model, model_dir) as api:
        url = f"http://127.0.0.1:{api.control_plane.metrics_port}/healthz"
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(url, timeout=60.0)  # noqa: ASYNC210 - it is to block the loop
        assert await is_healthy(api)


async def test_the_metrics_port_can_stay_at_home(model: CatalogModel, model_dir: Path) -> None:
    async with running_api(model, model_dir, host="0.0.0.0", metrics_host="127.0.0.2") as api:
        line = api.control_plane.describe()
        assert "public=0.0.0.0:" in line
        assert f"metrics=http://127.0.0.2:{api.control_plane.metrics_port}/metrics" in line
        _, writer = await asyncio.open_connection("127.0.0.2", api.control_plane.metrics_port)
        writer.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", api.control_plane.metrics_port)
