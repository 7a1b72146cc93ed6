"""Clients of every kind, seeded: what they ask for, when they leave, and whether they got it right.

Owns: the mix of requests and the check of what came back. Does not know: processes, memory.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import grpc_status.rpc_status
from fake_model import expected_output

from data_plane.step_work import RowSampling
from protos.pagewire.v1 import inference_pb2, inference_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

pb = inference_pb2
NUM_CLIENTS = 48
# Requests over one connection before a client makes a new one.
REQUESTS_PER_CHANNEL = 400
NUM_PREFIXES = 12
EXPECTED_CODES = {
    "bad": {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND},
    # Also refused at once, where the queue would take longer than that.
    "deadline": {
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    },
}


class WrongOutputError(AssertionError):
    """A request gave something else than it must, or an error that nobody asked for."""


class Clients:
    """Send `num_requests` requests, so many at once, over connections that come and go.

    Attributes:
        kinds: How many of each kind have ended.
        num_done: All of them.
        num_tokens: Output tokens that were compared.
        num_given_up: Requests that were in flight at three lost workers or failed steps.
    """

    def __init__(
        self,
        address: str,
        *,
        vocab_size: int,
        eos_token_id: int,
        num_requests: int,
        seed: int,
        on_done: Callable[[int], None],
    ) -> None:
        self.kinds: Counter[str] = Counter()
        self.num_done = 0
        self.num_tokens = 0
        self.num_given_up = 0
        self._address = address
        self._vocab_size = vocab_size
        self._eos = eos_token_id
        self._num_left = num_requests
        self._rng = random.Random(seed)
        self._on_done = on_done
        self._number = 0
        rng = self._rng
        self._prefixes = [
            [rng.randrange(4, vocab_size) for _ in range(rng.choice([16, 32, 64, 96]))]
            for _ in range(NUM_PREFIXES)
        ]

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_CLIENTS):
                group.create_task(self._client())

    async def _client(self) -> None:
        while self._num_left > 0:
            async with grpc.aio.insecure_channel(
                self._address,
                options=[("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)],
            ) as channel:
                stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
                for _ in range(REQUESTS_PER_CHANNEL):
                    if self._num_left <= 0:
                        return
                    await self._one(stub)

    async def _one(self, stub: Any) -> None:
        kind = self._rng.choices(
            ["whole", "cancel", "deadline", "unread", "bad", "resume", "stop", "batch", "text"],
            [40, 12, 8, 6, 10, 8, 6, 2, 8],
        )[0]
        num_requests = self._rng.randint(2, 12) if kind == "batch" else 1
        self._num_left -= num_requests
        try:
            await getattr(self, f"_{kind}")(stub, num_requests)
        except grpc.aio.AioRpcError as error:
            status = grpc_status.rpc_status.from_call(error)
            if status is not None and b"REPLAY_LIMIT" in status.SerializeToString():
                # On a slow machine workers are lost faster than steps are made.
                self.num_given_up += 1
            elif error.code() not in EXPECTED_CODES.get(kind, ()):
                raise WrongOutputError(f"{kind}: {error.code()} {error.details()}") from error
        self.kinds[kind] += num_requests
        self.num_done += num_requests
        self._on_done(self.num_done)

    # What is asked for.

    def _request(self, *, max_tokens: int = 12) -> pb.GenerateRequest:
        rng = self._rng
        self._number += 1
        prompt = rng.choice(self._prefixes) + [
            rng.randrange(4, self._vocab_size) for _ in range(rng.randint(1, 20))
        ]
        return pb.GenerateRequest(
            request_id=f"soak-{self._number}" if rng.random() < 0.7 else "",
            token_ids=pb.TokenIds(ids=prompt),
            sampling=pb.SamplingParams(
                temperature=rng.choice([0.0, 1.0]),
                seed=rng.getrandbits(64),
                max_tokens=rng.randint(1, max_tokens),
                ignore_eos=rng.random() < 0.5,
            ),
            # Half of the salts are of this request alone.
            cache_salt=f"salt-{self._number if rng.random() < 0.5 else rng.randrange(4)}",
            priority=rng.randrange(3),
        )

    def _expected(self, request: pb.GenerateRequest) -> list[int]:
        prompt, sampling = list(request.token_ids.ids), request.sampling
        ids, _ = expected_output(
            prompt,
            max_total_tokens=len(prompt) + sampling.max_tokens,
            vocab_size=self._vocab_size,
            sampling=RowSampling(temperature=sampling.temperature, ignore_eos=sampling.ignore_eos),
            eos_token_ids=(self._eos,),
            seed=sampling.seed,
        )
        return ids

    def _check(self, request: pb.GenerateRequest, ids: list[int], *, known: int = 0) -> None:
        expected = self._expected(request)[known:]
        self.num_tokens += len(ids)
        if ids != expected:
            raise WrongOutputError(f"got {ids}, expected {expected}: {request}")

    # How it goes.

    async def _whole(self, stub: Any, _: int) -> None:
        request = self._request(max_tokens=24)
        self._check(request, await _read(stub.Generate(request)))

    async def _cancel(self, stub: Any, _: int) -> None:
        request = self._request(max_tokens=64)
        call = stub.Generate(request)
        ids: list[int] = []
        for _ in range(self._rng.randint(1, 6)):
            response = await call.read()
            if response is grpc.aio.EOF:
                break
            ids += [i for output in response.outputs for i in output.token_ids]
        call.cancel()
        if ids != self._expected(request)[: len(ids)]:
            raise WrongOutputError(f"cancelled with {ids}: {request}")

    async def _deadline(self, stub: Any, _: int) -> None:
        request = self._request(max_tokens=256)
        call = stub.Generate(request, timeout=self._rng.uniform(0.001, 0.15))
        self._check(request, await _read(call))

    async def _unread(self, stub: Any, _: int) -> None:
        call = stub.Generate(self._request(max_tokens=64))
        await asyncio.sleep(self._rng.choice([0.0, 0.001, 0.01]))
        call.cancel()

    async def _bad(self, stub: Any, _: int) -> None:
        request = self._request()
        breaks = self._rng.randrange(6)
        if breaks == 0:
            request.sampling.temperature = -1.0
        elif breaks == 1:
            request.token_ids.ids.append(self._vocab_size)
        elif breaks == 2:
            request.model = f"model-{self._number}"
        elif breaks == 3:
            request.token_ids.ids.extend([5] * 1000)
        elif breaks == 4:
            request.request_id = "é" * (self._number % 50 + 1)
        else:
            request.ClearField("token_ids")
        await _read(stub.Generate(request))
        raise WrongOutputError(f"accepted: {request}")

    async def _resume(self, stub: Any, _: int) -> None:
        """Some of it over one call, the rest over another that takes the id from the first."""
        request = self._request(max_tokens=24)
        request.request_id = f"resumed-{self._number}"
        first = stub.Generate(request)
        ids: list[int] = []
        for _ in range(3):
            response = await first.read()
            if response is grpc.aio.EOF:
                break
            ids += [i for output in response.outputs for i in output.token_ids]
        again = pb.GenerateRequest()
        again.CopyFrom(request)
        again.resume.add(index=0, token_ids=ids)
        self._check(request, await _read(stub.Generate(again)), known=len(ids))
        first.cancel()

    async def _stop(self, stub: Any, _: int) -> None:
        request = self._request(max_tokens=48)
        request.sampling.stop.extend(self._rng.sample(["a", "e", "th", "o", "er"], 2))
        ids = await _read(stub.Generate(request))
        if ids != self._expected(request)[: len(ids)]:
            raise WrongOutputError(f"stopped with {ids}: {request}")

    async def _text(self, stub: Any, _: int) -> None:
        request = self._request(max_tokens=16)
        words = " ".join(f"word{self._rng.randrange(1000)}" for _ in range(8))
        if self._rng.random() < 0.5:
            request.text = words
        else:
            request.chat.messages.add(role="user", content=words)
        if not await _read(stub.Generate(request)):
            raise WrongOutputError(f"no token: {request}")

    async def _batch(self, stub: Any, num_requests: int) -> None:
        requests = [self._request() for _ in range(num_requests)]
        for index, request in enumerate(requests):
            request.request_id = f"batch-{self._number}-{index}"
        by_id = {request.request_id: request for request in requests}

        async def messages() -> AsyncIterator[pb.GenerateBatchRequest]:
            for request in requests:
                yield pb.GenerateBatchRequest(request=request)

        call = stub.GenerateBatch(messages())
        is_cut = self._rng.random() < 0.3
        num_read = 0
        async for response in call:
            if response.HasField("error"):
                raise WrongOutputError(f"batch: {response.error.message}")
            ids = [i for output in response.response.outputs for i in output.token_ids]
            self._check(by_id[response.request_id], ids)
            num_read += 1
            if is_cut and num_read > num_requests // 2:
                call.cancel()
                return
        if num_read != num_requests:
            raise WrongOutputError(f"{num_read} of {num_requests} answers of a batch")


async def _read(call: Any) -> list[int]:
    ids: list[int] = []
    async for response in call:
        for output in response.outputs:
            ids += output.token_ids
    return ids
