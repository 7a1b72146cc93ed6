"""Answers that nobody reads: what the calls of all methods together may hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import pytest
from api_harness import load_catalog_model, running_api, until

from control_plane import generation
from protos.pagewire.v1 import inference_pb2 as pb

if TYPE_CHECKING:
    from pathlib import Path

METHOD = "/pagewire.v1.InferenceService/Tokenize"


async def test_unread_answers_are_bounded_by_what_was_asked(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "_MAX_HELD_BYTES", 1_000_000)
    # More ids than a connection takes without being read.
    data = pb.TokenizeRequest(text="river " * 70_000).SerializeToString()
    async with running_api(load_catalog_model(model_dir), model_dir) as api:
        service: Any = api.control_plane._inference
        tokenize = api.channel.unary_stream(METHOD)
        unread = [tokenize(data), tokenize(data)]
        await until(
            lambda: service._generations._held_bytes == 2 * len(data), what="both are taken"
        )
        refused: Any = tokenize(data)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await refused.read()
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "messages of live calls hold" in (error.value.details() or "")
        for call in unread:
            call.cancel()
        await until(lambda: not service._generations._held_bytes, what="nothing is held")
        assert len((await api.stub.Tokenize(pb.TokenizeRequest(text="a river"))).token_ids) == 2
