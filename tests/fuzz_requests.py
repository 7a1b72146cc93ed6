"""Damaged GenerateRequests into the API's way in: refused ones change nothing.

The bytes go through the method's own decoder, then through admission as a call would take it. What
is admitted is left at once, as by a client that cancels, and must give everything back.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

from fuzz_streams import BrokenRuleError, Outcomes
from message_mutator import Mutator

from control_plane.errors import Code, ServingError
from control_plane.message_decoding import MessageDecoder
from control_plane.rpc_status import to_status
from protos.pagewire.v1 import inference_pb2 as pb

if TYPE_CHECKING:
    from api_harness import Api

# Trailers above 8 KiB are refused by clients; these go into them base64-encoded.
MAX_STATUS_BYTES = 4096
EXPECTED = (Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.UNIMPLEMENTED, Code.ALREADY_EXISTS)
# An admitted request gets as far as a plan, so often.
RUN_EVERY = 50


def valid_requests(vocab_size: int) -> list[pb.GenerateRequest]:
    """One of every kind, with every field set somewhere."""
    sampling = pb.SamplingParams(
        n=1, max_tokens=8, min_tokens=1, temperature=0.7, top_p=0.9, top_k=5, min_p=0.01, seed=3,
        stop=["END", "stop"], stop_token_ids=[5, 6], ignore_eos=True, skip_special_tokens=True,
        include_stop_str_in_output=True, repetition_penalty=1.0,
    )  # fmt: skip
    text = pb.GenerateRequest(
        request_id="a", model="smol", text="hello world, how are you?", sampling=sampling,
        priority=2, cache_salt="tenant", add_special_tokens=True,
    )  # fmt: skip
    text.flush_interval.FromMilliseconds(20)
    text.retention.priority = 1
    ids = pb.GenerateRequest(
        request_id="b",
        token_ids=pb.TokenIds(ids=[i % vocab_size for i in range(4, 60)]),
        sampling=pb.SamplingParams(temperature=0.0, max_tokens=4),
    )
    chat = pb.GenerateRequest(request_id="c")
    chat.chat.messages.add(role="system", content="be brief")
    chat.chat.messages.add(role="user", content="hello", name="someone")
    chat.chat.tools.add().update({"name": "f", "parameters": {"type": "object"}})
    chat.chat.template_kwargs.update({"enable_thinking": True, "depth": 3})
    chat.chat.add_generation_prompt = True
    resumed = pb.GenerateRequest()
    resumed.CopyFrom(ids)
    resumed.request_id = "d"
    resumed.resume.add(index=0, token_ids=[7, 8])
    ended = pb.GenerateRequest()
    ended.CopyFrom(resumed)
    ended.resume[0].finish_reason = pb.FINISH_REASON_STOP
    odd = pb.GenerateRequest(text="x", adapter="a", sampling=pb.SamplingParams(logprobs=1))
    odd.sampling.logit_bias[5] = 1.0
    odd.sampling.structured_output.regex = "a+"
    odd.sampling.beam_search.width = 2
    odd.sampling.bad_words.append("bad")
    odd.sampling.allowed_token_ids.append(5)
    return [text, ids, chat, resumed, ended, odd]


async def fuzz_generate_requests(api: Api, count: int, seed: int) -> Outcomes:
    """Damaged messages into decoder and admission of a control plane with a worker."""
    rng = random.Random(seed)
    vocab_size = api.model.served.vocab_size
    valid = valid_requests(vocab_size)
    mutator = Mutator(rng, valid, [vocab_size - 1, vocab_size, 512, 1024])
    decode = MessageDecoder(pb.GenerateRequest, max_bytes=4 << 20)
    outcomes = Outcomes()
    before = _state(api)
    while outcomes.total < count:
        data = mutator.mutate(rng.choice(valid))
        try:
            outcome = await _admit(api, decode(data), runs=outcomes.total % RUN_EVERY == 0)
            if outcome == "admitted and run":
                await _until_idle(api)
            assert _state(api) == before, "a message left a trace"
        except Exception as error:
            raise BrokenRuleError(f"seed {seed}, message {outcomes.total}: {data.hex()}") from error
        outcomes.counts[outcome] += 1
    api.control_plane.cluster.audit()
    return outcomes


async def _admit(api: Api, message: pb.GenerateRequest | ServingError, *, runs: bool) -> str:
    generations = api.control_plane._inference._generations
    try:
        if isinstance(message, ServingError):
            raise message
        async with generations.admit(message, timeout_s=60.0) as generation:
            if runs and not generation.is_finished:
                async for _ in generation.updates():
                    break
                return "admitted and run"
            return "admitted"
    except ServingError as error:
        return _check_refusal(error)


def _check_refusal(error: ServingError) -> str:
    assert error.code in EXPECTED, error
    assert to_status(error).ByteSize() <= MAX_STATUS_BYTES, "the error does not fit a trailer"
    assert "field" in error.metadata or "limit" in error.metadata, error
    return f"refused {error.code.name}"


def _state(api: Api) -> tuple[Any, ...]:
    """What a refused or abandoned request must not change."""
    control_plane = api.control_plane
    generations = control_plane._inference._generations
    stats = control_plane.cluster.stats()
    return (
        len(generations._live),
        generations._held_bytes,
        stats.num_requests_live,
        stats.num_requests_unplaced,
        [(r.num_requests_running, r.num_requests_waiting, r.free_blocks) for r in stats.replicas],
    )


async def _until_idle(api: Api) -> None:
    async with asyncio.timeout(60):
        while not api.is_idle():  # noqa: ASYNC110 - stats, as any user sees them
            await asyncio.sleep(0)


async def fuzz_over_grpc(api: Api, count: int, seed: int, *, num_at_once: int = 16) -> Outcomes:
    """The same messages over real calls: every one ends with a status that says why."""
    rng = random.Random(seed)
    valid = valid_requests(api.model.served.vocab_size)
    mutator = Mutator(rng, valid, [api.model.served.vocab_size])
    start: Any = api.channel.unary_stream("/pagewire.v1.InferenceService/Generate")
    outcomes = Outcomes()
    # ABORTED: a resume among them takes a live id over.
    allowed = {code.name for code in EXPECTED} | {"OK", "ABORTED"}

    async def one(data: bytes) -> str:
        call = start(data, timeout=60.0)
        async for _ in call:
            pass
        return (await call.code()).name

    async def caught(data: bytes) -> str:
        try:
            return await one(data)
        except Exception as error:
            code = getattr(error, "code", None)
            if code is None:
                raise
            return str(code().name)

    while outcomes.total < count:
        batch = [mutator.mutate(rng.choice(valid)) for _ in range(num_at_once)]
        for data, code in zip(batch, await asyncio.gather(*map(caught, batch)), strict=True):
            if code not in allowed:
                raise BrokenRuleError(f"seed {seed}: {code} for {data.hex()}")
            outcomes.counts[code] += 1
    await _until_idle(api)
    api.control_plane.cluster.audit()
    return outcomes
