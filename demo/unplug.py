"""`make demo-unplug`: the same work over a 0 ms and a 20 ms link between worker and control plane.

What travels is measured, not assumed: bytes of plans, prompt tokens sent, tokens per second.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagewire_client import PagewireError

from demo.link import Link
from demo.session import Session, run_demo
from demo.workload import MAX_TOKENS, PROMPTS, StreamRecord, Workload, report_differences

if TYPE_CHECKING:
    from pagewire_client import AsyncClient

    from demo.stack import ServingStack
    from protos.pagewire.v1 import inference_pb2

_ROUND_TRIPS_MS = (0, 20)
_WORKER = "worker-0"


@dataclass(frozen=True, slots=True)
class _Run:
    """One pass over the prompts."""

    records: list[StreamRecord]
    seconds: float
    plans: int
    plan_bytes: int
    prompt_tokens_sent: int

    @property
    def prompt_tokens(self) -> int:
        return sum(record.usage.prompt_tokens for record in self.records if record.usage)

    @property
    def output_tokens(self) -> int:
        return sum(len(record.token_ids) for record in self.records)


async def unplug_demo(session: Session) -> int:
    """Run it; 0 if tokens agree and every prompt travelled once."""
    console = session.console
    async with session.stack() as stack, Link(stack.ports.worker) as link:
        stack.start_control_plane()
        stack.start_worker(_WORKER, control_plane_port=link.port)
        console.say("started", f"control-plane, {_WORKER} through a link on port {link.port}")
        async with console.busy("loading the model"):
            await stack.wait_until_ready(on_change=lambda seen: console.say("waiting", seen))
        runs: list[_Run] = []
        try:
            await stack.processes.guard(_measure(session, stack, link, runs))
        except* PagewireError as group:
            console.write(f"\nfailed: {group.exceptions[0]}")
    if len(runs) < len(_ROUND_TRIPS_MS):
        return 1
    console.write(_table(runs))
    differences = report_differences(
        runs[1].records, [record.token_ids for record in runs[0].records]
    )
    for difference in differences:
        console.write(f"different over the longer link: {difference}")
    sent_twice = [run for run in runs if run.prompt_tokens_sent != run.prompt_tokens]
    if sent_twice:
        console.write("prompt tokens sent differ from the prompts' tokens")
    elif not differences:
        console.write("Same tokens over both links, and no prompt was sent twice.")
    return 1 if differences or sent_twice else 0


async def _measure(session: Session, stack: ServingStack, link: Link, runs: list[_Run]) -> None:
    console = session.console
    async with stack.client() as client:
        # Outside the measurement: first use of anything is slower, batches of this size too.
        async with console.busy("warming up"):
            await Workload(client, cache_salt="warm up").run()
        for round_trip_ms in _ROUND_TRIPS_MS:
            link.set_round_trip(round_trip_ms / 1000)
            # A salt of its own: neither pass finds the other's blocks.
            workload = Workload(client, cache_salt=f"{round_trip_ms} ms")
            async with console.busy(f"{len(PROMPTS)} streams over {round_trip_ms} ms"):
                before = await _replica(client)
                started_at = time.monotonic()
                await workload.run()
                seconds = time.monotonic() - started_at
                after = await _replica(client)
            runs.append(
                _Run(
                    workload.records,
                    seconds,
                    after.plans_sent - before.plans_sent,
                    after.plan_bytes - before.plan_bytes,
                    after.prompt_tokens_sent - before.prompt_tokens_sent,
                )
            )
            console.say(f"{round_trip_ms} ms link", f"{seconds:.1f} s")


async def _replica(client: AsyncClient) -> inference_pb2.ReplicaStats:
    stats = await client.stats()
    return stats.replicas[0]


def _table(runs: list[_Run]) -> str:
    rows: list[tuple[str, list[str]]] = [
        ("round trip", [f"{ms} ms" for ms in _ROUND_TRIPS_MS]),
        ("output tokens/s", [f"{run.output_tokens / run.seconds:.1f}" for run in runs]),
        ("plans (steps)", [str(run.plans) for run in runs]),
        ("plan bytes per step", [f"{run.plan_bytes / max(run.plans, 1):.0f}" for run in runs]),
        ("prompt tokens", [str(run.prompt_tokens) for run in runs]),
        ("prompt tokens sent", [str(run.prompt_tokens_sent) for run in runs]),
    ]
    head = f"\n{len(PROMPTS)} streams of {MAX_TOKENS} tokens, greedy:\n\n"
    return head + "".join(
        f"{name:<22}" + "".join(f"{cell:>12}" for cell in cells) + "\n" for name, cells in rows
    )


def main() -> int:
    return run_demo("make demo-unplug", unplug_demo)


if __name__ == "__main__":
    sys.exit(main())
