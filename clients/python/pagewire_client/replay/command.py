"""The command `pagewire replay`: flags, the worker it starts, what people see.

Owns: that. Does not know: how a replay works.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pagewire_client.replay.comparison import worker_flags
from pagewire_client.replay.player import Player, Summary
from pagewire_client.replay.recording import Recording, open_recording
from pagewire_client.replay.worker_port import WorkerGoneError, WorkerPort, WorkerProcess
from protos.recording_file import RecordingError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from pagewire_client.replay.worker_port import Link

TEXT = "Run a recorded control stream on a CPU worker and compare every result."
DESCRIPTION = f"""\
{TEXT}

RECORDING is a DIR of `pagewire-control --record DIR`, or a replica's directory or one file in it.
With --model a worker is started, which needs pip install 'pagewire[worker]' and a copy of the model
that was served; without it the command line of one is printed and waited for. The worker gets the
recorded plans, as far ahead of results as they were sent then, and every token, count and finish
reason is compared; times are not.

What was cached or running when the recording begins (its oldest part may be gone) is computed anew
from the tokens in it. On another device than the recorded one rounding differs, which decides where
two tokens are about equally likely: a difference in bfloat16 between a GPU and a CPU means nothing
by itself.

Exit codes: 0 no difference, 1 a difference (the first is shown), 2 it cannot be replayed.
"""

_PROGRESS_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    parser.add_argument("recording", metavar="RECORDING", type=Path, help="a directory or a file")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="start a worker with this model: what its --model takes",
    )
    parser.add_argument(
        "--worker-command",
        metavar="COMMAND",
        help="what starts it, its other flags included (default: this Python with -m data_plane)",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=0,
        metavar="PORT",
        help="where a worker finds the replay, on loopback (default: a free one)",
    )
    parser.add_argument(
        "--step-timeout-s",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="longest time of one step (default: %(default)g)",
    )
    parser.add_argument("--quiet", action="store_true", help="show the result only")


def main(args: argparse.Namespace) -> int:
    """Run it; returns the exit code."""
    try:
        if not 0 <= args.port <= 65535:
            raise RecordingError(f"--port must be in [0, 65535], got {args.port}")
        if not args.step_timeout_s > 0:
            raise RecordingError(f"--step-timeout-s must be positive, got {args.step_timeout_s}")
        summary = asyncio.run(_replay(args))
    except (RecordingError, WorkerGoneError) as error:
        print(f"pagewire: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    print(_describe(summary))
    return 0 if summary.difference is None else 1


async def _replay(args: argparse.Namespace) -> Summary:
    recording = open_recording(args.recording)
    say = _silent if args.quiet else _say
    for line in _introduce(recording):
        say(line)
    flags = worker_flags(recording.runs[0].header.hello)
    async with contextlib.AsyncExitStack() as stack:
        port = await stack.enter_async_context(WorkerPort(args.port))
        process: WorkerProcess | None = None
        if args.model is not None:
            command = args.worker_command or shlex.join([sys.executable, "-m", "data_plane"])
            flags = ["--model", args.model, "--control-plane", port.address, *flags]
            process = await stack.enter_async_context(WorkerProcess(command, flags))
            say("starting a worker ...")
        else:
            line = ["pagewire-worker", "--model", "MODEL", "--control-plane", port.address, *flags]
            say(f"waiting for a worker; start one with a copy of the model:\n  {shlex.join(line)}")
        player = Player(
            recording, port, step_timeout_s=args.step_timeout_s, progress=_Progress(say)
        )
        return await _play_or_die(player, process)


async def _play_or_die(player: Player, process: WorkerProcess | None) -> Summary:
    playing = asyncio.create_task(player.play())
    dying = asyncio.create_task(process.gone()) if process is not None else None
    try:
        await asyncio.wait(
            [playing] if dying is None else [playing, dying], return_when=asyncio.FIRST_COMPLETED
        )
        if playing.done():
            try:
                return playing.result()
            except WorkerGoneError:
                # Its own words say more than that its stream broke.
                if dying is not None:
                    await asyncio.wait([dying], timeout=1.0)
                    if dying.done() and not _was_refused(player.last_link):
                        raise dying.result() from None
                raise
        assert dying is not None
        raise dying.result()
    finally:
        for task in (playing, dying):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


def _was_refused(link: Link | None) -> bool:
    return link is not None and link.end_status is not None


def _introduce(recording: Recording) -> list[str]:
    header = recording.header
    hello = header.hello
    num_segments = sum(len(run.segments) for run in recording.runs)
    size = sum(s.path.stat().st_size for run in recording.runs for s in run.segments)
    started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(_seconds(header.started_at_ms)))
    lines = [
        f"recording of replica {header.replica_id}, model {header.model}, deployment "
        f"{header.deployment}, pagewire {header.pagewire_version}, begun {started}",
        f"  files: {num_segments}, {_size(size)}; {hello.backend} on {hello.device}, "
        f"{hello.kv_geometry.dtype}, {hello.num_blocks} blocks of {hello.kv_geometry.block_size}",
    ]
    for number, run in enumerate(recording.runs):
        part = f"  part {number + 1} of {len(recording.runs)}"
        lines.extend(f"{part}: {note}" for note in run.notes)
    return [_printable(line) for line in lines]


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1_000_000 else f"{num_bytes / 1e3:.1f} kB"


def _seconds(milliseconds: int) -> float:
    # What a clock can show, whatever a file says.
    return min(max(milliseconds, 0), 253402300799000) / 1000


def _describe(summary: Summary) -> str:
    lines = [] if summary.difference is None else [_printable(str(summary.difference))]
    verdict = "no difference" if summary.difference is None else "replayed up to there"
    streams = f", {summary.num_streams} streams" if summary.num_streams > 1 else ""
    lines.append(
        f"{verdict}: {summary.num_plans} plans, {summary.num_results} steps and "
        f"{summary.num_tokens} tokens compared in {summary.seconds:.1f} s{streams}"
    )
    if summary.num_restored_rows or summary.num_restored_blocks:
        lines.append(
            f"  computed anew from before the recording: {summary.num_restored_rows} sequences, "
            f"{summary.num_restored_blocks} cached blocks"
        )
    lines += [f"  note: {_printable(note)}" for note in summary.notes[:20]]
    return "\n".join(lines)


def _printable(text: str) -> str:
    """What a file says must not steer a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


class _Progress:
    """A line every few seconds."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._next_s = time.monotonic() + _PROGRESS_S

    def __call__(self, summary: Summary, num_plans: int) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + _PROGRESS_S
        share = summary.num_plans / max(1, num_plans)
        self._say(f"  {summary.num_plans} of {num_plans} plans ({share:.0%}), no difference yet")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _silent(line: str) -> None:
    del line
