"""One process of `bench_first_token.py`: a plane that notes when a request passes it, or an echo.

    python tests/benchmarks/traced_process.py {control_plane|data_plane} FILE [FLAGS of the plane]
    python tests/benchmarks/traced_process.py echo

The planes are the real ones. A few of their methods are wrapped so that they note the time of the
monotonic clock, which all processes of a machine share; the notes are written at the end.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

ECHO_METHODS = ("Once", "PingPong")


def _is_plan(arguments: tuple[Any, ...]) -> bool:
    return arguments[1].HasField("plan")


def _is_result(arguments: tuple[Any, ...]) -> bool:
    return arguments[3].HasField("step_result")


def _has_tokens(arguments: tuple[Any, ...]) -> bool:
    return bool(getattr(arguments[1], "outputs", ()))


def _always(arguments: tuple[Any, ...]) -> bool:
    del arguments
    return True


@dataclass(frozen=True, slots=True)
class Point:
    """A place that a request passes.

    Attributes:
        name: Of the place.
        module: Where the class is.
        method: `Class.method`.
        is_end: Noted when the method returns instead of when it is called.
        counts: Which calls, by their arguments.
    """

    name: str
    module: str
    method: str
    is_end: bool = False
    counts: Callable[[tuple[Any, ...]], bool] = _always


# In the order in which a request passes them.
POINTS = {
    "control_plane": (
        Point("read", "control_plane.inference_service", "InferenceService._read", is_end=True),
        Point("built", "control_plane.request_builder", "RequestBuilder.build", is_end=True),
        Point("submitted", "control_plane.cluster", "Cluster.submit", is_end=True),
        Point("planned", "control_plane.worker_service", "_Stream.send", counts=_is_plan),
        Point("returned", "control_plane.fleet", "Fleet.receive", counts=_is_result),
        Point("answered", "control_plane.stream_writer", "StreamWriter.write", counts=_has_tokens),
    ),
    "data_plane": (
        Point("arrived", "data_plane.stream_protocol", "StreamProtocol.receive", counts=_is_plan),
        Point("applied", "data_plane.step_loop", "StepLoop.submit"),
        Point("launched", "data_plane.simulated_runner", "SimulatedRunner.launch", is_end=True),
        Point("computed", "data_plane.control_stream", "ControlStream._post_outcome"),
        Point("reported", "data_plane.stream_session", "StreamSession.take_outcome", is_end=True),
    ),
}


def install(points: tuple[Point, ...], note: Callable[[str], None]) -> None:
    """Wrap the methods of these points."""
    for point in points:
        class_name, _, method_name = point.method.partition(".")
        owner = getattr(importlib.import_module(point.module), class_name)
        setattr(owner, method_name, _wrapped(getattr(owner, method_name), point, note))


def _wrapped(method: Callable[..., Any], point: Point, note: Callable[[str], None]) -> Any:
    name, is_end, counts = point.name, point.is_end, point.counts

    @functools.wraps(method)
    async def awaited(*arguments: Any, **named: Any) -> Any:
        if not is_end and counts(arguments):
            note(name)
        result = await method(*arguments, **named)
        if is_end and counts(arguments):
            note(name)
        return result

    @functools.wraps(method)
    def called(*arguments: Any, **named: Any) -> Any:
        if not is_end and counts(arguments):
            note(name)
        result = method(*arguments, **named)
        if is_end and counts(arguments):
            note(name)
        return result

    return awaited if inspect.iscoroutinefunction(method) else called


def run_plane(plane: str, file: Path, flags: list[str]) -> int:
    """Run a plane to its end and write what was noted: [[nanoseconds, name], ...]."""
    notes: list[tuple[int, str]] = []
    # Imported only now: the control plane tells its libraries things before it imports them.
    main = importlib.import_module(f"{plane}.__main__").main
    install(POINTS[plane], lambda name: notes.append((time.monotonic_ns(), name)))
    try:
        return main(flags)
    finally:
        file.write_text(json.dumps(notes), encoding="ascii")


async def serve_echo() -> None:
    """What gRPC alone takes: a call that is answered once, and a stream that is answered always."""
    import grpc.aio

    async def once(_: Any, context: Any) -> None:
        await context.read()
        await context.write(b"answer")

    async def ping_pong(_: Any, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            await context.write(message)

    server = grpc.aio.server()
    handlers = {
        name: grpc.stream_stream_rpc_method_handler(behavior)
        for name, behavior in zip(ECHO_METHODS, (once, ping_pong), strict=True)
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Echo", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    if sys.argv[1] == "echo":
        import uvloop

        uvloop.run(serve_echo())
    else:
        sys.exit(run_plane(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
