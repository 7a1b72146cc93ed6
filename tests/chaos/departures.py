"""What is still computed for clients that have left.

Owns: the measurement, of streams and of batches. Does not know faults; the system is whole and
idle.

That everything is free in the end says little of a client that left: what nobody ended is free too,
once it has come to its own end. So tokens are counted.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chaos.chaos_system import holds_nothing
from pagewire_client import AsyncClient, build_request

if TYPE_CHECKING:
    from chaos.chaos_system import ChaosSystem

_NUM_REQUESTS = 4
_NUM_TOKENS = 1500
_POLL_S = 0.02
_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Departures:
    """Tokens of requests whose client left at the first ones.

    Attributes:
        asked: By the streams; as many by the batch.
        of_streams: Computed for them until nothing was held any more.
        of_batch: Likewise.
    """

    asked: int
    of_streams: int
    of_batch: int

    @property
    def were_noticed(self) -> bool:
        return max(self.of_streams, self.of_batch) < self.asked


async def measure_departures(system: ChaosSystem) -> Departures:
    """Begin long requests and leave them.

    Raises:
        TimeoutError: What they held is not free again.
    """
    options: Any = {"temperature": 0.0, "max_tokens": _NUM_TOKENS, "ignore_eos": True}
    prompts = [[5, 6, 7 + i] for i in range(_NUM_REQUESTS)]
    async with AsyncClient(system.stack.address) as client, asyncio.timeout(_LIMIT_S):

        async def leave_stream(prompt: list[int]) -> None:
            async with client.generate(prompt, **options) as generation:
                async for _ in generation:
                    return

        before = await _computed(client)
        await asyncio.gather(*(leave_stream(prompt) for prompt in prompts))
        between = await _computed(client)
        short = build_request([5], {"temperature": 0.0, "max_tokens": 1})
        async with client.batch([short, *(build_request(p, options) for p in prompts)]) as batch:
            await anext(batch)
        after = await _computed(client)
    return Departures(
        asked=_NUM_REQUESTS * _NUM_TOKENS,
        of_streams=between - before,
        # Less the one of who was answered.
        of_batch=after - between - 1,
    )


async def _computed(client: AsyncClient) -> int:
    """Output tokens of all replicas, once nothing runs, waits or holds a block."""
    while True:
        stats = await client.stats()
        if holds_nothing(stats):
            return sum(replica.generation_tokens for replica in stats.replicas)
        await asyncio.sleep(_POLL_S)
