"""What tests of every prefix store share: impatient timing, entries, an observer, conditions."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from conditions import until

from control_plane.prefix_store import PrefixScope, StoreObserver, StoreTiming, open_prefix_store
from control_plane.redis_prefix_store import RedisPrefixStore

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from control_plane.prefix_store import PrefixStore

    Entry = tuple[bytes, int]

SCOPE = PrefixScope("test", bytes(range(32)), b"\x01" * 32)
OTHER_EPOCH = PrefixScope("test", bytes(range(32)), b"\x02" * 32)
OTHER_DEPLOYMENT = PrefixScope("other:test", bytes(range(32)), b"\x01" * 32)
MODELS = [SCOPE.model_fingerprint]
# Quick, but patient with the server: one that is slow because the machine is busy must not be taken
# for one that does not answer.
TIMING = StoreTiming(
    ttl_s=120.0,
    op_timeout_s=30.0,
    load_timeout_s=30.0,
    coalesce_s=0.001,
    renew_interval_s=0.01,
    probe_interval_s=0.05,
    backoff_min_s=0.01,
    backoff_max_s=0.05,
    close_timeout_s=30.0,
)
# For servers that do not answer, so that tests of outages take tenths of a second.
IMPATIENT = replace(TIMING, op_timeout_s=0.3, load_timeout_s=1.0, close_timeout_s=1.0)


def entry(number: int, generation: int = 1) -> Entry:
    return (number.to_bytes(2, "big") * 16, generation)


def entries(count: int, generation: int = 1) -> dict[int, Entry]:
    return {block_id: entry(block_id, generation) for block_id in range(1, count + 1)}


class Recorder(StoreObserver):
    """Remembers what the store reported."""

    def __init__(self) -> None:
        self.states: list[bool] = []
        self.failures: Counter[str] = Counter()
        self.num_written = 0
        self.num_resyncs = 0
        self.num_invalid = 0

    def on_state(self, *, available: bool) -> None:
        self.states.append(available)

    def on_written(self, num_entries: int) -> None:
        self.num_written += num_entries

    def on_failure(self, kind: str) -> None:
        self.failures[kind] += 1

    def on_resync(self, num_entries: int) -> None:
        self.num_resyncs += 1

    def on_loaded(self, num_entries: int, num_invalid: int) -> None:
        self.num_invalid += num_invalid


async def until_loaded(
    store: PrefixStore, scope: PrefixScope, expected: Mapping[int, Entry]
) -> None:
    async def is_there() -> bool:
        return await store.load(scope) == expected

    await until(is_there)


@contextlib.asynccontextmanager
async def opened_store(
    url: str,
    *,
    timing: StoreTiming = TIMING,
    observer: StoreObserver | None = None,
    shard: str = "0",
) -> AsyncGenerator[PrefixStore]:
    store = open_prefix_store(url, deployment="test", shard=shard, timing=timing, observer=observer)
    await store.start()
    try:
        yield store
    finally:
        await store.close()


async def until_held(url: str, scope: PrefixScope, expected: Mapping[int, Entry]) -> None:
    """Wait until the server itself, seen by somebody who wrote nothing, holds these."""
    async with opened_store(url) as reader:
        await until_loaded(reader, scope, expected)


@contextlib.asynccontextmanager
async def redis_store(
    url: str, *, timing: StoreTiming = TIMING, observer: StoreObserver | None = None
) -> AsyncGenerator[RedisPrefixStore]:
    async with opened_store(url, timing=timing, observer=observer) as store:
        assert isinstance(store, RedisPrefixStore)
        yield store


async def leased_until_held(store: PrefixStore, url: str, expected: Mapping[Any, Any]) -> None:
    """Let leases come in until the server holds what is live."""
    async with opened_store(url) as reader:

        async def is_complete() -> bool:
            store.renew(SCOPE, lambda: expected)
            return await reader.load(SCOPE) == expected

        await until(is_complete)
