"""Damaged GenerateRequests, in process and over gRPC; `make fuzz` sends as many as you like."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from api_harness import Api, load_catalog_model, running_api
from fuzz_requests import fuzz_generate_requests, fuzz_over_grpc
from tiny_model_dir import MAX_MODEL_LEN, write_tiny_model

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

COUNT = 12_000
COUNT_OVER_GRPC = 400


@pytest.fixture
async def api(tmp_path: Path) -> AsyncGenerator[Api]:
    model_dir = write_tiny_model(tmp_path)
    async with (
        running_api(load_catalog_model(model_dir), model_dir) as api,
        api.ready_worker(max_model_len=MAX_MODEL_LEN),
    ):
        yield api
        # Whatever came before.
        completion = await api.client.complete([5, 6, 7], max_tokens=8, temperature=0)
        assert completion.token_ids == api.expected([5, 6, 7], max_tokens=8)


async def test_damaged_requests_that_are_refused_change_nothing(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes = await fuzz_generate_requests(api, COUNT, seed=4)
    assert outcomes.total == COUNT
    assert outcomes.counts["refused INVALID_ARGUMENT"] > COUNT // 4
    assert outcomes.counts["admitted"] > COUNT // 10
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_damaged_requests_over_grpc_end_with_a_status_that_says_why(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes = await fuzz_over_grpc(api, COUNT_OVER_GRPC, seed=5)
    assert outcomes.total == COUNT_OVER_GRPC
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
