"""Python arguments to messages, the same for both clients.

Owns: names and types of options. Does not know: limits; the server says what it refuses and why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from google.protobuf import json_format

from pagewire_client.errors import not_encodable
from protos.pagewire.v1 import inference_pb2

# Text, token ids, or chat messages such as {"role": "user", "content": "Hi"}.
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


class GenerateOptions(TypedDict, total=False):
    """Everything that can go with a prompt. What is left out takes the server's default."""

    model: str
    request_id: str
    priority: int
    cache_salt: str
    adapter: str
    flush_interval_s: float
    add_special_tokens: bool
    # Of chat prompts.
    tools: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool
    template_kwargs: Mapping[str, Any]
    # Sampling.
    n: int
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    stop: str | Iterable[str]
    stop_token_ids: Iterable[int]
    ignore_eos: bool
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    logprobs: int
    prompt_logprobs: int
    logit_bias: Mapping[int, float]
    allowed_token_ids: Iterable[int]
    bad_words: Iterable[str]
    # Of the call.
    timeout_s: float


_REQUEST_FIELDS = frozenset(
    {"model", "request_id", "priority", "cache_salt", "adapter", "add_special_tokens"}
)
_CHAT_FIELDS = frozenset({"tools", "add_generation_prompt", "template_kwargs"})


def build_request(prompt: Prompt, options: GenerateOptions) -> inference_pb2.GenerateRequest:
    """The message for a prompt and its options.

    Raises:
        InvalidRequestError: A text is not valid Unicode, or a number does not fit its field.
        TypeError: An option is unknown.
    """
    values: dict[str, Any] = dict(options)
    try:
        request = inference_pb2.GenerateRequest(
            **{name: values.pop(name) for name in _REQUEST_FIELDS & values.keys()}
        )
        _set_prompt(request, prompt, {k: values.pop(k) for k in _CHAT_FIELDS & values.keys()})
        if (interval_s := values.pop("flush_interval_s", None)) is not None:
            request.flush_interval.FromNanoseconds(int(interval_s * 1e9))
        values.pop("timeout_s", None)
        if isinstance(values.get("stop"), str):
            values["stop"] = [values["stop"]]
        unknown = values.keys() - inference_pb2.SamplingParams.DESCRIPTOR.fields_by_name.keys()
        if unknown:
            raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")
        request.sampling.CopyFrom(inference_pb2.SamplingParams(**values))
    except (ValueError, json_format.ParseError) as error:  # UnicodeEncodeError is a ValueError
        raise not_encodable(error) from None
    return request


def build_chat(
    messages: Iterable[Mapping[str, Any]],
    *,
    tools: Iterable[Mapping[str, Any]] = (),
    add_generation_prompt: bool | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> inference_pb2.Chat:
    """The message for a conversation in OpenAI's shape."""
    chat = inference_pb2.Chat()
    if add_generation_prompt is not None:
        chat.add_generation_prompt = add_generation_prompt
    for message in messages:
        json_format.ParseDict(
            {k: v for k, v in message.items() if v is not None}, chat.messages.add()
        )
    for tool in tools:
        chat.tools.add().update(dict(tool))
    if template_kwargs:
        chat.template_kwargs.update(dict(template_kwargs))
    return chat


def is_chat(prompt: Prompt) -> bool:
    """Whether a prompt is a list of messages."""
    return not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)


def _set_prompt(
    request: inference_pb2.GenerateRequest, prompt: Prompt, chat_options: dict[str, Any]
) -> None:
    if isinstance(prompt, str):
        request.text = prompt
    elif is_chat(prompt):
        messages: Any = prompt
        request.chat.CopyFrom(build_chat(messages, **chat_options))
    else:
        ids: Any = prompt
        request.token_ids.CopyFrom(inference_pb2.TokenIds(ids=ids))


def build_tokenize_request(
    prompt: str | Sequence[Mapping[str, Any]], model: str, add_special_tokens: bool | None
) -> inference_pb2.TokenizeRequest:
    """The message that asks for ids.

    Raises:
        InvalidRequestError: A text is not valid Unicode.
    """
    try:
        request = inference_pb2.TokenizeRequest(model=model)
        if add_special_tokens is not None:
            request.add_special_tokens = add_special_tokens
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.chat.CopyFrom(build_chat(prompt))
    except (ValueError, json_format.ParseError) as error:
        raise not_encodable(error) from None
    return request


def build_detokenize_request(
    token_ids: Iterable[int], model: str, skip_special_tokens: bool | None
) -> inference_pb2.DetokenizeRequest:
    """The message that asks for the text of ids.

    Raises:
        InvalidRequestError: An id does not fit 32 bits.
    """
    try:
        request = inference_pb2.DetokenizeRequest(model=model, token_ids=token_ids)
    except ValueError as error:
        raise not_encodable(error) from None
    if skip_special_tokens is not None:
        request.skip_special_tokens = skip_special_tokens
    return request
