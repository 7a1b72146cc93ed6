"""A client that goes away while responses wait for it is no failure of the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import pytest
from api_harness import load_catalog_model, running_api, until
from tiny_model_dir import MAX_MODEL_LEN, write_tiny_model

from protos.pagewire.v1 import inference_pb2 as pb

if TYPE_CHECKING:
    from pathlib import Path

# Nothing is read ahead, so that responses wait in the server.
OPTIONS = (("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0))
NUM_REQUESTS = 40


def request(index: int) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
    return pb.GenerateRequest(
        request_id=str(index), token_ids=pb.TokenIds(ids=[index + 5]), sampling=sampling
    )


async def start_batch(stub: Any) -> list[Any]:
    call = stub(
        "/pagewire.v1.InferenceService/GenerateBatch",
        request_serializer=pb.GenerateBatchRequest.SerializeToString,
    )()
    for index in range(NUM_REQUESTS):
        await call.write(pb.GenerateBatchRequest(request=request(index)))
    return [call]


@pytest.mark.parametrize("method", ["Generate", "GenerateBatch"])
async def test_a_client_that_leaves_responses_behind_counts_as_gone(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model_dir = write_tiny_model(tmp_path)
    async with (
        running_api(load_catalog_model(model_dir), model_dir) as api,
        api.ready_worker(max_model_len=MAX_MODEL_LEN),
        grpc.aio.insecure_channel(api.address, options=OPTIONS) as channel,
    ):
        metrics = api.control_plane.metrics
        if method == "GenerateBatch":
            calls = await start_batch(channel.stream_stream)
            await until(lambda: metrics.successes["length"] >= NUM_REQUESTS, what="all are done")
        else:
            start = channel.unary_stream(
                "/pagewire.v1.InferenceService/Generate",
                request_serializer=pb.GenerateRequest.SerializeToString,
            )
            calls = [start(request(index)) for index in range(NUM_REQUESTS)]
            await until(lambda: api.num_generated() >= 300 * NUM_REQUESTS, what="all are done")
        for call in calls:
            call.cancel()
        await until(lambda: sum(metrics.failures.values()) == len(calls), what="all have left")
        await until(api.is_idle, what="blocks are free")
        assert metrics.failures == {"CANCELLED": len(calls)}
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
