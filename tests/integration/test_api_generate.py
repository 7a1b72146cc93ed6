"""Generate over real gRPC: tokens, text, stops, coalescing, resume."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from api_harness import Api, running_api
from pagewire_client import build_request

from protos.pagewire.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from control_plane.model_catalog import CatalogModel

STOP, LENGTH = inference_pb2.FINISH_REASON_STOP, inference_pb2.FINISH_REASON_LENGTH


@pytest.fixture
async def api(model: CatalogModel, model_dir: Path) -> AsyncGenerator[Api]:
    async with running_api(model, model_dir) as api, api.ready_worker():
        yield api


def joined(responses: list[inference_pb2.GenerateResponse]) -> tuple[str, list[int]]:
    outputs = [output for response in responses for output in response.outputs]
    return "".join(o.text for o in outputs), [i for o in outputs for i in o.token_ids]


def prompt_with_emoji(api: Api, *, max_tokens: int) -> list[int]:
    """A prompt whose fake continuation has characters that are spread over tokens."""
    for first in range(1000, 3000):
        prompt = [first, 7, 9]
        ids = api.expected(prompt, max_tokens=max_tokens)
        texts = [api.text(prompt, ids[:n]) for n in range(len(ids))]
        if sum(text.endswith("\ufffd") for text in texts) >= 2:
            return prompt
    raise AssertionError("no such prompt")


async def test_the_first_response_carries_id_and_seed_and_the_last_one_usage(api: Api) -> None:
    request = build_request("The capital", {"max_tokens": 5, "seed": 7, "request_id": "mine"})
    responses = await api.generate(request)
    assert (responses[0].request_id, responses[0].seed) == ("mine", 7)
    assert not responses[0].outputs
    assert all(not r.request_id and not r.HasField("seed") for r in responses[1:])
    assert [r.HasField("usage") for r in responses] == [False] * (len(responses) - 1) + [True]
    usage = responses[-1].usage
    assert usage.prompt_tokens == len(api.encode("The capital"))
    assert usage.completion_tokens == 5


async def test_the_first_response_comes_before_any_token(
    model: CatalogModel, model_dir: Path
) -> None:
    async with running_api(model, model_dir) as api:
        call = api.stub.Generate(build_request("x", {"max_tokens": 2}))
        first = await call.read()
        assert first.request_id
        async with api.worker():
            assert (await call.read()).outputs


async def test_text_and_ids_are_those_of_the_worker(api: Api) -> None:
    prompt = api.encode("Once upon a time")
    completion = await api.client.complete("Once upon a time", max_tokens=40, temperature=0)
    ids = api.expected(prompt, max_tokens=40)
    assert completion.token_ids == ids
    assert completion.text == api.text(prompt, ids)
    assert completion.finish_reason == "length"


async def test_a_drawn_seed_gives_the_same_tokens_again(api: Api) -> None:
    first = await api.client.complete([5, 6], max_tokens=8)
    again = await api.client.complete([5, 6], max_tokens=8, seed=first.seed)
    other = await api.client.complete([5, 6], max_tokens=8)
    assert again.token_ids == first.token_ids != other.token_ids


async def test_chat_is_rendered_by_the_template_of_the_model(api: Api) -> None:
    messages = [{"role": "user", "content": "Hi there"}]
    completion = await api.client.chat(messages, max_tokens=4, temperature=0).result()
    text = api.model.tokenizer.render_chat(messages)
    assert "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n" in text
    prompt = api.model.tokenizer.encode(text, add_special_tokens=False).tolist()
    assert await api.client.tokenize(messages) == prompt
    assert completion.token_ids == api.expected(prompt, max_tokens=4)


async def test_no_response_ends_in_half_a_character(api: Api) -> None:
    prompt = prompt_with_emoji(api, max_tokens=60)
    ids = api.expected(prompt, max_tokens=60)
    request = build_request(prompt, {"max_tokens": 60, "temperature": 0})
    received: list[int] = []
    text = ""
    for response in await api.generate(request):
        for output in response.outputs:
            received += output.token_ids
            text += output.text
            # Pure: the text so far is that of the ids so far.
            assert text == api.text(prompt, received)
    assert received == ids


async def test_a_stop_string_over_several_tokens_is_not_leaked(api: Api) -> None:
    prompt = api.encode("Stop here")
    ids = api.expected(prompt, max_tokens=30)
    whole = api.text(prompt, ids)
    text_of_ten, text_of_twelve = api.text(prompt, ids[:10]), api.text(prompt, ids[:12])
    stop = text_of_twelve[len(text_of_ten) - 2 :]
    assert whole.find(stop) == len(text_of_ten) - 2
    request = build_request(prompt, {"max_tokens": 30, "temperature": 0, "stop": stop})
    responses = await api.generate(request)
    text, received = joined(responses)
    assert text == text_of_twelve[: -len(stop)]
    assert received == ids[:12]
    last = responses[-1].outputs[0]
    assert (last.finish_reason, last.stop_string) == (STOP, stop)
    assert responses[-1].usage.completion_tokens == 12


async def test_a_stop_string_can_be_kept(api: Api) -> None:
    prompt = api.encode("Stop here")
    ids = api.expected(prompt, max_tokens=30)
    stop = api.text(prompt, ids[:6])[-4:]
    completion = await api.client.complete(
        prompt, max_tokens=30, temperature=0, stop=stop, include_stop_str_in_output=True
    )
    assert completion.text.endswith(stop)
    assert completion.outputs[0].stop_string == stop


async def test_a_stop_token_is_an_id_without_text(api: Api) -> None:
    prompt = [11, 12, 13]
    ids = api.expected(prompt, max_tokens=30)
    stop_id = ids[9]
    completion = await api.client.complete(
        prompt, max_tokens=30, temperature=0, stop_token_ids=[stop_id]
    )
    first = ids.index(stop_id)
    assert completion.token_ids == ids[: first + 1]
    assert completion.text == api.text(prompt, ids[:first])
    assert completion.outputs[0].stop_token_id == stop_id
    assert completion.finish_reason == "stop"


async def test_a_flush_interval_makes_fewer_responses_of_the_same_text(api: Api) -> None:
    options = {"max_tokens": 200, "temperature": 0, "ignore_eos": True}
    every_step = await api.generate(build_request([3, 4], options))
    request = build_request([3, 4], {**options, "flush_interval_s": 30.0})
    flushed = await api.generate(request)
    assert joined(flushed) == joined(every_step)
    # Id and seed, the first token at once, and all the others at the end.
    assert len(flushed) <= 4 < len(every_step)


async def test_among_many_streams_one_gets_fewer_responses_unless_it_asks_for_every_step(
    api: Api,
) -> None:
    options = {"max_tokens": 200, "temperature": 0, "ignore_eos": True}
    with ExitStack() as others:
        for _ in range(5000):
            others.enter_context(api.control_plane.pace.open())
        left_open = await api.generate(build_request([3, 4], options))
        every_step = await api.generate(build_request([3, 4], {**options, "flush_interval_s": 0.0}))
    assert joined(left_open) == joined(every_step)
    assert len(left_open) < len(every_step) == 201


@pytest.mark.parametrize("cut", [0, 1, 5, 17, 39])
async def test_a_resume_after_some_tokens_equals_the_whole(api: Api, cut: int) -> None:
    prompt = prompt_with_emoji(api, max_tokens=40)
    options = {"max_tokens": 40, "temperature": 1.0, "stop": ["never to be seen"]}
    async with api.client.generate(prompt, **options) as whole_generation:  # type: ignore[arg-type]
        whole = await whole_generation.result()
    # What a client has after some responses of a broken stream.
    generation = api.client.generate(prompt, **options, seed=whole.seed)  # type: ignore[arg-type]
    async for _ in generation:
        if len(generation.log.outputs[0].token_ids) >= cut:
            break
    generation.cancel()
    received = generation.log.outputs[0]
    if cut == 0:
        received.token_ids, received.text = [], ""
    resumed = await api.client.start(generation.log.resume_request()).result()
    rest = resumed.outputs[0] if resumed.outputs else None
    assert rest is not None
    assert received.token_ids + rest.token_ids == whole.token_ids
    assert received.text + rest.text == whole.text
    assert resumed.usage.completion_tokens == 40
    assert resumed.seed == whole.seed


async def test_a_resume_finds_a_stop_string_that_began_before_it(api: Api) -> None:
    prompt = api.encode("Stop here")
    ids = api.expected(prompt, max_tokens=30)
    text_of_ten, text_of_twelve = api.text(prompt, ids[:10]), api.text(prompt, ids[:12])
    stop = text_of_twelve[len(text_of_ten) - 2 :]
    request = build_request(prompt, {"max_tokens": 30, "temperature": 0, "stop": stop})
    # A client that kept ids it had no text for: the stop string begins in what it sends.
    request.resume.add(index=0, token_ids=ids[:10])
    responses = await api.generate(request)
    assert responses[-1].outputs[0].stop_string == stop
    assert joined(responses)[1] == ids[10:12]


async def test_a_resume_of_a_finished_sequence_brings_only_usage(api: Api) -> None:
    request = build_request([5, 6, 7], {"max_tokens": 3, "temperature": 0})
    ids = api.expected([5, 6, 7], max_tokens=3)
    request.resume.add(index=0, token_ids=ids, finish_reason=LENGTH)
    responses = await api.generate(request)
    assert [len(r.outputs) for r in responses] == [0, 0]
    assert responses[-1].usage.completion_tokens == 3


async def test_a_resume_whose_end_was_lost_brings_the_end(api: Api) -> None:
    request = build_request([5, 6, 7], {"max_tokens": 3, "temperature": 0})
    request.resume.add(index=0, token_ids=api.expected([5, 6, 7], max_tokens=3))
    responses = await api.generate(request)
    output = responses[-1].outputs[0]
    assert (output.finish_reason, list(output.token_ids)) == (LENGTH, [])


async def test_a_prefix_hit_is_reported_and_changes_nothing(api: Api) -> None:
    prompt = list(range(100, 180))
    cold = await api.client.complete(prompt, max_tokens=8, temperature=0)
    warm = await api.client.complete(prompt, max_tokens=8, temperature=0)
    assert warm.token_ids == cold.token_ids
    assert (cold.usage.cached_tokens, warm.usage.cached_tokens) == (0, 64)


async def test_another_cache_salt_does_not_hit(api: Api) -> None:
    prompt = list(range(100, 180))
    await api.client.complete(prompt, max_tokens=2, cache_salt="a")
    other = await api.client.complete(prompt, max_tokens=2, cache_salt="b")
    assert other.usage.cached_tokens == 0


async def test_without_max_tokens_a_request_gets_what_the_replicas_can_hold(api: Api) -> None:
    completion = await api.client.complete([5, 6, 7], temperature=0, ignore_eos=True)
    # The worker's max_model_len, which is below the model's.
    assert len(completion.token_ids) == 2048 - 3
    assert completion.finish_reason == "length"


async def test_tokenize_and_detokenize_are_inverse(api: Api) -> None:
    text = "Grüße aus 東京 😀\n"
    ids = await api.client.tokenize(text)
    assert await api.client.detokenize(ids) == text
    assert await api.client.detokenize([1, *ids]) == text
    assert await api.client.detokenize([1, *ids], skip_special_tokens=False) != text
