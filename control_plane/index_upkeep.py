"""What one replica's prefix index needs beside scheduling: its recovery, and audits while idle.

Both can take long for millions of blocks, so both are done in pieces of a few milliseconds.

Owns: what the store offers and when it is checked, the progress of an audit. Does not know:
streams, the store, clocks (time is an argument).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from control_plane.errors import InvariantError
from control_plane.index_recovery import PIECE, IndexRecovery

if TYPE_CHECKING:
    from collections.abc import Mapping

    from control_plane.engine_config import EngineConfig, EngineCounters
    from control_plane.request import BlockHash, BlockId, Version
    from control_plane.scheduler import Scheduler
    from protos.pagewire.v1 import worker_pb2

    Entries = Mapping[BlockId, tuple[BlockHash, Version]]

logger = logging.getLogger(__name__)


class IndexUpkeep:
    """Recovery and audits of one replica's index. Outlives a stream."""

    def __init__(
        self, scheduler: Scheduler, config: EngineConfig, counters: EngineCounters
    ) -> None:
        self._scheduler = scheduler
        self._pool = scheduler.kv_cache_manager.pool
        self._config = config
        self._counters = counters
        # What the store has to offer: None while that is unknown.
        self._stored: Entries | None = {}
        self._recovery: IndexRecovery | None = None
        self._last_audit = float("-inf")
        # The first block that the audit under way has not looked at.
        self._audited_to: int | None = None

    # Recovery.

    def begin(self, applied_version: int, *, hold_until: float) -> None:
        """A stream begins whose Welcome asks for Generations."""
        self._recovery = IndexRecovery(
            self._pool,
            applied_version=applied_version,
            hold_until=hold_until,
            stored=self._stored,
        )

    def end(self) -> None:
        """The stream ended, or asks for nothing: what was not checked stays unknown."""
        self._recovery = None

    @property
    def is_recovering(self) -> bool:
        """Generations were asked for and have not all arrived."""
        return self._recovery is not None and not self._recovery.is_complete

    @property
    def held_until(self) -> float:
        """Until when no plan is sent, because the index is not checked yet."""
        return float("-inf") if self._recovery is None else self._recovery.hold_until

    def end_hold(self) -> None:
        """Plans start now, whatever is missing. Idempotent."""
        if self._recovery is not None:
            self._recovery.end_hold()

    def expect_entries(self) -> None:
        """The store is being asked: `offer_entries` follows, late or empty-handed."""
        self._stored = None

    def offer_entries(self, stored: Entries) -> None:
        """What the store had. Taken over where the worker's generations agree."""
        self._stored = stored
        if self._recovery is not None:
            self._recovery.offer(stored)
            self.work()

    def take(self, generations: worker_pb2.Generations) -> None:
        """Read what the worker says of its blocks.

        Raises:
            ProtocolError: MALFORMED_MESSAGE.
        """
        if self._recovery is not None:
            self._recovery.take(generations)
            self.work()

    @property
    def has_work(self) -> bool:
        """Whether `work` has something to do."""
        return self._recovery is not None and self._recovery.has_work

    def work(self) -> None:
        """Check a piece of what the store offered."""
        recovery = self._recovery
        if recovery is None:
            return
        recovery.work(PIECE)
        if not recovery.is_settled:
            return
        self._recovery = None
        self._stored = {}
        self._counters.adopted_blocks += recovery.num_adopted
        self._counters.refused_entries += recovery.num_refused
        if recovery.num_adopted or recovery.num_refused:
            logger.info(
                "prefix index recovered: adopted=%d refused=%d",
                recovery.num_adopted,
                recovery.num_refused,
            )

    # Audits.

    @property
    def is_auditing(self) -> bool:
        """Whether an audit waits for the replica to be idle again, or for its next piece."""
        return self._audited_to is not None

    def audit_idle(self, now: float) -> None:
        """Check that nothing leaked: by count every time, block by block once in a while.

        Raises:
            InvariantError: Blocks are missing, or contradict each other.
        """
        scheduler = self._scheduler
        if scheduler.num_free_blocks != scheduler.num_usable_blocks:
            raise InvariantError(
                f"{scheduler.num_free_blocks} of {scheduler.num_usable_blocks} blocks are free "
                f"with nothing running"
            )
        if self._audited_to is None:
            if now - self._last_audit < self._config.audit_interval_s:
                return
            self._last_audit = now
            if self._pool.num_blocks <= PIECE:
                scheduler.audit()
                return
            self._audited_to = 1
        first, num_blocks = self._audited_to, self._pool.num_blocks
        end = min(first + PIECE, num_blocks)
        self._pool.audit_free(range(first, end))
        self._audited_to = end if end < num_blocks else None
