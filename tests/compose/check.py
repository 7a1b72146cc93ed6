"""Asks a running server over its public port: waits for replicas, has prompts answered by each."""

from __future__ import annotations

import argparse
import asyncio
import time

import grpc

from protos.pagewire.v1 import inference_pb2 as pb
from protos.pagewire.v1 import inference_pb2_grpc as rpc

PROMPTS_PER_REPLICA = 6
MAX_TOKENS = 24


async def wait_for_replicas(stub: rpc.InferenceServiceStub, count: int, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    seen = "no answer yet"
    while time.monotonic() < deadline:
        try:
            stats = await stub.GetStats(pb.GetStatsRequest(), timeout=10, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            seen = f"{error.code().name}: {error.details()}"
        else:
            attached = [replica for replica in stats.replicas if replica.workers]
            seen = f"{len(attached)} replicas, prefix store {stats.prefix_store}"
            if len(attached) == count:
                print(f"         {seen}")
                return
        await asyncio.sleep(1)
    raise SystemExit(f"no {count} replicas within {limit_s:.0f} s; last seen: {seen}")


async def ask(stub: rpc.InferenceServiceStub, prompt: str) -> str:
    request = pb.GenerateRequest(
        chat=pb.Chat(messages=[pb.ChatMessage(role="user", content=prompt)]),
        sampling=pb.SamplingParams(temperature=0, max_tokens=MAX_TOKENS),
    )
    text, reason = "", pb.FINISH_REASON_UNSPECIFIED
    async for response in stub.Generate(request, timeout=180):
        for output in response.outputs:
            text += output.text
            reason = output.finish_reason or reason
    if not text or reason not in (pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH):
        raise SystemExit(f"{prompt!r} got {text!r}, finish reason {pb.FinishReason.Name(reason)}")
    return text


async def main(server: str, replicas: int, limit_s: float) -> None:
    async with grpc.aio.insecure_channel(server, [("grpc.enable_http_proxy", 0)]) as channel:
        stub = rpc.InferenceServiceStub(channel)
        await wait_for_replicas(stub, replicas, limit_s)
        prompts = [f"What is {i + 2} times {i + 3}?" for i in range(PROMPTS_PER_REPLICA * replicas)]
        answers = await asyncio.gather(*(ask(stub, prompt) for prompt in prompts))
        print(f"         {prompts[0]} -> {answers[0]!r}")
        stats = await stub.GetStats(pb.GetStatsRequest(), timeout=10)
        for replica in stats.replicas:
            workers = ", ".join(worker.worker_id for worker in replica.workers)
            print(f"         {workers}: {replica.generation_tokens} tokens generated")
        if idle := [r.replica_id for r in stats.replicas if not r.generation_tokens]:
            raise SystemExit(f"replicas without any work: {idle}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--server", required=True)
    parser.add_argument("--replicas", type=int, required=True)
    parser.add_argument("--limit-s", type=float, default=180)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.server, arguments.replicas, arguments.limit_s))
