"""Waiting for a condition instead of for a time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


async def until(condition: Callable[[], Awaitable[bool] | bool], *, limit_s: float = 60.0) -> None:
    """Return once the condition holds.

    Raises:
        TimeoutError: it does not within `limit_s`.
    """
    async with asyncio.timeout(limit_s):
        while True:
            answer = condition()
            if answer if isinstance(answer, bool) else await answer:
                return
            await asyncio.sleep(0.005)
