"""Certificates and tokens between real processes: both planes, the command line, Node."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from api_harness import until
from pagewire_client import AsyncClient, UnauthenticatedError
from tls_helpers import Pki, make_openssl_pki, make_pki

from data_plane.control_stream import EXIT_REFUSED
from demo.processes import ManagedProcess, ProcessGroup, child_environment

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

ROOT = Path(__file__).resolve().parents[2]
NODE_DIR = ROOT / "clients" / "node"
START_LIMIT_S = 60
ALICE, NEW, WORKER = "alice-0123456789abcdef", "new-0123456789abcdef", "worker-0123456789abcdef"

pytestmark = pytest.mark.asyncio(loop_scope="module")

NODE_SCRIPT = """
import { readFileSync } from 'node:fs';
import grpc from '@grpc/grpc-js';
import { PagewireClient } from './pagewire.js';
const [server, ca, token] = process.argv.slice(1);
const credentials = grpc.credentials.createSsl(readFileSync(ca));
for (const options of [{ credentials, token }, { credentials }]) {
  const client = new PagewireClient(server, options);
  try {
    let numTokens = 0;
    for await (const { outputs } of client.generate({ text: 'x', sampling: { maxTokens: 4 } })) {
      for (const output of outputs) numTokens += output.tokenIds.length;
    }
    const { tokenIds } = await client.tokenize({ text: 'x' });
    console.log(JSON.stringify([numTokens > 0, tokenIds.length > 0]));
  } catch ({ code, reason }) {
    console.log(JSON.stringify([code, reason]));
  }
  client.close();
}
"""


class Stack:
    """A guarded control plane, and a worker that has its token."""

    def __init__(self, group: ProcessGroup, path: Path, model_dir: Path) -> None:
        self.group = group
        self.model = ["--model", str(model_dir)]
        self.pki: Pki = make_pki(path)
        self.tokens = path / "tokens"
        self.tokens.write_text(f"alice {ALICE}\n")
        (path / "alice.token").write_text(ALICE)
        self.public = self.workers = ""

    async def start(self) -> None:
        await self.start_control()
        self.start_worker("worker", WORKER)

    async def start_control(self, *, worker_port: int = 0) -> None:
        worker_tokens = self.pki.path / "worker-tokens"
        if not worker_tokens.exists():
            worker_tokens.write_text(f"{WORKER}\n")
        self.public = ""
        server = self.pki.path / "server"
        self.control = self.group.start(
            "control",
            [
                *(sys.executable, "-m", "control_plane", *self.model),
                *("--port=0", f"--worker-port={worker_port}", "--metrics-port=0"),
                # A worker takes its time to load on a machine that does other things.
                *("--enforce-cache-salt", "--replica-wait-s=300"),
                *(f"--tls-cert={server}.pem", f"--tls-key={server}.key"),
                *(f"--worker-tls-client-ca={self.pki.ca}", f"--auth-tokens-file={self.tokens}"),
                f"--worker-token-file={worker_tokens}",
            ],
        )
        await self.group.guard(
            until(self._is_listening, what="it listens", timeout_s=START_LIMIT_S)
        )

    def start_worker(self, name: str, token: str) -> ManagedProcess:
        path = self.pki.path / f"{name}.token"
        path.write_text(f"{token}\n")
        client = self.pki.path / "client"
        return self.group.start(
            name,
            [
                *(sys.executable, "-m", "data_plane", *self.model, "--device=cpu"),
                *("--kv-cache-memory=64MiB", "--max-model-len=1024", f"--token-file={path}"),
                *(f"--control-plane={self.workers}", f"--tls-ca={self.pki.ca}"),
                *(f"--tls-cert={client}.pem", f"--tls-key={client}.key"),
            ],
        )

    def _is_listening(self) -> bool:
        found = re.search(r"public=(\S+) workers=(\S+)", self.control.log_tail())
        if found:
            self.public, self.workers = found[1], found[2]
        return found is not None


def new_group(log_dir: Path) -> ProcessGroup:
    return ProcessGroup(log_dir=log_dir, cwd=ROOT, env=child_environment(ROOT, os.environ))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Stack]:
    group = new_group(tmp_path_factory.mktemp("logs"))
    async with group:
        stack = Stack(group, tmp_path_factory.mktemp("pki"), model_dir)
        await stack.start()
        yield stack


async def run(*command: str, cwd: Path) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=cwd,
        env=child_environment(ROOT, os.environ),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(300):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, out.decode()


async def test_the_command_line_with_certificate_and_token(stack: Stack) -> None:
    token = stack.pki.path / "worker.token"
    command = [
        *(sys.executable, "-m", "pagewire_client.cli", "generate", "x", "--max-tokens", "4"),
        *("--server", stack.public, "--tls-ca", str(stack.pki.ca)),
    ]
    code, out = await run(*command, "--token-file", str(token), cwd=ROOT)
    assert code == 1
    assert "token is not one of this server's" in out
    assert WORKER not in out
    alice = stack.pki.path / "alice.token"
    code, out = await run(*command, "--token-file", str(alice), cwd=ROOT)
    assert code == 0, out


@pytest.mark.skipif(
    not (shutil.which("node") and (NODE_DIR / "node_modules").is_dir()),
    reason="Node.js or its packages are not installed",
)
async def test_node_with_certificate_and_token(stack: Stack) -> None:
    # It dislikes a certificate for an address, which is all that a test has.
    command = ["node", "--no-deprecation", "--input-type=module", "--eval", NODE_SCRIPT]
    code, out = await run(*command, stack.public, str(stack.pki.ca), ALICE, cwd=NODE_DIR)
    assert code == 0, out
    assert [json.loads(line) for line in out.splitlines()] == [
        [True, True],
        ["UNAUTHENTICATED", "UNAUTHENTICATED"],
    ]


async def test_a_worker_with_a_wrong_token_exits_for_good(stack: Stack) -> None:
    worker = stack.start_worker("intruder", "another-0123456789abcdef")
    worker.is_expected_to_end = True
    await until(lambda: worker.returncode is not None, what="it has left", timeout_s=60.0)
    assert worker.returncode == EXIT_REFUSED
    log = worker.log_tail()
    assert "refused for good" in log
    assert "another-" not in log


async def test_sighup_reads_tokens_again(stack: Stack) -> None:
    tls = stack.pki.client()
    async with (
        AsyncClient(stack.public, tls=tls, token=ALICE, timeout_s=20.0) as old,
        AsyncClient(stack.public, tls=tls, token=NEW, timeout_s=20.0) as new,
    ):
        await old.models()
        stack.tokens.write_text(f"alice {NEW}\n")
        os.kill(stack.control.pid, signal.SIGHUP)
        await until(lambda: "tokens read again" in stack.control.log_tail(), what="they are read")
        await new.models()
        with pytest.raises(UnauthenticatedError):
            await old.models()
        # So that the order of the tests does not count.
        stack.tokens.write_text(f"alice {ALICE}\nalice {NEW}\n")
        os.kill(stack.control.pid, signal.SIGHUP)
        await until(lambda: "tokens=2" in stack.control.log_tail(), what="they are read")


@pytest.mark.skipif(not shutil.which("openssl"), reason="makes its certificates with openssl")
async def test_everything_is_renewed_under_a_worker_that_runs_on(
    model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("renewed-pki")
    make_openssl_pki(path)
    async with new_group(tmp_path_factory.mktemp("renewal-logs")) as group:
        stack = Stack(group, path, model_dir)
        make_openssl_pki(path)  # instead of those that every stack has
        await stack.start_control()
        worker = stack.start_worker("worker", WORKER)

        async def answers() -> bool:
            async with AsyncClient(
                stack.public.replace("127.0.0.1", "localhost"),
                tls=stack.pki.client(),
                token=ALICE,
                timeout_s=300.0,
            ) as client:
                completion = await client.complete("x", max_tokens=2)
            return completion.usage.completion_tokens > 0

        assert await answers()
        old_ca = stack.pki.ca.read_bytes()
        # Another CA, other certificates of both sides, another token of the worker.
        make_openssl_pki(path)
        assert stack.pki.ca.read_bytes() != old_ca
        (path / "worker-tokens").write_text(f"{NEW}\n")
        (path / "worker.token").write_text(f"{NEW}\n")
        for process in (stack.control, worker):
            os.kill(process.pid, signal.SIGHUP)
        await until(
            lambda: stack.control.log_tail().count("certificates read again") == 2,
            what="both ports have read",
            timeout_s=60.0,
        )
        assert await answers()
        # The stream that stood is still there; whoever dials now needs the new ones.
        assert worker.log_tail().count("attached: worker=") == 1
        port = int(stack.workers.rpartition(":")[2])
        stack.control.is_expected_to_end = True
        stack.control.kill()
        await stack.control.wait()
        await stack.start_control(worker_port=port)
        assert await answers()
        assert worker.is_running
        log = worker.log_tail() + stack.control.log_tail()
        assert NEW not in log
        assert WORKER not in log
