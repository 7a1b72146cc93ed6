"""A cluster behind a real worker port, in process: what integration tests attach workers to."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from fake_model import FakeModelRunner, expected_output
from fake_worker import FakeWorker
from google.rpc import error_details_pb2, status_pb2

from control_plane.cluster import Cluster
from control_plane.cluster_config import ClusterConfig
from control_plane.memory_prefix_store import MemoryPrefixStore
from control_plane.request import FinishReason, Request, SamplingParams
from control_plane.served_model import ServedModel
from control_plane.worker_service import WORKER_SERVER_OPTIONS, WorkerService
from protos.model_fingerprint import served_fingerprint
from protos.pagewire.v1 import worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from control_plane.prefix_store import PrefixStore
    from control_plane.run_clock import RunClock
    from control_plane.stats import ReplicaSnapshot
    from control_plane.token_stream import TokenStream

VOCAB_SIZE = 512
EOS = 2
BASE_FINGERPRINT = bytes(range(32))
FINGERPRINT = served_fingerprint(BASE_FINGERPRINT, kv_dtype="float32")
TIMEOUT_S = 20.0


def fake_model(*, max_model_len: int = 128, name: str = "fake") -> ServedModel:
    return ServedModel(
        name=name,
        base_fingerprint=BASE_FINGERPRINT,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
    )


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition of this process."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 - the state is polled as users of stats would
            await asyncio.sleep(0.002)


@dataclass
class Output:
    """Everything that came back of a request."""

    token_ids: list[int] = field(default_factory=list)
    reason: FinishReason | None = None


async def collect(stream: TokenStream) -> Output:
    output = Output()
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            news = await stream.read()
            for sequence in news.sequences:
                output.token_ids += sequence.token_ids
                output.reason = sequence.finish_reason or output.reason
            if news.ended:
                return output


@dataclass
class Harness:
    """A running cluster and its worker port."""

    cluster: Cluster
    store: PrefixStore
    address: str
    num_requests: int = 0
    failure_is_expected: bool = False

    def worker(self, name: str = "w0", *, runner: FakeModelRunner | None = None, **kw: Any) -> Any:
        """A FakeWorker that holds the harness's model; `async with` it."""
        arguments = {
            "worker_id": name,
            "replica_id": f"replica-{name}",
            "model_fingerprint": FINGERPRINT,
            **kw,
        }
        return FakeWorker(self.address, runner=runner, **arguments)

    def request(self, prompt: list[int], *, max_tokens: int = 16, **kw: Any) -> Request:
        self.num_requests += 1
        limit = next(iter(self.cluster.models.values())).max_model_len
        return Request(
            **{
                "req_id": f"q{self.num_requests}",
                "prompt_token_ids": prompt,
                "sampling": SamplingParams(temperature=0.0, max_tokens=max_tokens),
                "seed": 0,
                "max_total_tokens": min(len(prompt) + max_tokens, limit),
                "arrival": self.num_requests,
                "eos_token_ids": (EOS,),
                **kw,
            }
        )

    def replica(self, name: str = "w0") -> ReplicaSnapshot:
        replicas = {r.replica_id: r for r in self.cluster.stats().replicas}
        return replicas[f"replica-{name}"]

    async def ready(self, count: int = 1) -> None:
        await until(lambda: self.cluster.num_ready("fake") == count)

    def assert_nothing_held(self) -> None:
        """No request is live, every pool is whole and free."""
        self.cluster.audit()
        stats = self.cluster.stats()
        assert stats.num_requests_live == 0
        assert stats.num_requests_unplaced == 0
        for replica in stats.replicas:
            assert replica.free_blocks == replica.usable_blocks, replica


def undisturbed(request: Request) -> Output:
    """What the request gives when nothing goes wrong."""
    token_ids, reason = expected_output(
        request.prompt_token_ids.tolist(),
        max_total_tokens=request.max_total_tokens,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
    )
    return Output(token_ids, FinishReason(reason))


def long_prompt(index: int, *, output: int = 24) -> list[int]:
    """A prompt whose undisturbed output does not end early, so that faults find it running."""
    for variant in range(1000):
        prompt = [20 + index, 30 + variant % 100, *range(40, 48), 60 + variant // 100]
        token_ids, _ = expected_output(
            prompt, max_total_tokens=len(prompt) + output, vocab_size=VOCAB_SIZE
        )
        if len(token_ids) == output:
            return prompt
    raise AssertionError("no such prompt")


@asynccontextmanager
async def running_cluster(
    *,
    model: ServedModel | None = None,
    store: PrefixStore | None = None,
    port: int = 0,
    clock: RunClock | None = None,
    on_started: Callable[[float], None] | None = None,
    **config: Any,
) -> AsyncIterator[Harness]:
    store = store or MemoryPrefixStore()
    if "lookahead" in config:
        # A test that asks for one gets exactly that.
        config.setdefault("max_lookahead", config["lookahead"])
    cluster = Cluster(
        ClusterConfig(**{"term_gather_s": 0.0, "audit_interval_s": 0.0, **config}),
        [model or fake_model()],
        store,
        clock=clock,
        on_started=on_started,
    )
    await store.start()
    await cluster.start()
    server = grpc.aio.server(options=WORKER_SERVER_OPTIONS)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(WorkerService(cluster), server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    watch = asyncio.create_task(cluster.failed())
    try:
        harness = Harness(cluster, store, f"127.0.0.1:{port}")
        yield harness
        assert watch.done() is harness.failure_is_expected, watch
    finally:
        watch.cancel()
        await cluster.stop()
        await server.stop(None)
        await store.close()
        await asyncio.gather(watch, return_exceptions=True)


# ---- a peer that says whatever the test wants --------------------------------------------------


def hello(**fields: Any) -> worker_pb2.WorkerMessage:
    """A Hello that is accepted, but for the fields given; `geometry` merges into kv_geometry."""
    geometry = {
        "num_layers": 1,
        "num_kv_heads": 1,
        "head_size": 8,
        "dtype": "float32",
        "block_size": 4,
        **fields.pop("geometry", {}),
    }
    return worker_pb2.WorkerMessage(
        hello=worker_pb2.Hello(
            **{
                "protocol_version": 1,
                "worker_id": "raw",
                "replica_id": "replica-raw",
                "rank": 0,
                "tp_size": 1,
                "epoch": bytes(16),
                "model_fingerprint": FINGERPRINT,
                "kv_geometry": worker_pb2.KvGeometry(**geometry),
                "num_blocks": 64,
                "max_num_seqs": 8,
                "max_model_len": 128,
                "max_num_batched_tokens": 256,
                **fields,
            }
        )
    )


class RawPeer:
    """A bare Attach stream; messages go out as bytes, so that they need not be messages."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(
            address,
            options=[
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.max_receive_message_length", -1),
                ("grpc.max_send_message_length", -1),
            ],
        )
        self.call: Any = self._channel.stream_stream(
            "/pagewire.v1.WorkerService/Attach",
            request_serializer=lambda data: data,
            response_deserializer=worker_pb2.ControlMessage.FromString,
        )()

    async def __aenter__(self) -> RawPeer:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.call.cancel()
        await self._channel.close()

    async def say(self, message: worker_pb2.WorkerMessage | bytes) -> None:
        data = message if isinstance(message, bytes) else message.SerializeToString()
        await self.call.write(data)

    async def hear(self) -> worker_pb2.ControlMessage:
        async with asyncio.timeout(TIMEOUT_S):
            message = await self.call.read()
        assert message is not grpc.aio.EOF, await self.end()
        return message

    async def hear_order(self) -> worker_pb2.ControlMessage:
        """The next message that is no heartbeat."""
        while (message := await self.hear()).HasField("heartbeat"):
            pass
        return message

    async def attach(self, **fields: Any) -> worker_pb2.Welcome:
        """Say Hello, hear Welcome and Reset."""
        await self.say(hello(**fields))
        welcome = await self.hear()
        assert welcome.HasField("welcome")
        reset = await self.hear()
        assert reset.HasField("reset")
        return welcome.welcome

    async def hear_plan(self) -> worker_pb2.Plan:
        message = await self.hear_order()
        assert message.HasField("plan"), message
        return message.plan

    async def hear_reset(self) -> int:
        """The next Reset; plans before it are skipped."""
        while True:
            message = await self.hear()
            if message.HasField("reset"):
                return message.reset.version

    async def end(self) -> tuple[grpc.StatusCode, str, dict[str, str]]:
        """Wait for the stream's end: code, reason, metadata of its ErrorInfo."""
        async with asyncio.timeout(TIMEOUT_S):
            try:
                while await self.call.read() is not grpc.aio.EOF:
                    pass
            except grpc.aio.AioRpcError:
                pass
            code = await self.call.code()
            trailer = dict(await self.call.trailing_metadata() or ())
        status = status_pb2.Status.FromString(trailer.get("grpc-status-details-bin", b""))
        info = error_details_pb2.ErrorInfo()
        for detail in status.details:
            detail.Unpack(info)
        return code, info.reason, dict(info.metadata)
