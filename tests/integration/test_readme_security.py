"""The README's example of certificates and tokens, as it stands there."""

from __future__ import annotations

import asyncio
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from api_harness import running_api
from pagewire_client.cli import main as pagewire

from control_plane.config import parse_args as control_plane_flags
from data_plane.config import parse_args as worker_flags
from data_plane.config import read_token

if TYPE_CHECKING:
    from control_plane.model_catalog import CatalogModel

ROOT = Path(__file__).resolve().parents[2]


def example() -> tuple[str, list[list[str]]]:
    """The commands that make files, and those that start programs."""
    section = re.split(r"^## ", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    text = next(part for part in section if part.startswith("Security\n"))
    make, run = (
        re.sub(r"^    ", "", block, flags=re.MULTILINE)
        for block in re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)
    )
    return make, [shlex.split(line) for line in run.replace("\\\n", " ").splitlines()]


@pytest.mark.skipif(
    not (shutil.which("openssl") and shutil.which("bash")),
    reason="the example itself needs openssl and bash; TLS is tested in test_api_security.py",
)
async def test_the_security_example_of_the_readme_works(
    model: CatalogModel,
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    make, commands = example()
    await asyncio.to_thread(
        subprocess.run,
        ["bash", "-euo", "pipefail", "-c", make],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    monkeypatch.chdir(tmp_path)
    assert [command[0] for command in commands] == [
        "pagewire-control",
        "pagewire-worker",
        "pagewire",
    ]
    (_, *control), (_, *worker), (_, *client) = (
        [str(model_dir) if word == "/models/my-model" else word for word in command]
        for command in commands
    )
    config, worker_config = control_plane_flags(control), worker_flags(worker)
    assert worker_config.tls is not None
    assert worker_config.token_file is not None
    async with (
        running_api(model, model_dir, security=config.security) as api,
        api.ready_worker(tls=worker_config.tls.read(), token=read_token(worker_config.token_file)),
    ):
        server = f"localhost:{api.control_plane.port}"
        client[client.index("localhost:50051")] = server
        capfd.readouterr()
        assert await asyncio.to_thread(pagewire, client) == 0
        assert api.model.served.name in capfd.readouterr().out
        without_token = client[: client.index("--token-file")]
        assert await asyncio.to_thread(pagewire, without_token) == 1
        assert "brings no token" in capfd.readouterr().err
        assert await asyncio.to_thread(pagewire, ["models", "--server", server]) == 1
        assert "may speak TLS" in capfd.readouterr().err
        assert await asyncio.to_thread(pagewire, [*without_token, "--token-file", "no"]) == 2
        assert "--token-file: cannot read no" in capfd.readouterr().err
