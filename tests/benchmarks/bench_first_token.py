"""`make bench-first-token`: where the time to a lone request's first token goes, without a GPU.

    python tests/benchmarks/bench_first_token.py [--prompts 128 ...] [--rounds 60] [--profile 8ms]

A control plane and a simulated worker as processes (`traced_process.py`), this one as their
client, nothing else running: one request at a time over Generate, a pause after each. Every hop is
the median over the rounds of what one clock of the machine showed at both of its ends. Beside it,
in the same rounds, what gRPC alone takes: a call with one answer, and one message each way on an
open stream.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import grpc.aio
from bench_end_to_end import DEMO_MODEL, TOKENIZER_FILES, write_model
from bench_fleet import machine
from bench_fleet_stack import ROOT
from pagewire_client.bench.processes import run_on_loop
from pagewire_client.options import channel_options
from traced_process import ECHO_METHODS

from demo.stack import ServingStack, StackConfig
from protos.pagewire.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

MODEL = "qwen3-0.6b"
GENERATE = "/pagewire.v1.InferenceService/Generate"
TRACED = str(Path(__file__).resolve().parent / "traced_process.py")
WARM_UP_ROUNDS = 5
WORDS = ("time", "people", "water", "house", "light", "music", "paper", "green", "river", "stone")

DEVICE = "computed"
# What a request passes, in this order, and what lies between the place before and this one.
HOPS = (
    ("read", "client -> control plane, message read"),
    ("built", "checked, tokenized"),
    ("submitted", "hashed, placed"),
    ("planned", "head of the answer written, step scheduled, plan made"),
    ("arrived", "control plane -> worker"),
    ("applied", "plan checked and applied"),
    ("launched", "handed to the launch thread, launched"),
    (DEVICE, "the device's time, its result noticed"),
    ("reported", "handed to the event loop, result made"),
    ("returned", "worker -> control plane"),
    ("answered", "result applied, token made text"),
    ("first", "control plane -> client"),
)

Times = dict[str, int]


class Kind:
    """One kind of request.

    Attributes:
        times: Per request, nanoseconds on the monotonic clock by name of the place.
    """

    def __init__(self, num_tokens: int, max_tokens: int, *, is_text: bool) -> None:
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens
        self.is_text = is_text
        self.times: list[Times] = []

    @property
    def name(self) -> str:
        return f"{self.num_tokens} {'text' if self.is_text else 'ids'}, {self.max_tokens} out"

    def message(self, rng: random.Random) -> bytes:
        # A salt of its own: no prompt is cached.
        request = inference_pb2.GenerateRequest(cache_salt=f"{rng.random()}")
        if self.is_text:
            request.text = " ".join(rng.choice(WORDS) for _ in range(self.num_tokens))
        else:
            request.token_ids.ids.extend(
                rng.randrange(1000, 40_000) for _ in range(self.num_tokens)
            )
        request.sampling.max_tokens = self.max_tokens
        request.sampling.temperature = 0.0
        request.sampling.ignore_eos = True
        return request.SerializeToString()


async def send(generate: Any, message: bytes) -> Times:
    """When a request was sent, and its first token and its end came."""
    times = {"sent": time.monotonic_ns()}
    async for response in generate(message):
        if any(output.token_ids for output in response.outputs):
            times.setdefault("first", time.monotonic_ns())
    times["end"] = time.monotonic_ns()
    return times


class Echo:
    """A process that does nothing but gRPC.

    Attributes:
        once_ms: Calls with one answer.
        ping_pong_ms: A message each way on an open stream.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        once, ping_pong = (f"/Echo/{name}" for name in ECHO_METHODS)
        self._once: Any = channel.unary_stream(once)
        stream: Any = channel.stream_stream(ping_pong)
        self._stream = stream()
        self.once_ms: list[float] = []
        self.ping_pong_ms: list[float] = []

    async def measure(self, pause_s: float) -> None:
        began_s = time.perf_counter()
        call = self._once(bytes(300))
        await call.read()
        self.once_ms.append((time.perf_counter() - began_s) * 1e3)
        call.cancel()
        await asyncio.sleep(pause_s)
        began_s = time.perf_counter()
        await self._stream.write(bytes(600))
        await self._stream.read()
        self.ping_pong_ms.append((time.perf_counter() - began_s) * 1e3)
        await asyncio.sleep(pause_s)

    def close(self) -> None:
        self._stream.cancel()


@contextlib.asynccontextmanager
async def echo_process() -> AsyncIterator[str]:
    """The address of one."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, TRACED, "echo", stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        yield f"127.0.0.1:{int(await process.stdout.readline())}"
    finally:
        process.terminate()
        await process.wait()


async def measure(options: argparse.Namespace, kinds: list[Kind]) -> Echo:
    """Fill in the times of `kinds`."""
    async with contextlib.AsyncExitStack() as exits:
        root = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="pagewire-bench-")))
        model = write_model(MODEL, root / "models", options.tokenizer)
        stack = await exits.enter_async_context(
            ServingStack(
                StackConfig(
                    root=ROOT,
                    base_dir=root,
                    model_dir=model,
                    model_name=MODEL,
                    python=sys.executable,
                    environment=dict(os.environ),
                    store="memory://",
                    random_ports=True,
                )
            )
        )
        ports, files = stack.ports, (root / "control_plane.json", root / "data_plane.json")
        flags = (
            (
                *("--port", ports.public, "--worker-port", ports.worker),
                *("--metrics-port", ports.metrics, "--redis-url", "memory://"),
            ),
            ("--control-plane", f"127.0.0.1:{ports.worker}", "--simulate", options.profile),
        )
        planes = [
            stack.processes.start(
                file.stem,
                [
                    *(sys.executable, TRACED, file.stem, str(file), "--model", str(model)),
                    *("--log-level", "warning", *map(str, own)),
                ],
            )
            for file, own in zip(files, flags, strict=True)
        ]
        await stack.wait_until_ready(timeout_s=300.0)
        echo_address = await exits.enter_async_context(echo_process())
        channels = [
            await exits.enter_async_context(
                grpc.aio.insecure_channel(address, options=channel_options(address))
            )
            for address in (stack.address, echo_address)
        ]
        generate: Any = channels[0].unary_stream(
            GENERATE, response_deserializer=inference_pb2.GenerateResponse.FromString
        )
        echo = Echo(channels[1])
        pause_s = options.pause_ms / 1e3
        for number in range(WARM_UP_ROUNDS + options.rounds):
            rng = random.Random(number)
            for kind in kinds:
                kind.times.append(await send(generate, kind.message(rng)))
                await asyncio.sleep(pause_s)
            await echo.measure(pause_s)
        echo.close()
        for plane in reversed(planes):
            await stack.processes.stop(plane)
        notes = [note for file in files for note in json.loads(file.read_text())]
        for kind in kinds:
            kind.times = [with_notes(times, notes) for times in kind.times[WARM_UP_ROUNDS:]]
        return echo


def with_notes(times: Times, notes: list[list[Any]]) -> Times:
    """The first time at which a request passed each place; no other one was under way."""
    found = dict(times)
    for at_ns, name in sorted(notes):
        if times["sent"] <= at_ns <= times["end"]:
            found.setdefault(name, at_ns)
    return found


def hops_ms(times: list[Times]) -> list[float]:
    """Median of each of `HOPS`."""
    places = ["sent", *(name for name, _ in HOPS)]
    return [
        statistics.median((one[there] - one[here]) / 1e6 for one in times)
        for here, there in itertools.pairwise(places)
    ]


def total_ms(times: list[Times]) -> float:
    """Median time to the first token."""
    return statistics.median((one["first"] - one["sent"]) / 1e6 for one in times)


def added_ms(times: list[Times]) -> float:
    """Median of that time without the device's."""
    places = [name for name, _ in HOPS]
    before = places[places.index(DEVICE) - 1]
    return statistics.median(
        (one["first"] - one["sent"] - one[DEVICE] + one[before]) / 1e6 for one in times
    )


def report(kinds: list[Kind], echo: Echo) -> None:
    columns = [hops_ms(kind.times) for kind in kinds]
    print("| ms | " + " | ".join(kind.name for kind in kinds) + " |")
    print("|---|" + "---|" * len(kinds))
    for row, (_, what) in enumerate(HOPS):
        print(f"| {what} | " + " | ".join(f"{column[row]:.2f}" for column in columns) + " |")
    print("| first token | " + " | ".join(f"{total_ms(kind.times):.2f}" for kind in kinds) + " |")
    print("| without the device | " + " | ".join(f"{added_ms(k.times):.2f}" for k in kinds) + " |")
    call_ms, ping_pong_ms = map(
        statistics.median, (echo.once_ms[WARM_UP_ROUNDS:], echo.ping_pong_ms[WARM_UP_ROUNDS:])
    )
    print(
        f"\ngRPC alone: a call with one answer {call_ms:.2f} ms, a message each way on an open "
        f"stream {ping_pong_ms:.2f} ms"
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, nargs="+", default=[128, 1024, 8192])
    parser.add_argument("--forms", nargs="+", choices=("ids", "text"), default=["ids", "text"])
    parser.add_argument("--outputs", type=int, nargs="+", default=[1, 32], help="max_tokens")
    parser.add_argument("--profile", default="3ms", help="of --simulate: the time of a step")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--pause-ms", type=float, default=20.0, help="after each request")
    parser.add_argument("--tokenizer", type=Path, default=DEMO_MODEL, metavar="DIR")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args(argv)
    if not (options.tokenizer / TOKENIZER_FILES[0]).is_file():
        parser.error(f"no tokenizer in {options.tokenizer}: run `make demo` once, or --tokenizer")
    about = machine()
    print(" ".join(f"{key}={value}" for key, value in about.items()))
    kinds = [
        Kind(length, max_tokens, is_text=form == "text")
        for max_tokens in options.outputs
        for length in options.prompts
        for form in options.forms
    ]
    echo = run_on_loop(measure(options, kinds))  # type: ignore[arg-type]
    report(kinds, echo)
    if options.json:
        rows = [
            {"kind": kind.name, "first_ms": total_ms(kind.times), "hops_ms": hops_ms(kind.times)}
            for kind in kinds
        ]
        options.json.write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
