"""Replicas whose memory is gone for good: one suite for the stores in memory and in a server."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
from conditions import until
from prefix_store_helpers import (
    MODELS,
    OTHER_EPOCH,
    SCOPE,
    TIMING,
    entries,
    entry,
    opened_store,
    until_loaded,
)
from valkey_process import ValkeyProcess

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from control_plane.prefix_store import PrefixScope, PrefixStore


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[PrefixStore]:
    async with contextlib.AsyncExitStack() as stack:
        url = "memory://"
        if request.param == "redis":
            server = ValkeyProcess(tmp_path)
            await server.start()
            stack.push_async_callback(server.kill)
            url = server.url
        yield await stack.enter_async_context(opened_store(url, timing=TIMING))


async def until_known(store: PrefixStore, *expected: PrefixScope, **options: float) -> None:
    async def is_so() -> bool:
        scopes = await store.known_scopes("test", MODELS, **options)
        return scopes is not None and set(scopes) == set(expected)

    await until(is_so)


async def test_a_retired_replica_is_known_no_more_at_once_and_others_stay(store):
    store.record(SCOPE, entries(3))
    store.record(OTHER_EPOCH, entries(2))
    await until_known(store, SCOPE, OTHER_EPOCH)
    store.retire(SCOPE)
    assert await store.load(SCOPE) == {}
    assert await store.known_scopes("test", MODELS) == [OTHER_EPOCH]
    assert await store.load(OTHER_EPOCH) == entries(2)
    await until_known(store, OTHER_EPOCH)


async def test_retiring_what_nobody_knows_or_twice_is_harmless(store):
    store.retire(SCOPE)
    store.record(OTHER_EPOCH, entries(2))
    store.retire(SCOPE)
    await until_known(store, OTHER_EPOCH)
    await until_loaded(store, SCOPE, {})


async def test_changes_that_were_not_written_yet_go_with_the_replica(store):
    store.renew(SCOPE, lambda: entries(3))
    store.record(SCOPE, {9: entry(9)})
    store.retire(SCOPE)
    store.record(OTHER_EPOCH, entries(1))
    await until_known(store, OTHER_EPOCH)
    assert await store.load(SCOPE) == {}


async def test_a_retired_replica_that_comes_back_begins_anew(store):
    store.renew(SCOPE, lambda: entries(3))
    await until_known(store, SCOPE)
    store.retire(SCOPE)
    await until_known(store)
    store.record(SCOPE, {9: entry(9, 7)})
    store.renew(SCOPE, lambda: {9: entry(9, 7)})
    await until_known(store, SCOPE)
    await until_loaded(store, SCOPE, {9: entry(9, 7)})


async def test_those_not_heard_of_for_longer_than_others_are_known_if_asked_for(store):
    store.renew(SCOPE, lambda: entries(1))
    await until_known(store, SCOPE, within_s=0.05)

    async def is_left_behind() -> bool:
        store.renew(OTHER_EPOCH, lambda: entries(2))
        return await store.known_scopes("test", MODELS, within_s=0.05) == [OTHER_EPOCH]

    await until(is_left_behind)
    await until_known(store, SCOPE, OTHER_EPOCH)
    await until_known(store, SCOPE, OTHER_EPOCH, within_s=3600.0)
    assert await store.load(SCOPE) == entries(1)


async def test_one_without_entries_tells_as_well_how_old_the_others_are(store):
    store.renew(SCOPE, lambda: entries(1))
    await until_known(store, SCOPE)

    async def is_left_behind() -> bool:
        store.renew(OTHER_EPOCH, dict)
        return await store.known_scopes("test", MODELS, within_s=0.05) == []

    await until(is_left_behind)
