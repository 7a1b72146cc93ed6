"""What the worker port does with peers that are wrong, hostile, silent or slow."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from cluster_harness import (
    Harness,
    RawPeer,
    collect,
    hello,
    long_prompt,
    running_cluster,
    undisturbed,
    until,
)
from google.rpc import status_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protos.pagewire.v1 import worker_pb2

if TYPE_CHECKING:
    from control_plane.request import Request
    from control_plane.token_stream import TokenStream
    from data_plane.stream_protocol import Reaction

Message = worker_pb2.WorkerMessage
CODE = grpc.StatusCode

WRONG_HELLOS: list[tuple[str, dict[str, Any], grpc.StatusCode, str, str]] = [
    ("version", {"protocol_version": 2}, CODE.FAILED_PRECONDITION,
     "UNSUPPORTED_PROTOCOL_VERSION", ""),
    ("worker_id_empty", {"worker_id": ""}, CODE.INVALID_ARGUMENT, "INVALID_HELLO",
     "hello.worker_id"),
    ("worker_id_alphabet", {"worker_id": "a b"}, CODE.INVALID_ARGUMENT, "INVALID_HELLO",
     "hello.worker_id"),
    ("worker_id_newline", {"worker_id": "a\n"}, CODE.INVALID_ARGUMENT, "INVALID_HELLO",
     "hello.worker_id"),
    ("worker_id_long", {"worker_id": "a" * 129}, CODE.INVALID_ARGUMENT, "INVALID_HELLO",
     "hello.worker_id"),
    ("replica_id", {"replica_id": "ä"}, CODE.INVALID_ARGUMENT, "INVALID_HELLO",
     "hello.replica_id"),
    ("rank", {"rank": 1}, CODE.INVALID_ARGUMENT, "INVALID_HELLO", "hello.rank"),
    ("rank_negative", {"rank": -1}, CODE.INVALID_ARGUMENT, "INVALID_HELLO", "hello.rank"),
    ("tp_size_zero", {"tp_size": 0}, CODE.INVALID_ARGUMENT, "INVALID_HELLO", "hello.tp_size"),
    ("tp_size_two", {"tp_size": 2}, CODE.UNIMPLEMENTED, "TENSOR_PARALLEL_NOT_BUILT", ""),
    ("epoch", {"epoch": b"short"}, CODE.INVALID_ARGUMENT, "INVALID_HELLO", "hello.epoch"),
    ("applied_version", {"applied_version": -1}, CODE.INVALID_ARGUMENT, "INVALID_HELLO",
     "hello.applied_version"),
    ("highest_term", {"highest_term": -1}, CODE.INVALID_ARGUMENT, "INVALID_HELLO",
     "hello.highest_term"),
    ("fingerprint_length", {"model_fingerprint": b"x"}, CODE.INVALID_ARGUMENT, "INVALID_HELLO",
     "hello.model_fingerprint"),
    ("fingerprint", {"model_fingerprint": bytes(32)}, CODE.FAILED_PRECONDITION,
     "MODEL_MISMATCH", ""),
    ("num_blocks", {"num_blocks": 1}, CODE.INVALID_ARGUMENT, "INVALID_HELLO",
     "hello.num_blocks"),
    ("num_blocks_absurd", {"num_blocks": 2**31 - 1}, CODE.INVALID_ARGUMENT, "INVALID_HELLO",
     "hello.num_blocks"),
    ("max_num_seqs", {"max_num_seqs": 0}, CODE.INVALID_ARGUMENT, "INVALID_HELLO",
     "hello.max_num_seqs"),
    ("max_model_len", {"max_model_len": 0}, CODE.INVALID_ARGUMENT, "INVALID_HELLO",
     "hello.max_model_len"),
    ("table_absurd", {"max_num_seqs": 1 << 14, "max_num_batched_tokens": 1 << 14,
                      "max_model_len": 1 << 20}, CODE.INVALID_ARGUMENT, "INVALID_HELLO",
     "hello.max_model_len"),
    ("batched_tokens", {"max_num_batched_tokens": 7}, CODE.INVALID_ARGUMENT, "INVALID_HELLO",
     "hello.max_num_batched_tokens"),
    ("device", {"device": "x" * 300}, CODE.INVALID_ARGUMENT, "INVALID_HELLO", "hello.device"),
    ("layers", {"geometry": {"num_layers": 0}}, CODE.INVALID_ARGUMENT, "INVALID_HELLO",
     "hello.kv_geometry.num_layers"),
    ("block_size_odd", {"geometry": {"block_size": 12}}, CODE.INVALID_ARGUMENT, "INVALID_HELLO",
     "hello.kv_geometry.block_size"),
    ("dtype_unknown", {"geometry": {"dtype": "int8"}}, CODE.INVALID_ARGUMENT, "INVALID_HELLO",
     "hello.kv_geometry.dtype"),
    # These differ from what the first worker has pinned.
    ("block_size", {"geometry": {"block_size": 8}}, CODE.FAILED_PRECONDITION,
     "GEOMETRY_MISMATCH", "hello.kv_geometry.block_size"),
    ("heads", {"geometry": {"num_kv_heads": 2}}, CODE.FAILED_PRECONDITION,
     "GEOMETRY_MISMATCH", "hello.kv_geometry.num_kv_heads"),
    ("replica_taken", {"replica_id": "replica-w0"}, CODE.ALREADY_EXISTS, "RANK_TAKEN", ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "code", "reason", "field"),
    [pytest.param(*case[1:], id=case[0]) for case in WRONG_HELLOS],
)
async def test_a_wrong_hello_is_refused_precisely(
    fields: dict[str, Any], code: grpc.StatusCode, reason: str, field: str
) -> None:
    async with running_cluster() as harness, harness.worker():
        await harness.ready()
        async with RawPeer(harness.address) as peer:
            await peer.say(hello(**fields))
            actual_code, actual_reason, metadata = await peer.end()
            assert (actual_code, actual_reason) == (code, reason)
            assert metadata.get("field", "") == field
        assert harness.cluster.num_ready("fake") == 1
        harness.assert_nothing_held()


@pytest.mark.parametrize(
    ("config", "reason"),
    [({"block_size": 16}, "GEOMETRY_MISMATCH"), ({"kv_dtype": "bfloat16"}, "GEOMETRY_MISMATCH")],
)
async def test_flags_pin_the_geometry_before_the_first_worker(
    config: dict[str, Any], reason: str
) -> None:
    async with running_cluster(**config) as harness, RawPeer(harness.address) as peer:
        await peer.say(hello())
        assert (await peer.end())[1] == reason


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (b"\xff\xff\xff", "MALFORMED_MESSAGE"),
        (b"", "HELLO_EXPECTED"),
        (Message(heartbeat=worker_pb2.Heartbeat()).SerializeToString(), "HELLO_EXPECTED"),
        (bytes(5 << 20), "MALFORMED_MESSAGE"),
    ],
    ids=["garbage", "empty", "heartbeat", "oversized"],
)
async def test_a_first_message_that_is_no_hello_ends_the_stream(first: bytes, reason: str) -> None:
    async with running_cluster() as harness, RawPeer(harness.address) as peer:
        await peer.say(first)
        code, actual, _ = await peer.end()
        # grpc itself refuses what is above the limit, before any handler sees it.
        assert actual == reason or code is CODE.RESOURCE_EXHAUSTED


async def test_a_peer_that_says_nothing_is_sent_away() -> None:
    async with running_cluster(lease_s=0.1) as harness, RawPeer(harness.address) as peer:
        assert (await peer.end())[:2] == (CODE.DEADLINE_EXCEEDED, "HELLO_TIMEOUT")


async def test_the_welcome_says_what_was_agreed_and_the_reset_exceeds_what_was_applied() -> None:
    config = {"lookahead": 3, "lease_s": 7.0}
    async with running_cluster(**config) as harness, RawPeer(harness.address) as peer:
        await peer.say(hello(applied_version=41))
        welcome = (await peer.hear()).welcome
        assert (welcome.num_blocks, welcome.lookahead, welcome.lease.seconds) == (64, 3, 7)
        assert (await peer.hear()).reset.version == 42


async def test_the_newest_stream_of_a_worker_id_wins() -> None:
    async with running_cluster() as harness, harness.worker("w0") as old:
        await harness.ready()
        request = harness.request(long_prompt(0), max_tokens=24)
        old.runner.gate.clear()
        stream = harness.cluster.submit(request)
        async with harness.worker("w0"):
            # Its exit code says that the process behind the older stream must not come back.
            old.runner.gate.set()
            assert await old.exited() == 4
            assert await collect(stream) == undisturbed(request)
        harness.assert_nothing_held()


async def test_a_superseded_stream_ends_with_aborted_and_does_not_come_back() -> None:
    async with running_cluster() as harness, RawPeer(harness.address) as old:
        await old.attach(epoch=b"a" * 16)
        async with RawPeer(harness.address) as new, RawPeer(harness.address) as again:
            await new.attach(epoch=b"b" * 16, replica_id="another")
            assert (await old.end())[:2] == (CODE.ABORTED, "SUPERSEDED")
            # Should the process behind it not have heard.
            await again.say(hello(epoch=b"a" * 16))
            assert (await again.end())[:2] == (CODE.ABORTED, "SUPERSEDED")
            assert harness.cluster.num_ready("fake") == 1


async def test_a_process_may_supersede_its_own_stream() -> None:
    async with running_cluster() as harness, RawPeer(harness.address) as old:
        await old.attach()
        async with RawPeer(harness.address) as new:
            await new.attach()
            assert (await old.end())[:2] == (CODE.ABORTED, "SUPERSEDED")
            async with RawPeer(harness.address) as third:
                await third.attach()
                assert harness.cluster.num_ready("fake") == 1


# ---- attached peers that break the rules -------------------------------------------------------


async def submit_to_raw(harness: Harness, peer: RawPeer) -> tuple[Request, TokenStream]:
    """Attach the peer as the only replica and give it one request; its first plan is heard."""
    await peer.attach()
    await harness.ready()
    request = harness.request([10, 11, 12], max_tokens=8)
    stream = harness.cluster.submit(request)
    return request, stream


def result(version: int, **fields: Any) -> Message:
    tokens = fields.pop("tokens", [5])
    defaults = {
        "version": version,
        "counts": bytes([1] * len(tokens)),
        "token_ids": np.array(tokens, dtype="<i4").tobytes(),
    }
    return Message(step_result=worker_pb2.StepResult(**{**defaults, **fields}))


ENDING = [
    ("garbage", b"\xff\xff\xff", "MALFORMED_MESSAGE"),
    ("empty", b"", "MALFORMED_MESSAGE"),
    ("second_hello", hello(), "UNEXPECTED_MESSAGE"),
    ("ack", Message(ack=worker_pb2.Ack(version=2)), "UNEXPECTED_MESSAGE"),
    ("generations", Message(generations=worker_pb2.Generations()), "UNEXPECTED_MESSAGE"),
    ("torn_column", result(2, token_ids=b"\x01\x02\x03"), "MALFORMED_MESSAGE"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("message", "reason"), [pytest.param(*case[1:], id=case[0]) for case in ENDING]
)
async def test_an_unreadable_message_costs_only_its_sender_the_stream(
    message: Message | bytes, reason: str
) -> None:
    async with running_cluster() as harness, RawPeer(harness.address) as peer:
        request, stream = await submit_to_raw(harness, peer)
        async with harness.worker("good"):
            await harness.ready(2)
            await peer.say(message)
            code, actual, _ = await peer.end()
            assert (code, actual) == (CODE.INVALID_ARGUMENT, reason)
            assert await collect(stream) == undisturbed(request)
            assert request.num_losses == 1
            harness.assert_nothing_held()


async def test_an_oversized_message_costs_only_its_sender_the_stream() -> None:
    async with running_cluster() as harness, RawPeer(harness.address) as peer:
        request, stream = await submit_to_raw(harness, peer)
        async with harness.worker("good"):
            await peer.say(result(2, counts=bytes(5 << 20)))
            code, _, _ = await peer.end()
            assert code is not CODE.OK
            assert await collect(stream) == undisturbed(request)
            harness.assert_nothing_held()


RESETTING = [
    ("too_many_counts", result(2, tokens=[5, 6])),
    ("no_counts", result(2, tokens=[])),
    ("count_of_two", result(2, tokens=[5, 6], counts=b"\x02")),
    ("fewer_tokens", result(2, counts=b"\x01\x01")),
    ("outside_vocabulary", result(2, tokens=[512])),
    ("negative_token", result(2, tokens=[-1])),
    ("lonely_reason", result(2, finish_reasons=b"\x01")),
    ("unknown_reason", result(2, finished_rows=bytes(4), finish_reasons=b"\x09")),
    ("descending_rows", result(2, finished_rows=np.array([3, 1], "<i4").tobytes(),
                               finish_reasons=b"\x01\x01")),
    ("second_step", result(2, step=1)),
    ("gap", result(3)),
    ("future", result(99)),
    ("row_that_does_not_exist", result(2, finished_rows=np.array([6], "<i4").tobytes(),
                                       finish_reasons=b"\x01")),
    ("row_out_of_range", result(2, finished_rows=np.array([-5], "<i4").tobytes(),
                                finish_reasons=b"\x01")),
    ("nack", Message(nack=worker_pb2.Nack(version=2, status=status_pb2.Status(message="no")))),
    ("nack_of_the_future", Message(nack=worker_pb2.Nack(version=77))),
    ("step_failed", Message(step_failed=worker_pb2.StepFailed(version=2))),
]  # fmt: skip


@pytest.mark.parametrize("message", [pytest.param(m, id=name) for name, m in RESETTING])
async def test_a_contradiction_is_answered_with_a_reset_and_a_replay(message: Message) -> None:
    async with running_cluster(lookahead=1) as harness, RawPeer(harness.address) as peer:
        request, _ = await submit_to_raw(harness, peer)
        assert (await peer.hear_plan()).version == 2
        assert (await peer.hear_plan()).version == 3
        await peer.say(message)
        assert await peer.hear_reset() == 4
        plan = await peer.hear_plan()
        assert (plan.base_version, plan.version) == (4, 5)
        assert len(plan.added_rows) == 1
        # Leftovers of before the Reset count for nothing.
        await peer.say(result(2))
        await peer.say(Message(nack=worker_pb2.Nack(version=3)))
        await peer.say(result(5, tokens=[7]))
        await until(lambda: request.sequences[0].output_token_ids)
        assert request.sequences[0].output_token_ids == [7]
        assert harness.replica("raw").num_resets == 2
        harness.cluster.abort(request)
        harness.assert_nothing_held()


async def test_three_resets_without_a_confirmed_step_lose_the_replica() -> None:
    async with running_cluster(lookahead=0) as harness, RawPeer(harness.address) as peer:
        request, stream = await submit_to_raw(harness, peer)
        version = (await peer.hear_plan()).version
        # A confirmed step between them starts the count anew.
        for _ in range(2):
            await peer.say(Message(nack=worker_pb2.Nack(version=version)))
            await peer.hear_reset()
            version = (await peer.hear_plan()).version
        expected = undisturbed(request)
        await peer.say(result(version, tokens=expected.token_ids[:1]))
        for _ in range(2):
            version = (await peer.hear_plan()).version
            await peer.say(Message(nack=worker_pb2.Nack(version=version)))
            await peer.hear_reset()
        version = (await peer.hear_plan()).version
        await peer.say(Message(nack=worker_pb2.Nack(version=version)))
        assert (await peer.end())[:2] == (CODE.ABORTED, "TOO_MANY_RESETS")
        async with harness.worker("good"):
            assert await collect(stream) == expected
        harness.assert_nothing_held()


async def test_a_silent_worker_loses_its_lease() -> None:
    async with running_cluster(lease_s=0.3) as harness, harness.worker("good"):
        await harness.ready()
        async with RawPeer(harness.address) as peer:
            await peer.attach()
            await harness.ready(2)
            requests = [harness.request([10 + i, 11, 12], max_tokens=8) for i in range(6)]
            streams = [harness.cluster.submit(r) for r in requests]
            assert (await peer.end())[:2] == (CODE.DEADLINE_EXCEEDED, "LEASE_EXPIRED")
            outputs = await asyncio.gather(*map(collect, streams))
        assert outputs == [undisturbed(r) for r in requests]
        # The other one has heartbeats, and keeps its lease without any work.
        assert harness.cluster.num_ready("fake") == 1
        harness.assert_nothing_held()


async def test_an_idle_worker_hears_heartbeats() -> None:
    async with running_cluster(lease_s=0.3) as harness, RawPeer(harness.address) as peer:
        await peer.attach()
        for _ in range(3):
            assert (await peer.hear()).HasField("heartbeat")
            await peer.say(Message(heartbeat=worker_pb2.Heartbeat()))
        assert harness.cluster.num_ready("fake") == 1


async def test_a_step_that_stays_unconfirmed_loses_a_worker_that_heartbeats() -> None:
    async with running_cluster(lease_s=0.6, step_timeout_s=0.9) as harness:
        worker = harness.worker("stuck")
        worker.start()
        await harness.ready()
        worker.runner.gate.clear()
        request = harness.request(long_prompt(0), max_tokens=24)
        stream = harness.cluster.submit(request)
        await until(lambda: harness.cluster.num_ready("fake") == 0)
        async with harness.worker("good"):
            assert await collect(stream) == undisturbed(request)
        harness.assert_nothing_held()
        await worker.kill()


async def test_nothing_read_after_a_stream_has_ended_counts() -> None:
    async with running_cluster(lease_s=0.3) as harness, RawPeer(harness.address) as peer:
        request, stream = await submit_to_raw(harness, peer)
        version = (await peer.hear_plan()).version
        (engine,) = harness.cluster.fleet
        gone = engine._stream
        assert gone is not None
        await until(lambda: harness.cluster.num_ready("fake") == 0)
        harness.cluster.fleet.receive(engine, gone, result(version))
        async with harness.worker("good"):
            assert await collect(stream) == undisturbed(request)
        harness.assert_nothing_held()


messages = st.one_of(
    st.binary(max_size=40),
    st.builds(
        lambda version, step, counts, tokens, rows, reasons: Message(
            step_result=worker_pb2.StepResult(
                version=version,
                step=step,
                counts=counts,
                token_ids=tokens,
                finished_rows=rows,
                finish_reasons=reasons,
            )
        ).SerializeToString(),
        st.integers(-2, 12) | st.integers(-(2**63), 2**63 - 1),
        st.integers(-1, 2),
        st.binary(max_size=9),
        st.binary(max_size=12),
        st.binary(max_size=12),
        st.binary(max_size=3),
    ),
    st.builds(
        lambda version: Message(nack=worker_pb2.Nack(version=version)).SerializeToString(),
        st.integers(-(2**63), 2**63 - 1) | st.integers(0, 9),
    ),
    st.builds(
        lambda seconds: Message(
            drain=worker_pb2.Drain(grace={"seconds": seconds})
        ).SerializeToString(),
        st.integers(-(2**63), 2**63 - 1),
    ),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(noise=st.lists(messages, max_size=6))
def test_noise_never_disturbs_another_replica(noise: list[bytes]) -> None:
    async def run() -> None:
        async with running_cluster() as harness, RawPeer(harness.address) as peer:
            await peer.attach()
            await harness.ready()
            request = harness.request([10, 11, 12], max_tokens=8)
            stream = harness.cluster.submit(request)
            async with harness.worker("good"):
                await until(lambda: any(r.ready for r in harness.cluster.stats().replicas))
                try:
                    for each in noise:
                        await peer.say(each)
                except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
                    pass
                # Its own request moves on once it is gone, unless the noise forged an output.
                peer.call.cancel()
                await until(lambda: harness.cluster.num_ready("fake") == 1)
                output = await collect(stream)
                other = harness.request(long_prompt(1), max_tokens=24)
                assert await collect(harness.cluster.submit(other)) == undisturbed(other)
                assert output.reason is not None
                harness.assert_nothing_held()

    asyncio.run(run())


async def test_an_idle_worker_hears_heartbeats_within_its_lease() -> None:
    async with running_cluster(lease_s=0.3) as harness, harness.worker("w0") as worker:
        heard: list[str | None] = []
        receive = worker.protocol.receive

        def noted(message: worker_pb2.ControlMessage) -> Reaction:
            heard.append(message.WhichOneof("message"))
            return receive(message)

        worker.protocol.receive = noted  # type: ignore[method-assign]
        # Three leases without any work: a stream that ended would have been dialled again.
        await until(lambda: heard.count("heartbeat") >= 9)
        assert worker.is_serving
        assert harness.replica("w0").num_resets == 1
