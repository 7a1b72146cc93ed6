"""Prompts to token ids, in whatever form they come.

Owns: how messages of the API become what a chat template sees. Does not know: sampling, limits of
a model's length, live requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from google.protobuf import json_format

from control_plane.errors import InvalidRequestError
from control_plane.request_checks import check_prompt_length, checked_ids
from control_plane.tokenizer import check_text
from protos.pagewire.v1 import inference_pb2

if TYPE_CHECKING:
    from google.protobuf.struct_pb2 import Struct
    from numpy.typing import NDArray

    from control_plane.encoding_pool import EncodingPool
    from control_plane.model_catalog import CatalogModel

PromptMessage = inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest


async def encode_prompt(
    message: PromptMessage, model: CatalogModel, pool: EncodingPool, *, tenant: str = ""
) -> NDArray[np.int32]:
    """Ids of the prompt in whatever form it came, at least one.

    Raises:
        InvalidRequestError: It is missing, empty or malformed.
        OverloadedError: Too much waits for tokenization.
    """
    form = message.WhichOneof("prompt")
    if form == "text":
        ids = await _encode_text(message, model, pool, tenant)
    elif form == "chat":
        ids = await _encode_chat(message.chat, model, pool, tenant)
    elif form == "token_ids" and isinstance(message, inference_pb2.GenerateRequest):
        check_prompt_length(len(message.token_ids.ids), model.served)  # before looking at each
        ids = checked_ids(message.token_ids.ids, "token_ids", model.served.vocab_size)
    else:
        raise InvalidRequestError(
            "The request has no prompt. Set one of text, chat or token_ids.",
            field="prompt",
            value="unset",
            limit="one of text, chat, token_ids",
        )
    if not ids.size:
        raise InvalidRequestError(
            f"The prompt is empty: {form} gives 0 tokens, at least 1 is needed. Send some text "
            "or a token id.",
            field=form,
            value=0,
            limit=">= 1 token",
        )
    _check_vocabulary(ids, form, model.served.vocab_size)
    return ids


def _check_vocabulary(ids: NDArray[np.int32], form: str, vocab_size: int) -> None:
    """Refuse tokens that the tokenizer has and the model has not, such as added padding tokens.

    Raises:
        InvalidRequestError: Names the id, not the text.
    """
    highest = int(ids.max())
    if highest >= vocab_size:
        raise InvalidRequestError(
            f"The {form} gives token id {highest}, which the tokenizer has but the model has not: "
            f"its vocabulary is [0, {vocab_size}). Leave that special token out.",
            field=form,
            value=highest,
            limit=f"[0, {vocab_size})",
        )


async def _encode_text(
    message: PromptMessage, model: CatalogModel, pool: EncodingPool, tenant: str
) -> NDArray[np.int32]:
    text = message.text
    check_text(text, field="text")
    if not text:
        return np.empty(0, np.int32)
    special = message.add_special_tokens if message.HasField("add_special_tokens") else True
    return await pool.run(
        len(text),
        lambda: model.tokenizer.encode(text, add_special_tokens=special),
        tenant=tenant,
    )


async def _encode_chat(
    chat: inference_pb2.Chat, model: CatalogModel, pool: EncodingPool, tenant: str
) -> NDArray[np.int32]:
    if not chat.messages:
        raise InvalidRequestError(
            "The chat has no messages, at least 1 is needed. Add a message of role user.",
            field="chat.messages",
            value=0,
            limit=">= 1",
        )
    limit = model.served.max_model_len
    if len(chat.messages) > limit:
        raise InvalidRequestError(
            f"The chat has {len(chat.messages)} messages, at most {limit} are accepted: no more "
            "than the model has places for tokens. Leave out the oldest.",
            field="chat.messages",
            value=len(chat.messages),
            limit=limit,
        )

    def encode() -> NDArray[np.int32]:
        messages = [
            _chat_message(message, f"chat.messages[{i}]") for i, message in enumerate(chat.messages)
        ]
        return model.tokenizer.encode_chat(
            messages,
            tools=[_object(tool, f"chat.tools[{i}]") for i, tool in enumerate(chat.tools)],
            add_generation_prompt=(
                chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
            ),
            template_kwargs=_object(chat.template_kwargs, "chat.template_kwargs"),
        )

    # All of it: a long conversation costs as much before the template as in it.
    return await pool.run(chat.ByteSize(), encode, tenant=tenant)


def _object(struct: Struct, field: str) -> dict[str, object]:
    """A JSON object with integers where the numbers are whole; NaN has no place in JSON.

    Raises:
        InvalidRequestError: A number is not finite, or a text is none.
    """
    try:
        value = json_format.MessageToDict(struct)
    except (ValueError, json_format.Error):
        raise InvalidRequestError(
            f"{field} is not JSON: it has a number that is not finite, or an unset value. Remove "
            "it.",
            field=field,
            limit="a JSON object",
        ) from None
    _check_texts(value, field)
    return value


def _check_texts(value: object, field: str) -> None:
    if isinstance(value, str):
        check_text(value, field=field)
    elif isinstance(value, dict):
        for key, item in value.items():
            check_text(str(key), field=field)
            _check_texts(item, field)
    elif isinstance(value, list):
        for item in value:
            _check_texts(item, field)


def _chat_message(message: inference_pb2.ChatMessage, field: str) -> dict[str, object]:
    for name in ("role", "content", "name", "tool_call_id"):
        check_text(getattr(message, name), field=f"{field}.{name}")
    if not message.role:
        raise InvalidRequestError(
            f"{field}.role is empty. Use system, user, assistant or tool.",
            field=f"{field}.role",
            value="",
            limit="a role of the chat template",
        )
    # What is unset is absent, as templates ask `is defined`.
    result: dict[str, object] = {"role": message.role, "content": message.content}
    if message.name:
        result["name"] = message.name
    if message.tool_call_id:
        result["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        result["tool_calls"] = [
            _object(call, f"{field}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)
        ]
    return result
