"""`python -m data_plane`, also installed as `pagewire-worker`.

Owns: the process: environment, signals, logging, exit codes (see --help). Does not know: anything
that happens in between.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, TypeVar

from data_plane.config import parse_args, read_token

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from data_plane.config import WorkerConfig
    from data_plane.control_stream import StreamOptions
    from data_plane.simulated_worker import SimulatedWorker
    from data_plane.worker import Worker
    from protos.tls_files import TlsContents

_T = TypeVar("_T")

logger = logging.getLogger("data_plane")

EXIT_CANNOT_START = 2

# A step can take less than a millisecond; Python's default would let another thread hold the
# interpreter for five while the launch thread waits for it.
_SWITCH_INTERVAL_S = 2e-4


def main(argv: list[str] | None = None) -> int:
    """Run until drained or refused; returns the exit code."""
    config = parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    # It asks a control plane to read its files again; a worker reads its own whenever it dials.
    if config.tls is not None or config.token_file is not None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    logging.basicConfig(
        level=config.log_level.upper(),
        format="%(asctime)s.%(msecs)03d %(levelname)s %(name)s %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
    )
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    # Before torch is imported: its pools take their size for every thread from here.
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(config.threads)
    # Not before: importing torch takes seconds, --help should not.
    try:
        from data_plane.control_stream import StreamOptions
        from data_plane.step_work import StepError

        build = _builder(config)
    except ModuleNotFoundError as error:
        print(
            f"pagewire-worker: error: the package {error.name} is missing; a worker needs "
            f"pip install 'pagewire[{'control' if config.simulate else 'worker'}]'",
            file=sys.stderr,
        )
        return EXIT_CANNOT_START

    try:
        tls, token = _read_secrets(config)
        options = StreamOptions(
            address=config.control_plane,
            tls=tls,
            token=token,
            reread=lambda: _read_secrets(config),
            grace_s=config.grace_s,
        )
        workers = build()
    except (ValueError, OSError, StepError) as error:
        print(f"pagewire-worker: error: {error}", file=sys.stderr)
        return EXIT_CANNOT_START
    # The model and its libraries stay: no collection has to walk them while steps are launched.
    gc.collect()
    gc.freeze()
    exit_code, has_hung_step = run_on_loop(_run(options, workers))
    if config.simulate:
        from data_plane.simulated_worker import log_counters

        log_counters(workers)
    if has_hung_step:
        # A device call that never returns would keep the interpreter from shutting down.
        logging.shutdown()
        os._exit(exit_code)
    return exit_code


def _read_secrets(config: WorkerConfig) -> tuple[TlsContents | None, str | None]:
    tls = config.tls and config.tls.read()
    return tls, config.token_file and read_token(config.token_file)


def _builder(config: WorkerConfig) -> Callable[[], Sequence[Worker | SimulatedWorker]]:
    """What makes the process's workers; importing torch only where it is used."""
    if config.simulate is not None:
        from data_plane.simulated_worker import build_simulated_workers

        return lambda: build_simulated_workers(config)
    from data_plane.worker import build_worker

    return lambda: [build_worker(config)]


def _leave(number: int, _: object) -> None:
    """Leave while the model is fetched or loaded: there is nothing to drain.

    Not by the default action, which process 1 of a container does not have, and not by an
    exception, which a download's threads would hold up.
    """
    logging.shutdown()
    os._exit(0 if number == signal.SIGTERM else 128 + number)


def run_on_loop(work: Coroutine[Any, Any, _T]) -> _T:
    """Run on a loop that holds the interpreter for less per message, where one is installed.

    While a message is read or written, steps are not launched.
    """
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.run(work)
    return uvloop.run(work)


async def _run(
    options: StreamOptions, workers: Sequence[Worker | SimulatedWorker]
) -> tuple[int, bool]:
    """Serve until every worker has left; the first exit code that is not 0, and if one hangs."""
    from data_plane.control_stream import ControlStream

    streams = [
        ControlStream(options, protocol=worker.protocol, runner=worker.runner) for worker in workers
    ]
    signalled = False

    def on_signal(number: int) -> None:
        nonlocal signalled
        logger.info("signal: name=%s", signal.Signals(number).name)
        if signalled:
            logging.shutdown()
            os._exit(128 + number)
        signalled = True
        for stream in streams:
            stream.begin_drain()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    for worker in workers:
        worker_id = worker.protocol.identity.worker_id
        logger.info("dialling: worker=%s address=%s", worker_id, options.address)
    exit_codes = await asyncio.gather(*(stream.run() for stream in streams))
    return next(filter(None, exit_codes), 0), any(stream.has_hung_step for stream in streams)


if __name__ == "__main__":
    sys.exit(main())
