"""A store and workers that outlive control planes, of which one takes over from another.

Where a test must not wait for a worker, the limit is an hour, and it would not end.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import conditions
from cluster_harness import FINGERPRINT, Harness, collect, running_cluster, undisturbed
from fake_model import FakeModelRunner
from fake_worker import FakeWorker
from prefix_store_helpers import TIMING
from valkey_process import ValkeyProcess

from control_plane.prefix_store import PrefixScope, open_prefix_store
from demo.link import Link
from demo.ports import any_free_port

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from control_plane.engine import Engine
    from control_plane.prefix_store import StoreTiming
    from control_plane.request import Request

SHARED = list(range(20, 60))  # ten blocks
HOUR_S = 3600.0


@dataclass
class Site:
    """A store and workers that outlive the clusters, which share a port."""

    valkey: ValkeyProcess
    link: Link
    port: int
    workers: dict[str, FakeWorker] = field(default_factory=dict)

    def start_worker(self, name: str, *, linked: bool = False) -> None:
        worker = FakeWorker(
            f"127.0.0.1:{self.link.port if linked else self.port}",
            runner=FakeModelRunner(num_blocks=64),
            worker_id=name,
            replica_id=f"replica-{name}",
            model_fingerprint=FINGERPRINT,
        )
        self.workers[name] = worker
        worker.start()

    @contextlib.asynccontextmanager
    async def cluster(
        self,
        *,
        url: str | None = None,
        timing: StoreTiming = TIMING,
        return_wait_s: float = HOUR_S,
        **config: Any,
    ) -> AsyncGenerator[Harness]:
        store = open_prefix_store(
            url or self.valkey.url,
            deployment="default",
            shard=config.get("shard", "0"),
            timing=timing,
        )
        config = {"adoption_wait_s": 60.0, "return_wait_s": return_wait_s, **config}
        async with running_cluster(store=store, port=self.port, **config) as harness:
            yield harness


@contextlib.asynccontextmanager
async def opened_site(tmp_path: Path) -> AsyncGenerator[Site]:
    valkey = ValkeyProcess(tmp_path)
    await valkey.start()
    port = any_free_port()
    async with Link(port) as link:
        site = Site(valkey, link, port)
        yield site
        await asyncio.gather(*(worker.kill() for worker in site.workers.values()))
    await valkey.kill()


def request_for_shared(harness: Harness, tail: int = 100) -> Request:
    return harness.request([*SHARED, tail, tail + 1], max_tokens=6)


async def serve(harness: Harness, *requests: Request) -> list[int]:
    """All at once; gives their hit tokens."""
    streams = [harness.cluster.submit(request) for request in requests]
    for request, stream in zip(requests, streams, strict=True):
        assert await collect(stream) == undisturbed(request)
    return [request.sequences[0].num_cached_tokens for request in requests]


async def serve_on_all(harness: Harness) -> None:
    """Until every attached worker has cached something."""

    def engines() -> list[Engine]:
        return [engine for engine in harness.cluster.fleet if engine.facts is not None]

    while not all(engine.core.live_entries() for engine in engines()):
        prompts = [[200 + 40 * i + j for j in range(30)] for i in range(2 * len(engines()))]
        await serve(harness, *(harness.request(prompt, max_tokens=2) for prompt in prompts))


async def first_life(site: Site, *others: str, **config: Any) -> None:
    """The shared prefix is on "last", the others have some of their own, the store knows all."""
    site.start_worker("last", linked=True)
    async with site.cluster(**config) as harness:
        await harness.ready()
        await serve(harness, request_for_shared(harness))
        for name in others:
            site.start_worker(name)
        await harness.ready(1 + len(others))
        await serve_on_all(harness)
        await until_written(site, harness)


async def until_written(site: Site, harness: Harness) -> None:
    reader = open_prefix_store(site.valkey.url, deployment="default", timing=TIMING)
    scopes = {
        PrefixScope("default", FINGERPRINT, engine.shape.replica_epoch): engine
        for engine in harness.cluster.fleet
    }

    async def is_written() -> bool:
        known = await harness.store.known_scopes("default", [FINGERPRINT])
        return (
            known is not None
            and set(known) >= set(scopes)
            and all(
                [await reader.load(s) == engine.core.live_entries() for s, engine in scopes.items()]
            )
        )

    await reader.start()
    try:
        await conditions.until(is_written)
    finally:
        await reader.close()


def attached(harness: Harness) -> set[str]:
    """Workers whose blocks the cluster knows."""
    return {
        engine.facts.worker_id
        for engine in harness.cluster.fleet
        if engine.facts is not None and not engine.core.is_recovering
    }
