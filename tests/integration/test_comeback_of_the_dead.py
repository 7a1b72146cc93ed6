"""A control plane that takes over waits for those who can come back, and for nobody else.

Real gRPC, a real Valkey, fake workers. Waits are an hour: a test that waited for a dead worker
would not end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import conditions
import pytest
from cluster_harness import FINGERPRINT, until
from comeback_site import (
    SHARED,
    Site,
    attached,
    first_life,
    opened_site,
    request_for_shared,
    serve,
    serve_on_all,
    until_written,
)

from data_plane.control_stream import EXIT_OK, EXIT_SUPERSEDED

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from cluster_harness import Harness
    from fake_worker import FakeWorker

pytestmark = pytest.mark.redis


@pytest.fixture
async def site(tmp_path: Path) -> AsyncGenerator[Site]:
    async with opened_site(tmp_path) as site:
        yield site


async def num_known(harness: Harness, **options: float) -> int:
    return len(await harness.store.known_scopes("default", [FINGERPRINT], **options) or ())


async def until_idle_without(harness: Harness, *names: str) -> None:
    """Until these are gone, and the cluster knows it."""
    await until(lambda: not attached(harness) & set(names))


async def killed(site: Site, name: str) -> None:
    await site.workers.pop(name).kill()


async def test_nobody_waits_for_what_a_worker_was_before_it_was_started_anew(
    site: Site,
) -> None:
    await first_life(site, "w0")
    async with site.cluster() as harness:
        await harness.ready(2)
        await killed(site, "w0")
        await until_idle_without(harness, "w0")
        # Lost, that may be its connection only.
        assert await num_known(harness) == 2
        site.start_worker("w0")
        await harness.ready(2)
        await conditions.until(lambda: _is(num_known(harness), 1))
        await serve_on_all(harness)
        await until_written(site, harness)
    async with site.cluster() as harness:
        assert await serve(harness, request_for_shared(harness)) == [len(SHARED)]


async def test_nobody_waits_for_a_worker_that_has_left_in_order(site: Site) -> None:
    await first_life(site, "w0")
    async with site.cluster() as harness:
        await harness.ready(2)
        worker = site.workers.pop("w0")
        worker.drain()
        assert await worker.exited() == EXIT_OK
        await until_idle_without(harness, "w0")
    async with site.cluster() as harness:
        assert await serve(harness, request_for_shared(harness)) == [len(SHARED)]


async def test_nobody_waits_for_a_process_whose_name_another_one_took(site: Site) -> None:
    await first_life(site, "w0")
    async with site.cluster() as harness:
        await harness.ready(2)
        first: FakeWorker = site.workers["w0"]
        site.start_worker("w0")
        assert await first.exited() == EXIT_SUPERSEDED
        await harness.ready(2)
        await serve_on_all(harness)
        await until_written(site, harness)
    async with site.cluster() as harness:
        assert await serve(harness, request_for_shared(harness)) == [len(SHARED)]


async def test_a_worker_that_only_lost_its_connection_is_waited_for_and_warm(site: Site) -> None:
    await first_life(site, "w0")
    async with site.cluster() as harness:
        await harness.ready(2)
        await site.link.cut(refuse_new=True)
        await until_idle_without(harness, "last")
    async with site.cluster() as harness:
        stream = harness.cluster.submit(request_for_shared(harness))
        await until(lambda: attached(harness) == {"w0"})
        assert harness.cluster.stats().num_requests_unplaced == 1
        site.link.mend()
        await until(lambda: attached(harness) == {"last", "w0"})
        await until(lambda: harness.cluster.stats().num_requests_unplaced == 0)
        assert stream
        assert await serve(harness, request_for_shared(harness, 102)) == [len(SHARED)]


async def test_a_worker_that_was_lost_long_before_is_not_waited_for_whatever_its_name(
    site: Site,
) -> None:
    lease_s = 0.5
    await first_life(site, "w0")
    async with site.cluster(lease_s=lease_s) as harness:
        await harness.ready(2)
        await killed(site, "w0")
        await conditions.until(lambda: _is(num_known(harness, within_s=2 * lease_s), 1))
        # As long as it lives, it has entries for whoever brings its memory.
        assert await num_known(harness) == 2
    async with site.cluster(lease_s=lease_s) as harness:
        await serve(harness, request_for_shared(harness))


async def _is(number, expected: int) -> bool:  # type: ignore[no-untyped-def]
    return await number == expected
