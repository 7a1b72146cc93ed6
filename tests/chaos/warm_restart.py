"""What kill -9 of the control plane costs: hits of a shared prefix, and time to the next token.

Owns the measurement. Does not know faults; the system is whole and idle.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagewire_client import AsyncClient, UnavailableError

if TYPE_CHECKING:
    from chaos.chaos_system import ChaosSystem
    from pagewire_client import Completion

PREFIX = [4 + i * 7919 % 390 for i in range(2000)]
_POLL_S = 0.02
_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmRestart:
    """The figures. Times in seconds since the new process was started.

    Attributes:
        hits_before: Tokens of the prefix that were cached, just before the kill.
        hits_after: Likewise of the first request afterwards.
        listening_s: Until it listened: interpreter, tokenizer, ports.
        first_token_s: Until a client had a token.
        is_same: Whether both requests gave the same tokens.
    """

    hits_before: int
    hits_after: int
    listening_s: float
    first_token_s: float
    is_same: bool


async def measure_warm_restart(system: ChaosSystem) -> WarmRestart:
    """Warm a prefix up, kill the control plane, ask again.

    Raises:
        TimeoutError: It did not come back.
    """
    async with AsyncClient(system.stack.address) as client, asyncio.timeout(_LIMIT_S):
        await _ask(client)
        before = await _ask(client)
        await _wait_until_stored(system)
    process = system.control_plane
    assert process is not None
    process.kill()
    await process.wait()
    await system.forget(process)
    started_at = time.monotonic()
    system.start_control_plane(forks=False)
    process = system.control_plane
    assert process is not None
    async with asyncio.timeout(_LIMIT_S):
        while "public=" not in process.log_tail():  # noqa: ASYNC110 - another process's log
            await asyncio.sleep(_POLL_S)
        listening_s = time.monotonic() - started_at
        async with AsyncClient(system.stack.address) as client:
            while True:
                generation = client.generate([*PREFIX, 5], temperature=0.0, max_tokens=4)
                first_token_s = 0.0
                try:
                    async for _ in generation:
                        first_token_s = first_token_s or time.monotonic() - started_at
                    break
                except UnavailableError:
                    await asyncio.sleep(_POLL_S)
    after = generation.log.completion()
    return WarmRestart(
        hits_before=before.usage.cached_tokens,
        hits_after=after.usage.cached_tokens,
        listening_s=listening_s,
        first_token_s=first_token_s,
        is_same=before.token_ids == after.token_ids,
    )


async def _ask(client: AsyncClient) -> Completion:
    return await client.complete([*PREFIX, 5], temperature=0.0, max_tokens=4)


async def _wait_until_stored(system: ChaosSystem) -> None:
    """The store is written behind: wait until it has what the control plane has."""
    async with AsyncClient(system.stack.address) as client, system.store.admin() as store:
        while True:
            stats = await client.stats()
            missing = 0
            for replica in stats.replicas:
                keys = await store.keys(f"pagewire:1:blocks:*{replica.replica_epoch}")
                stored = await store.hlen(keys[0]) - 1 if keys else 0
                # A removed entry is removed there too, later.
                missing += replica.workers != [] and stored < replica.cached_blocks
            if not missing:
                return
            await asyncio.sleep(_POLL_S)
