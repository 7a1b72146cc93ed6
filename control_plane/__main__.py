"""`python -m control_plane`, also installed as `pagewire-control`.

Owns: the process: environment, signals, logging, exit codes (0 after SIGTERM, 1 after a broken
invariant, 2 for a start that cannot succeed). Does not know: anything that happens in between.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

from control_plane.config import parse_args
from control_plane.errors import InvariantError
from control_plane.port_options import raise_open_files
from protos.model_location import HubModel, fetch_model

if TYPE_CHECKING:
    from pathlib import Path

    from control_plane.config import ControlPlaneConfig
    from control_plane.model_catalog import ModelCatalog
    from protos.model_location import ModelLocation

logger = logging.getLogger("control_plane")

# Nearly everything dies by its reference count, while thousands of live requests come and go: the
# defaults walk what is young a hundred times a second, and what is alive every few seconds. So the
# collector looks seldom, at no more than 100 000 objects but in a full collection.
_GC_THRESHOLDS = (20_000, 5, 50)


def main(argv: list[str] | None = None) -> int:
    """Run until a signal; returns the exit code."""
    config = parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    # Without a file to read, SIGHUP keeps its usual meaning: the terminal is gone. While the model
    # loads there is nothing to read again.
    if config.security.has_files:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _set_up_logging(config.log_level)
    raise_open_files()
    _set_up_libraries(asks_hub=any(isinstance(m.location, HubModel) for m in config.models))
    # Not before: the tokenizer library takes a second to import, --help should not.
    try:
        import uvloop

        from control_plane.model_catalog import ModelCatalog, load_model
        from control_plane.server import PortTakenError
    except ModuleNotFoundError as error:
        print(
            f"pagewire-control: error: the package {error.name} is missing; a control plane needs "
            "pip install 'pagewire[control]'",
            file=sys.stderr,
        )
        return 2

    try:
        models = [(source.name, _fetch(source.location)) for source in config.models]
        catalog = ModelCatalog([load_model(path, name) for name, path in models])
        # What is there now stays: to walk it in every full collection would hold up all streams.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLDS)
        return uvloop.run(_run(config, catalog))
    except (PortTakenError, ValueError) as error:
        print(f"pagewire-control: error: {error}", file=sys.stderr)
        return 2
    except InvariantError as error:
        logger.critical("broken invariant: message=%s", error)
        return 1


def _leave(number: int, _: object) -> None:
    """Leave while the model is fetched or loaded: there is nothing to drain.

    Not by the default action, which process 1 of a container does not have, and not by an
    exception, which a download's threads would hold up.
    """
    logging.shutdown()
    os._exit(0 if number == signal.SIGTERM else 128 + number)


def _fetch(location: ModelLocation) -> Path:
    if isinstance(location, HubModel):
        logger.info("asking the hub: model=%s", location.repo_id)
    return fetch_model(location)


async def _run(config: ControlPlaneConfig, catalog: ModelCatalog) -> int:
    from control_plane.server import serve

    stop, cut, reread = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def on_signal(number: int) -> None:
        logger.info("signal: name=%s", signal.Signals(number).name)
        (cut if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    if config.security.has_files:
        loop.add_signal_handler(signal.SIGHUP, reread.set)
    await serve(
        config,
        catalog,
        stop=stop,
        cut=cut,
        reread=reread,
        on_listening=lambda line: print(line, flush=True),
    )
    return 0


_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}


class _OneLine(logging.Formatter):
    """A line stays one line: some of what is logged comes from peers, who could forge others."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base class's name
        return super().formatMessage(record).translate(_CONTROLS)


def _set_up_logging(level: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(
        _OneLine("%(asctime)s.%(msecs)03d %(levelname)s %(name)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler])


def _set_up_libraries(*, asks_hub: bool) -> None:
    # Makes transformers find no torch: this process needs none, and importing it costs seconds.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not asks_hub:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


if __name__ == "__main__":
    sys.exit(main())
