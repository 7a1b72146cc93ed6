"""`make demo-kill SEED=1`: one of two workers dies under load, and nobody notices.

Eight streams run over two workers. Once each has some tokens, one worker that holds streams is
ended with SIGKILL. Every stream must go on and end with exactly the tokens of transformers.
"""

from __future__ import annotations

import asyncio
import random
import sys
from typing import TYPE_CHECKING

from pagewire_client import PagewireError

from demo.session import Session, run_demo
from demo.workload import MAX_TOKENS, PROMPTS, Workload, reference, report_differences

if TYPE_CHECKING:
    from pagewire_client import AsyncClient

    from demo.stack import ServingStack

_WORKERS = ("worker-0", "worker-1")
_LEAST_TOKENS = 8


async def kill_demo(session: Session) -> int:
    """Run it; 0 if all streams equal transformers."""
    console, draw = session.console, random.Random(session.settings.seed)
    async with session.stack() as stack:
        expected = await reference(session, stack)
        stack.start_control_plane()
        for worker_id in _WORKERS:
            stack.start_worker(worker_id)
        console.say("started", "control-plane, " + ", ".join(_WORKERS))
        async with console.busy("loading the model twice"):
            await stack.wait_until_ready(
                len(_WORKERS), on_change=lambda seen: console.say("waiting", seen)
            )
        try:
            return await stack.processes.guard(_serve_and_kill(session, stack, expected, draw))
        except* PagewireError as group:
            console.write(f"\nfailed: {group.exceptions[0]}")
    return 1


async def _serve_and_kill(
    session: Session, stack: ServingStack, expected: list[list[int]], draw: random.Random
) -> int:
    console = session.console
    async with stack.client() as client:
        workload = Workload(client)
        running = asyncio.ensure_future(workload.run())
        try:
            kill_at = draw.randint(_LEAST_TOKENS, MAX_TOKENS // 2)
            async with console.busy(f"{len(PROMPTS)} streams of {MAX_TOKENS} tokens"):
                waiting = asyncio.ensure_future(workload.wait_for_tokens(kill_at))
                await asyncio.wait([waiting, running], return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                loads = await _streams_by_worker(client)
                busy = [worker_id for worker_id in _WORKERS if loads.get(worker_id)]
                if running.done() or not busy:
                    await running
                    raise RuntimeError("the streams ended before a worker could be killed")
                victim = draw.choice(busy)
                stack.workers[victim].kill()
                had = [len(record.token_ids) for record in workload.records]
                console.say(
                    "SIGKILL",
                    f"{victim} with {loads[victim]} of {len(PROMPTS)} streams, which have "
                    f"{min(had)} to {max(had)} tokens",
                )
                await running
            stats = await client.stats()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    differences = report_differences(workload.records, expected)
    equal = len(PROMPTS) - len(differences)
    gap_s = max(record.longest_gap_s for record in workload.records)
    replayed = sum(replica.replayed_tokens for replica in stats.replicas)
    replays = sum(record.usage.replays for record in workload.records if record.usage)
    console.write(
        f"\n{equal}/{len(PROMPTS)} streams equal to transformers, token by token\n"
        f"{replays} streams replayed, {replayed} tokens computed again\n"
        f"longest gap between two tokens of a stream: {gap_s:.2f} s\n"
    )
    for difference in differences:
        console.write(f"different: {difference}")
    return 1 if differences else 0


def main() -> int:
    return run_demo("make demo-kill", kill_demo)


async def _streams_by_worker(client: AsyncClient) -> dict[str, int]:
    stats = await client.stats()
    return {
        worker.worker_id: replica.num_requests_running
        for replica in stats.replicas
        for worker in replica.workers
    }


if __name__ == "__main__":
    sys.exit(main())
