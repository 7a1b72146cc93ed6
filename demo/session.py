"""What every demo command shares: settings, progress lines, signals, an orderly end.

Owns: the environment variables of the demos, what people see while they wait, exit codes. Does not
know what a demo shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pagewire_client import PagewireError

from demo.leftovers import AlreadyRunningError, RunDirectory
from demo.model import (
    DEMO_MODEL,
    ROOT,
    conversion_command,
    conversion_lock,
    demo_model_dir,
    is_converted,
)
from demo.processes import NO_GRPC_PROXY, ProcessDiedError
from demo.stack import ServingStack, StackConfig, choose_device

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

DEFAULT_PROMPT = "What is the capital of France?"
# Enough for the demo, and quickly allocated: the model's own limit is 8192 tokens.
_DEMO_MODEL_CPU_ARGS = ("--max-model-len", "2048", "--kv-cache-memory", "512MiB")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The environment variables of the demos, checked.

    Attributes:
        prompt: PROMPT, the question.
        workers: WORKERS, how many to start.
        keep: KEEP=1, stay until Ctrl-C.
        device: DEVICE, "auto", "cpu" or "cuda".
        model: MODEL, a directory; None: the demo's own.
        store: STORE, "valkey", "memory" or a redis:// URL.
        seed: SEED, of whatever is drawn.
        base_dir: PAGEWIRE_DIR, where everything that is made goes; one demo at a time in each.
    """

    prompt: str = DEFAULT_PROMPT
    workers: int = 1
    keep: bool = False
    device: str = "auto"
    model: Path | None = None
    store: str = "valkey"
    seed: int = 1
    base_dir: Path = ROOT / ".pagewire"

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Settings:
        """Read them; an empty variable counts as unset.

        Raises:
            ValueError: one is wrong; the message names it.
        """

        def get(name: str, default: str) -> str:
            return environ.get(name, "").strip() or default

        store = get("STORE", "valkey")
        if store not in ("valkey", "memory") and "://" not in store:
            raise ValueError(f"STORE must be valkey, memory or a redis:// URL, got {store!r}")
        model_text = get("MODEL", "")
        return cls(
            prompt=get("PROMPT", DEFAULT_PROMPT),
            workers=_number("WORKERS", get("WORKERS", "1"), least=1, most=64),
            keep=get("KEEP", "0").lower() in ("1", "true", "yes"),
            device=get("DEVICE", "auto"),
            model=_model_path(model_text) if model_text else None,
            store="memory://" if store == "memory" else store,
            seed=_number("SEED", get("SEED", "1"), least=0, most=2**63 - 1),
            base_dir=Path(get("PAGEWIRE_DIR", str(ROOT / ".pagewire"))).resolve(),
        )


def _number(name: str, text: str, *, least: int, most: int) -> int:
    if not text.isdecimal() or not least <= int(text) <= most:
        raise ValueError(f"{name} must be a number in {least}-{most}, got {text!r}")
    return int(text)


def _model_path(text: str) -> Path:
    # As typed, then as the planes read names; relative to where the caller stands.
    for path in (Path(text), ROOT / ".pagewire" / "models" / text):
        if (path / "config.json").is_file():
            return path.resolve()
    raise ValueError(
        f"MODEL={text} is neither a directory with a config.json nor a name in .pagewire/models"
    )


class Console:
    """Progress for people: one line per thing done, with the seconds since the start."""

    def __init__(self) -> None:
        self._started_at = time.monotonic()
        self._is_live = sys.stdout.isatty()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_at

    def say(self, what: str, detail: str = "") -> None:
        self._clear()
        print(f"{self.elapsed_s:6.1f} s  {what:<15} {detail}".rstrip(), flush=True)

    def write(self, text: str = "") -> None:
        self._clear()
        print(text, flush=True)

    @contextlib.asynccontextmanager
    async def busy(self, what: str | Callable[[], str]) -> AsyncGenerator[None]:
        """Show that something goes on, and for how long; on a terminal in place."""
        task = asyncio.create_task(self._tick(what))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._clear()

    async def _tick(self, what: str | Callable[[], str]) -> None:
        started_at = time.monotonic()
        while True:
            # Without a terminal every line stays, so there are fewer of them.
            await asyncio.sleep(0.2 if self._is_live else 5.0)
            now = what if isinstance(what, str) else what()
            line = f"{self.elapsed_s:6.1f} s  … {now} ({time.monotonic() - started_at:.0f} s)"
            if self._is_live:
                print(f"\r\x1b[2K{line}", end="", flush=True)
            else:
                print(line, flush=True)

    def _clear(self) -> None:
        if self._is_live:
            print("\r\x1b[2K", end="", flush=True)


class Session:
    """One run of a demo: its settings, its console, the lock of the checkout."""

    def __init__(self, settings: Settings, console: Console, run: RunDirectory) -> None:
        self.settings = settings
        self.console = console
        self.run = run

    @contextlib.asynccontextmanager
    async def stack(
        self, *, worker_args: tuple[str, ...] = (), control_plane_args: tuple[str, ...] = ()
    ) -> AsyncGenerator[ServingStack]:
        """Give a stack with a model that is there; nothing runs yet but the store."""
        settings = self.settings
        device = choose_device(settings.device)
        is_own_model = settings.model is None
        model_dir = settings.model or demo_model_dir(settings.base_dir / "models")
        if model_dir.name == DEMO_MODEL and device == "cpu":
            worker_args = (*_DEMO_MODEL_CPU_ARGS, *worker_args)
        config = StackConfig(
            root=ROOT,
            base_dir=settings.base_dir,
            model_dir=model_dir,
            model_name=model_dir.name,
            python=sys.executable,
            environment=os.environ,
            store=settings.store,
            device=device,
            worker_args=worker_args,
            control_plane_args=control_plane_args,
        )
        stack = ServingStack(config, registry=self.run)
        try:
            if is_own_model:
                await self._ensure_model(stack, model_dir)
            self.console.say("model", str(model_dir))
            await stack.start_store()
            self.console.say("store", stack.store_label)
            yield stack
        finally:
            async with self.console.busy("stopping"):
                await stack.aclose()
            self.console.say("stopped", "workers, control plane, store, in this order")

    async def _ensure_model(self, stack: ServingStack, model_dir: Path) -> None:
        if is_converted(model_dir):
            return
        async with self.console.busy(f"converting {model_dir.name}, once"):
            while not is_converted(model_dir):
                try:
                    with conversion_lock(model_dir.parent, wait_s=0):
                        if not is_converted(model_dir):
                            await stack.processes.run("convert", conversion_command(model_dir))
                except BlockingIOError:
                    # Somebody else converts it: tests, or a demo of another user.
                    await asyncio.sleep(0.2)


def run_demo(title: str, main: Callable[[Session], Awaitable[int]]) -> int:
    """Run a demo command under the checkout's lock; gives its exit code.

    1: something failed, and what it was is printed. 130: Ctrl-C.
    """
    console = Console()
    os.environ.setdefault("no_grpc_proxy", NO_GRPC_PROXY)
    try:
        settings = Settings.from_environment(os.environ)
        choose_device(settings.device)
        with RunDirectory(settings.base_dir / "run", command=title) as run:
            run.end_leftovers(lambda line: console.say("leftover", line))
            return asyncio.run(_run(main, Session(settings, console, run)))
    except (AlreadyRunningError, ValueError) as error:
        print(f"{title}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


async def _run(main: Callable[[Session], Awaitable[int]], session: Session) -> int:
    task = asyncio.ensure_future(main(session))
    interrupted: list[signal.Signals] = []

    def on_signal(number: signal.Signals) -> None:
        interrupted.append(number)
        if len(interrupted) == 1:
            session.console.write("\ninterrupted: stopping everything; again to kill at once")
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Handled by the loop, never in the middle of a statement: no child is ever lost.
        loop.add_signal_handler(number, on_signal, number)
    try:
        return await task
    except asyncio.CancelledError:
        return 128 + interrupted[0] if interrupted else 1
    except (PagewireError, ProcessDiedError, TimeoutError, OSError, RuntimeError) as error:
        session.console.write(f"\nfailed: {error}")
        return 1
