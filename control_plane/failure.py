"""The one way in which a broken invariant ends the process.

Owns the first such failure. Does not know what was broken.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from control_plane.errors import InvariantError, ServingError

if TYPE_CHECKING:
    from collections.abc import Generator


class Failure:
    """Remembers that this process contradicts itself, whoever's call it surfaced in."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._happened = asyncio.Event()

    def record(self, error: BaseException) -> None:
        """The process must end; the first cause is kept."""
        if self._error is None:
            self._error = error
            self._happened.set()

    @contextmanager
    def guard(self) -> Generator[None]:
        """Record a failure on its way to a caller that may answer only its own client.

        For steps that must not stop half-way: whatever interrupts one leaves requests nowhere.
        """
        try:
            yield
        except ServingError:
            raise
        except Exception as error:
            self.record(error)
            raise

    async def wait(self) -> NoReturn:
        """Wait for the failure.

        Raises:
            InvariantError: It happened; the cause is chained.
        """
        await self._happened.wait()
        raise InvariantError("the engine side of the control plane failed") from self._error
