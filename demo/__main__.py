"""`make demo`: a real model answers a question through real processes on this machine.

Environment: PROMPT, WORKERS, KEEP=1, DEVICE, MODEL, STORE (see `demo.session.Settings`).
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from demo.model import ROOT
from demo.session import Session, run_demo

if TYPE_CHECKING:
    from demo.stack import ServingStack

_MAX_TOKENS = 128


async def demo(session: Session) -> int:
    """Start everything, ask, print the answer and how to ask more, stop everything."""
    settings, console = session.settings, session.console
    async with session.stack() as stack:
        stack.start_control_plane()
        worker_ids = [f"worker-{number}" for number in range(settings.workers)]
        for worker_id in worker_ids:
            stack.start_worker(worker_id)
        console.say("started", f"control-plane, {', '.join(worker_ids)} ({stack.config.device})")
        async with console.busy("loading the model"):
            await stack.wait_until_ready(
                settings.workers, on_change=lambda seen: console.say("waiting", seen)
            )
        await stack.processes.guard(_answer(session, stack))
        console.write(_how_to_call(stack))
        if settings.keep:
            console.write("\nRunning until Ctrl-C.")
            await stack.processes.guard(asyncio.Event().wait())
    return 0


async def _answer(session: Session, stack: ServingStack) -> None:
    console = session.console
    console.write(f"\n> {session.settings.prompt}")
    messages = [{"role": "user", "content": session.settings.prompt}]
    started_s, first_s = console.elapsed_s, None
    async with (
        stack.client() as client,
        client.chat(messages, temperature=0.0, max_tokens=_MAX_TOKENS) as generation,
    ):
        async for chunk in generation:
            first_s = first_s if first_s is not None else console.elapsed_s
            print(chunk.text, end="", flush=True)
        usage = generation.log.completion().usage
    print()
    first_s = first_s if first_s is not None else console.elapsed_s
    decode_s = max(console.elapsed_s - first_s, 1e-9)
    console.write(
        f"\n{usage.prompt_tokens} prompt and {usage.completion_tokens} output tokens; first token "
        f"{first_s - started_s:.2f} s after the question and {first_s:.1f} s after the start; then "
        f"{(usage.completion_tokens - 1) / decode_s:.1f} tokens/s"
    )


def _how_to_call(stack: ServingStack) -> str:
    ports, address = stack.ports, stack.address
    python = _relative(sys.executable)
    # Beside the interpreter if the package is installed; PYTHON= may be one without it.
    script = Path(sys.executable).with_name("pagewire")
    command = (
        _relative(script)
        if script.is_file()
        else f"PYTHONPATH=.:clients/python {python} -m pagewire_client.cli"
    )
    message = '{"role": "user", "content": "Name three rivers"}'
    return f"""
Public gRPC API  {address}
Workers dial     127.0.0.1:{ports.worker}
Metrics          http://127.0.0.1:{ports.metrics}/metrics
Store            {stack.store_label}
Logs             {_relative(stack.config.base_dir / "logs")}/

Call it (with KEEP=1 it stays up), from {ROOT}:
  command line  {command} chat --server {address} \\
                  --temperature 0 "Name three rivers"
                {command} status --server {address}
  grpcurl       grpcurl -plaintext -d '{{"chat": {{"messages": [{message}]}},
                  "sampling": {{"temperature": 0}}}}' \\
                  {address} pagewire.v1.InferenceService/Generate
  Python        from pagewire_client import Client   # in {python}
                print(Client("{address}").complete([{message}], temperature=0).text)
  Node.js       (cd clients/node && npm ci)          # once
                node clients/node/example.js --server {address} "Name three rivers"
"""


def _relative(path: str | Path) -> str:
    text = str(path)
    return text.removeprefix(f"{ROOT}/")


def main() -> int:
    return run_demo("make demo", demo)


if __name__ == "__main__":
    sys.exit(main())
