"""A whole control plane on free ports with the real tokenizer, and fake workers for it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import grpc.aio
from fake_model import FakeModelRunner, expected_output
from fake_worker import FakeWorker
from pagewire_client import AsyncClient

from control_plane.cluster_config import ClusterConfig
from control_plane.config import ControlPlaneConfig, ModelSource
from control_plane.model_catalog import CatalogModel, ModelCatalog, load_model
from control_plane.server import ControlPlane
from data_plane.step_work import RowSampling
from protos.model_fingerprint import served_fingerprint
from protos.pagewire.v1 import inference_pb2, inference_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from pathlib import Path

MODEL = "smol"
MAX_MODEL_LEN = 2048


@dataclasses.dataclass
class Api:
    """What a test talks to."""

    control_plane: ControlPlane
    model: CatalogModel
    client: AsyncClient
    channel: grpc.aio.Channel
    stub: inference_pb2_grpc.InferenceServiceStub

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.control_plane.port}"

    @property
    def worker_address(self) -> str:
        return f"127.0.0.1:{self.control_plane.worker_port}"

    @contextlib.asynccontextmanager
    async def ready_worker(self, **identity: object) -> AsyncGenerator[FakeWorker]:
        """A fake worker that takes work."""
        ready = self.control_plane.cluster.num_ready(MODEL)
        async with self.worker(**identity) as worker:
            await until(
                lambda: self.control_plane.cluster.num_ready(MODEL) > ready, what="worker is ready"
            )
            yield worker

    def worker(self, **identity: object) -> FakeWorker:
        """A fake worker of the served model; `async with` it."""
        served = self.model.served
        runner = FakeModelRunner(num_blocks=1024, block_size=16, vocab_size=served.vocab_size)
        identity = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 16} | identity
        return FakeWorker(
            self.worker_address,
            runner=runner,
            model_fingerprint=served_fingerprint(served.base_fingerprint, kv_dtype="float32"),
            **identity,
        )

    def expected(
        self,
        prompt: list[int],
        *,
        max_tokens: int,
        seed: int = 0,
        temperature: float = 0.0,
        stop_token_ids: tuple[int, ...] = (),
        ignore_eos: bool = False,
        min_tokens: int = 0,
    ) -> list[int]:
        """The ids that a fake worker generates."""
        ids, _ = expected_output(
            prompt,
            max_total_tokens=len(prompt) + max_tokens,
            vocab_size=self.model.served.vocab_size,
            sampling=RowSampling(
                temperature=temperature,
                stop_token_ids=stop_token_ids,
                ignore_eos=ignore_eos,
                min_tokens=min_tokens,
            ),
            eos_token_ids=self.model.served.eos_token_ids,
            seed=seed,
        )
        return ids

    def text(self, prompt: list[int], ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """What decoding the ids adds to the prompt."""
        detokenizer = self.model.tokenizer.detokenizer(
            prompt, skip_special_tokens=skip_special_tokens
        )
        detokenizer.extend(ids)
        return detokenizer.text(final=True)

    def encode(self, text: str) -> list[int]:
        return self.model.tokenizer.encode(text).tolist()

    async def generate(
        self, request: inference_pb2.GenerateRequest
    ) -> list[inference_pb2.GenerateResponse]:
        return [response async for response in self.stub.Generate(request)]

    def usage_of_blocks(self) -> tuple[int, int]:
        """(usable, free) over all replicas."""
        replicas = self.control_plane.cluster.stats().replicas
        return sum(r.usable_blocks for r in replicas), sum(r.free_blocks for r in replicas)

    def num_generated(self) -> int:
        """Output tokens of all replicas."""
        return sum(r.generation_tokens for r in self.control_plane.cluster.stats().replicas)

    def is_idle(self) -> bool:
        stats = self.control_plane.cluster.stats()
        usable, free = self.usage_of_blocks()
        return stats.num_requests_live == 0 and usable == free


async def until(condition: Callable[[], object], *, what: str, timeout_s: float = 20.0) -> None:
    """Wait for a condition; the time is only for the case that it never comes."""
    try:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110 - conditions of every kind, without events
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(f"not within {timeout_s} s: {what}") from None


async def read_all(call: Any) -> None:
    """Read a stream to its end."""
    while await call.read() is not grpc.aio.EOF:
        pass


def load_catalog_model(model_dir: Path) -> CatalogModel:
    return load_model(model_dir, MODEL)


@contextlib.asynccontextmanager
async def running_api(
    model: CatalogModel, model_dir: Path, **changes: object
) -> AsyncGenerator[Api]:
    """Start everything; fields of ControlPlaneConfig can be changed."""
    config = ControlPlaneConfig(
        models=(ModelSource(location=model_dir, name=model.served.name),),
        port=0,
        worker_port=0,
        metrics_port=0,
        cluster=ClusterConfig(term_gather_s=0.01, replica_wait_s=120.0, audit_interval_s=0.05),
    )
    config = dataclasses.replace(config, **changes)  # type: ignore[arg-type]
    async with (
        ControlPlane(config, ModelCatalog([model])) as control_plane,
        AsyncClient(f"127.0.0.1:{control_plane.port}", timeout_s=60.0) as client,
        grpc.aio.insecure_channel(f"127.0.0.1:{control_plane.port}") as channel,
    ):
        yield Api(
            control_plane, model, client, channel, inference_pb2_grpc.InferenceServiceStub(channel)
        )
