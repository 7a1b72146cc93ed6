"""Every bad input gets the precise code, reason, field, value, limit and remedy, over the wire."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from api_harness import Api, load_catalog_model, read_all, running_api
from google.rpc import error_details_pb2, status_pb2

from protos.pagewire.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from control_plane.model_catalog import CatalogModel

pb = inference_pb2
INVALID = grpc.StatusCode.INVALID_ARGUMENT
SECRET = "zanzibar cormorant"


@pytest.fixture(scope="module")
def model(model_dir: Path) -> CatalogModel:
    """One of its own: tests below put something else into its tokenizer for a while."""
    return load_catalog_model(model_dir)


@pytest.fixture
async def api(model: CatalogModel, model_dir: Path) -> AsyncGenerator[Api]:
    async with running_api(model, model_dir) as api, api.ready_worker():
        yield api


async def refusal(
    api: Api, data: bytes, method: str = "Generate"
) -> tuple[grpc.StatusCode, str, error_details_pb2.ErrorInfo]:
    """Send raw bytes; code, message and ErrorInfo of the refusal."""
    path = f"/pagewire.v1.InferenceService/{method}"
    if method == "Generate":
        answer: Any = read_all(api.channel.unary_stream(path)(data))
    else:
        answer = api.channel.unary_unary(path)(data)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await answer
    details = dict(error.value.trailing_metadata() or ())["grpc-status-details-bin"]
    status = status_pb2.Status.FromString(details)  # type: ignore[arg-type]
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.domain == "pagewire"
    return error.value.code(), status.message, info


def request(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"text": "Hello"} | fields)


def sampling(**fields: Any) -> pb.GenerateRequest:
    return request(sampling=pb.SamplingParams(**fields))


def token_ids(*ids: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids))


def resume(*entries: pb.SequenceResume, **fields: Any) -> pb.GenerateRequest:
    return request(resume=entries, sampling=pb.SamplingParams(max_tokens=4), **fields)


def chat(*messages: pb.ChatMessage, **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(chat=pb.Chat(messages=messages, **fields))


# name -> message, field, value, limit
CASES: dict[str, tuple[pb.GenerateRequest, str, str, str]] = {
    "no prompt": (pb.GenerateRequest(), "prompt", "unset", "one of text, chat, token_ids"),
    "empty text": (request(text=""), "text", "0", ">= 1 token"),
    "no ids": (token_ids(), "token_ids", "0", ">= 1 token"),
    "no messages": (chat(), "chat.messages", "0", ">= 1"),
    "no role": (
        chat(pb.ChatMessage(content="x")),
        "chat.messages[0].role", "", "a role of the chat template",
    ),
    "NUL in text": (request(text="a\0b"), "text", "U+0000", "text without NUL"),
    "NUL in a message": (
        chat(pb.ChatMessage(role="user", content="\0")),
        "chat.messages[0].content", "U+0000", "text without NUL",
    ),
    "id too large": (token_ids(5, 49152), "token_ids[1]", "49152", "[0, 49152)"),
    "id negative": (token_ids(-1), "token_ids[0]", "-1", "[0, 49152)"),
    "temperature NaN": (sampling(temperature=math.nan), "temperature", "nan", "[0, 100]"),
    "temperature negative": (sampling(temperature=-1), "temperature", "-1.0", "[0, 100]"),
    "temperature infinite": (sampling(temperature=math.inf), "temperature", "inf", "[0, 100]"),
    "top_p zero": (sampling(top_p=0), "top_p", "0.0", "(0, 1]"),
    "top_p NaN": (sampling(top_p=math.nan), "top_p", "nan", "(0, 1]"),
    "top_p above one": (sampling(top_p=1.5), "top_p", "1.5", "(0, 1]"),
    "top_k negative": (sampling(top_k=-1), "top_k", "-1", "[0, 2147483647]"),
    "min_p NaN": (sampling(min_p=math.nan), "min_p", "nan", "[0, 1]"),
    "min_p above one": (sampling(min_p=2), "min_p", "2.0", "[0, 1]"),
    "max_tokens zero": (sampling(max_tokens=0), "max_tokens", "0", "[1, 2147483647]"),
    "max_tokens negative": (sampling(max_tokens=-5), "max_tokens", "-5", "[1, 2147483647]"),
    "min above max": (sampling(min_tokens=5, max_tokens=4), "min_tokens", "5", "[0, 4]"),
    "n zero": (sampling(n=0), "n", "0", "[1, 1]"),
    "many stops": (sampling(stop=["x"] * 17), "stop", "17", "16"),
    "long stop": (sampling(stop=["x" * 257]), "stop[0]", "257", "[1, 256]"),
    "empty stop": (sampling(stop=["a", ""]), "stop[1]", "0", "[1, 256]"),
    "stop id": (sampling(stop_token_ids=[49152]), "stop_token_ids[0]", "49152", "[0, 49152)"),
    "long request id": (request(request_id="x" * 129), "request_id", "129", "128"),
    "request id": (request(request_id="ü"), "request_id", "U+00FC", "printable ASCII"),
    "request id newline": (request(request_id="a\n"), "request_id", "U+000A", "printable ASCII"),
    "long salt": (request(cache_salt="é" * 129), "cache_salt", "258", "256"),
    "resume index": (
        resume(pb.SequenceResume(index=1)), "resume[0].index", "1", "[0, 1), each once",
    ),
    "resume twice": (
        resume(pb.SequenceResume(), pb.SequenceResume()),
        "resume[1].index", "0", "[0, 1), each once",
    ),
    "resume id": (
        resume(pb.SequenceResume(token_ids=[1, 99999])),
        "resume[0].token_ids[1]", "99999", "[0, 49152)",
    ),
    "resume too long": (resume(pb.SequenceResume(token_ids=[5] * 5)), "resume", "5", "4"),
    "resume past the end": (resume(pb.SequenceResume(token_ids=[5, 2, 5])), "resume", "3", "2"),
    "resume reason": (
        resume(pb.SequenceResume(finish_reason=9)),  # type: ignore[arg-type]
        "resume[0].finish_reason", "9", "a FinishReason",
    ),
    "template kwarg": (
        chat(pb.ChatMessage(role="user", content="x"), template_kwargs={"messages": 1}),
        "chat.template_kwargs.messages", "messages", "variables of the template",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
async def test_a_bad_value_is_named_with_its_limit(api: Api, name: str) -> None:
    message, field, value, limit = CASES[name]
    code, text, info = await refusal(api, message.SerializeToString())
    assert code is INVALID
    assert info.reason == "INVALID_REQUEST"
    assert (info.metadata["field"], info.metadata["value"]) == (field, value)
    assert info.metadata["limit"] == limit
    assert field.split("[")[0].split(".")[0] in text
    assert len(text.split(". ")) >= 2, "says what to do"
    assert api.is_idle()


UNSUPPORTED: dict[str, dict[str, Any]] = {
    "n": {"n": 2},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": math.nan},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "logprobs": {"logprobs": 0},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "logit_bias": {"logit_bias": {5: 1.0}},
    "allowed_token_ids": {"allowed_token_ids": [5]},
    "bad_words": {"bad_words": ["x"]},
    "structured_output": {"structured_output": pb.StructuredOutput(json_object=True)},
    "beam_search": {"beam_search": pb.BeamSearch(width=2)},
}


@pytest.mark.parametrize("field", [*UNSUPPORTED, "adapter"])
async def test_a_field_that_is_not_built_in_is_refused_by_name(api: Api, field: str) -> None:
    message = request(adapter="a") if field == "adapter" else sampling(**UNSUPPORTED[field])
    code, text, info = await refusal(api, message.SerializeToString())
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert (info.reason, info.metadata["field"]) == ("UNSUPPORTED_FEATURE", field)
    assert field in text


async def test_neutral_values_of_unbuilt_fields_are_accepted(api: Api) -> None:
    message = sampling(repetition_penalty=1, presence_penalty=0, max_tokens=1)
    assert await api.generate(message)


async def test_an_unknown_model_is_not_found(api: Api) -> None:
    code, text, info = await refusal(api, request(model="gpt").SerializeToString())
    assert code is grpc.StatusCode.NOT_FOUND
    assert (info.reason, info.metadata["value"], info.metadata["limit"]) == (
        "UNKNOWN_MODEL", "gpt", "smol",
    )  # fmt: skip
    assert "smol" in text


async def test_an_over_long_prompt_names_both_lengths(api: Api) -> None:
    message = token_ids(*[5] * 8192)
    code, text, info = await refusal(api, message.SerializeToString())
    assert (code, info.reason) == (INVALID, "REQUEST_TOO_LONG")
    assert (info.metadata["value"], info.metadata["limit"]) == ("8192", "8191")
    assert "8192" in text
    assert "Shorten" in text


async def test_a_request_longer_than_any_replica_is_refused_at_once(api: Api) -> None:
    message = token_ids(*[5] * 2048)
    code, text, info = await refusal(api, message.SerializeToString())
    assert (code, info.reason, info.metadata["limit"]) == (INVALID, "REQUEST_TOO_LONG", "2048")
    assert "2048" in text


async def test_a_message_of_10_mb_is_refused_with_its_size(api: Api) -> None:
    message = request(text="x" * 10_000_000)
    code, text, info = await refusal(api, message.SerializeToString())
    assert (code, info.reason) == (INVALID, "REQUEST_TOO_LONG")
    assert info.metadata["field"] == "message"
    assert int(info.metadata["value"]) > 10_000_000
    assert info.metadata["limit"] == str(4 << 20)
    assert "Shorten" in text


async def test_a_message_of_20_mb_is_not_even_read(api: Api) -> None:
    call = api.channel.unary_stream("/pagewire.v1.InferenceService/Generate")(
        request(text="x" * 20_000_000).SerializeToString()
    )
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call.read()
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def with_surrogate(message: Any) -> bytes:
    """Bytes as a client in a careless language sends them: a lone surrogate as three bytes."""
    return message.SerializeToString().replace(b"@@@", b"\xed\xa0\xbd")


async def test_a_lone_surrogate_in_a_text_is_named_by_its_place(api: Api) -> None:
    code, text, info = await refusal(api, with_surrogate(request(text="ab@@@")))
    assert (code, info.metadata["field"], info.metadata["position"]) == (INVALID, "text", "2")
    assert "UTF-8" in text


async def test_a_lone_surrogate_deep_in_a_message_is_named_by_its_path(api: Api) -> None:
    message = chat(
        pb.ChatMessage(role="user", content="fine"), pb.ChatMessage(role="user", content="x@@@")
    )
    _, _, info = await refusal(api, with_surrogate(message))
    assert info.metadata["field"] == "chat.messages[1].content"


async def test_a_lone_surrogate_in_a_stop_string_is_named(api: Api) -> None:
    _, _, info = await refusal(api, with_surrogate(sampling(stop=["a", "@@@"])))
    assert info.metadata["field"] == "sampling.stop[1]"


async def test_bytes_that_are_no_message_are_refused(api: Api) -> None:
    for data in (b"\xff" * 9, b"\x1a\xff\xff\xff\x7f", b"\x07"):
        code, _, info = await refusal(api, data)
        assert (code, info.metadata["field"]) == (INVALID, "message")


async def test_a_template_refuses_with_its_own_message(
    model: CatalogModel, model_dir: Path
) -> None:
    async with running_api(model, model_dir) as api:
        tokenizer = api.model.tokenizer
        template = tokenizer._tokenizer.chat_template
        tokenizer._tokenizer.chat_template = (
            "{% if messages[0].role != 'user' %}{{ raise_exception('Start with a user.') }}"
            "{% endif %}{{ messages[0].content + 1 }}"
        )
        try:
            message = chat(pb.ChatMessage(role="assistant", content=SECRET))
            code, text, info = await refusal(api, message.SerializeToString())
            assert (code, info.metadata["field"]) == (INVALID, "chat")
            assert info.metadata["template_message"] == "Start with a user."
            assert "Start with a user." in text
            # What a template trips over by itself may quote the conversation.
            message = chat(pb.ChatMessage(role="user", content=SECRET))
            _, text, _ = await refusal(api, message.SerializeToString())
            assert "TypeError" in text
            assert SECRET not in text
        finally:
            tokenizer._tokenizer.chat_template = template


@pytest.mark.parametrize("method", ["Tokenize", "Detokenize"])
async def test_the_other_methods_check_as_well(api: Api, method: str) -> None:
    message = (
        pb.TokenizeRequest(text="a\0")
        if method == "Tokenize"
        else pb.DetokenizeRequest(token_ids=[3, 50000])
    )
    code, _, info = await refusal(api, message.SerializeToString(), method)
    assert code is INVALID
    assert info.metadata["field"] == ("text" if method == "Tokenize" else "token_ids[1]")


async def test_no_prompt_and_no_token_reaches_a_log_line_or_an_error(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret_ids = api.encode(SECRET)
    ids = api.expected(secret_ids, max_tokens=6)
    outputs = [api.text(secret_ids, ids)]
    texts: list[str] = []
    await api.client.complete(SECRET, max_tokens=6, temperature=0)
    await api.client.complete(secret_ids, max_tokens=6, temperature=0)
    bad: list[Any] = [
        request(text=SECRET + "\0"),
        request(text=SECRET, sampling=pb.SamplingParams(temperature=-1)),
        request(text=SECRET, model="other"),
        request(text=SECRET, cache_salt=SECRET * 30),
        request(text=SECRET, sampling=pb.SamplingParams(stop=[SECRET * 30])),
        request(text=SECRET * 9000),
        chat(pb.ChatMessage(role="user", content=SECRET + "\0")),
        chat(pb.ChatMessage(role="user", content=SECRET), template_kwargs={"tools": SECRET}),
    ]
    for message in bad:
        _, text, info = await refusal(api, message.SerializeToString())
        texts += [text, str(info)]
    _, text, info = await refusal(api, with_surrogate(request(text=SECRET + "@@@")))
    texts += [text, str(info)]
    # Something nobody planned, with the prompt in its message.
    tokenizer = api.model.tokenizer

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError(SECRET)

    tokenizer.encode = broken  # type: ignore[method-assign]
    try:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await api.generate(request(text=SECRET))
    finally:
        del tokenizer.encode
    assert error.value.code() is grpc.StatusCode.INTERNAL
    texts.append(str(error.value.details()))
    lines = [record.getMessage() + (record.exc_text or "") for record in caplog.records]
    assert any("RuntimeError" in line for line in lines)
    for line in [*lines, *texts]:
        assert SECRET not in line
        assert not any(output in line for output in outputs)
        assert ", ".join(map(str, secret_ids)) not in line
        assert ", ".join(map(str, ids)) not in line
