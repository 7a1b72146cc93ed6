"""Whether requests are placed yet, in a control plane that has taken over.

Workers come back from the one before it within about a second, in any order. A request that is
placed on whoever is first misses the prefix that another one has. So requests wait, once, until the
replicas that the store knows are back, or for a moment that is longer than it takes them.

Owns: when that is over. Does not know: requests, streams, how a replica is built.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING

from control_plane.replica import possible_fingerprints
from control_plane.wake_timer import WakeTimer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Set

    from control_plane.cluster_config import ClusterConfig
    from control_plane.prefix_store import PrefixStore
    from control_plane.served_model import ServedModel

logger = logging.getLogger(__name__)

# How often a store that does not answer is asked again, and for how long: nobody waits for it.
_ASK_PAUSE_S = 0.2
_ASK_LIMIT_S = 60.0
# Most often a worker's message or the store's answer ends a wait, and is told; but a large index is
# checked in pieces afterwards. Looking is cheap, and soon over.
_LOOK_INTERVAL_S = 0.01


class Comeback:
    """Of one model's replicas, known by their epochs. Pure: time is an argument.

    It begins with the first Hello of a worker. From the first one that has served before, placement
    is held until every known replica is back; it is over then, or `wait_s` after the beginning, and
    never begins again. Without a worker that has served, nothing is held: a cold start.

    Attributes:
        missing: Known replicas that are not back.
        held_since: None: nothing was held.
        is_over: Nothing will be held any more.
    """

    def __init__(self, wait_s: float) -> None:
        """Nothing is known yet."""
        self.missing: Set[bytes] | None = None
        self.held_since: float | None = None
        self.is_over = not wait_s
        self._wait_s = wait_s
        self._back: set[bytes] = set()
        self._ends_at = math.inf

    @property
    def holds(self) -> bool:
        """Whether requests are not placed now."""
        return self.held_since is not None and not self.is_over

    @property
    def num_back(self) -> int:
        return len(self._back)

    def know(self, epochs: Iterable[bytes]) -> None:
        """What the store says."""
        self.missing = set(epochs) - self._back

    def greet(self, now: float, *, has_served: bool) -> None:
        """A worker said Hello."""
        if self._ends_at == math.inf:
            self._ends_at = now + self._wait_s
        self.is_over |= now >= self._ends_at
        if has_served and self.held_since is None and not self.is_over:
            self.held_since = now

    def look(self, now: float, ready: Iterable[bytes]) -> None:
        """See whether it is over.

        Args:
            now: Monotonic seconds.
            ready: Replicas that are attached and know what their blocks hold.
        """
        if self.is_over:
            return
        self._back.update(ready)
        if self.missing is not None:
            self.missing = self.missing - self._back
        self.is_over = now >= self._ends_at or (self.holds and self.missing == set())


class PlacementGate:
    """The comebacks of all models."""

    def __init__(
        self,
        config: ClusterConfig,
        models: Iterable[ServedModel],
        store: PrefixStore,
        *,
        clock: Callable[[], float],
        ready: Callable[[ServedModel], Iterable[bytes]],
        on_open: Callable[[], None],
    ) -> None:
        """Nothing is asked of the store before `ask`.

        Args:
            config: How long is waited.
            models: Those served.
            store: May know replicas of an earlier control plane.
            clock: Monotonic seconds.
            ready: Epochs of a model's replicas that are attached and know what they hold.
            on_open: Called when requests can be placed again.
        """
        # The first Hello is followed by the wait for others' terms.
        wait_s = config.return_wait_s and config.return_wait_s + config.term_gather_s
        self._comebacks = {
            model.name: (model, Comeback(wait_s if config.prefix_caching else 0.0))
            for model in models
        }
        self._deployment = config.deployment
        # An earlier control plane had lost what it had not heard of for longer.
        self._within_s = 2 * config.lease_s
        self._store = store
        self._clock = clock
        self._ready = ready
        self._on_open = on_open
        self._timer = WakeTimer(self.look)

    def is_open(self, model: ServedModel) -> bool:
        """Whether requests of the model are placed."""
        return not self._comebacks[model.name][1].holds

    async def ask(self) -> None:
        """Ask the store which replicas there were, until it says so or that is of no use any more.

        As long as the first answer is not there, there may be some; if none comes, there are none.
        """
        give_up_at = self._clock() + _ASK_LIMIT_S
        fingerprints: dict[bytes, Comeback] = {}
        for model, comeback in self._comebacks.values():
            for fingerprint in possible_fingerprints(model):
                fingerprints.setdefault(fingerprint, comeback)
        while not all(comeback.is_over for _, comeback in self._comebacks.values()):
            scopes = await self._store.known_scopes(
                self._deployment, fingerprints, within_s=self._within_s
            )
            for _, comeback in self._comebacks.values():
                comeback.know(
                    scope.replica_epoch
                    for scope in scopes or ()
                    if fingerprints[scope.model_fingerprint] is comeback
                )
            self.look()
            if scopes is not None or self._clock() >= give_up_at:
                return
            await asyncio.sleep(_ASK_PAUSE_S)

    def greet(self, model: ServedModel, *, has_served: bool) -> None:
        """A worker of the model said Hello.

        Args:
            model: The worker's.
            has_served: Whether its memory is from before this stream.
        """
        comeback = self._comebacks[model.name][1]
        comeback.greet(self._clock(), has_served=has_served)
        if comeback.holds:
            self._timer.arm(_LOOK_INTERVAL_S)

    def look(self) -> None:
        """Something may have changed: open what need not be held any longer."""
        now, has_opened, holds = self._clock(), False, False
        for model, comeback in self._comebacks.values():
            if comeback.is_over:
                continue
            was_held = comeback.holds
            comeback.look(now, self._ready(model))
            holds |= comeback.holds
            if was_held and not comeback.holds:
                has_opened = True
                self._log(model, comeback, now)
        if holds:
            self._timer.arm(_LOOK_INTERVAL_S)
        if has_opened:
            self._on_open()

    def close(self) -> None:
        """Hold nothing any more, and tell nobody."""
        self._timer.cancel()
        for _, comeback in self._comebacks.values():
            comeback.is_over = True

    def _log(self, model: ServedModel, comeback: Comeback, now: float) -> None:
        logger.info(
            "requests waited for replicas: model=%s seconds=%.2f back=%d missing=%d",
            model.name,
            now - (comeback.held_since or now),
            comeback.num_back,
            len(comeback.missing or ()),
        )
