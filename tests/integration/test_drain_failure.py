"""A control plane that contradicts itself while it drains: it ends at once, like any other."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from api_harness import load_catalog_model, running_api

from control_plane.errors import InvariantError

if TYPE_CHECKING:
    from pathlib import Path


def broken(*_: Any, **__: Any) -> Any:
    raise InvariantError("state")


async def test_a_broken_invariant_ends_a_drain(model_dir: Path) -> None:
    model = load_catalog_model(model_dir)
    async with running_api(model, model_dir) as api, api.ready_worker():
        control_plane = api.control_plane
        async with api.client.generate([5, 6, 7], max_tokens=2000, ignore_eos=True) as running:
            async for _ in running:
                break
            leaving = asyncio.create_task(control_plane.leave(600.0, asyncio.Event()))
            for engine in control_plane.cluster.fleet:
                engine.core.scheduler.schedule = broken  # type: ignore[method-assign]
            with pytest.raises(InvariantError):
                await asyncio.wait_for(leaving, 60.0)


async def test_a_second_signal_ends_a_drain_early(model_dir: Path) -> None:
    model = load_catalog_model(model_dir)
    async with running_api(model, model_dir) as api, api.ready_worker() as worker:
        async with api.client.generate([5, 6, 7], max_tokens=2000, ignore_eos=True) as running:
            async for _ in running:
                break
            # The request cannot end by itself any more.
            worker.runner.gate.clear()
            cut = asyncio.Event()
            leaving = asyncio.create_task(api.control_plane.leave(600.0, cut))
            cut.set()
            assert not await asyncio.wait_for(leaving, 60.0)
        worker.runner.gate.set()


async def test_a_drain_without_requests_is_over_at_once(model_dir: Path) -> None:
    async with running_api(load_catalog_model(model_dir), model_dir) as api:
        assert await asyncio.wait_for(api.control_plane.leave(600.0, asyncio.Event()), 60.0)
