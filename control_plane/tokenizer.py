"""Text and chat messages to token ids, as the model's own tokenizer files say.

Works on the files of a local directory and without torch.

Owns: vocabulary, chat template, the tables that detokenizers share. Does not know: requests,
sampling, transports. `text_codec` turns ids back.
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from control_plane.errors import InvalidRequestError
from control_plane.text_codec import TextCodec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from control_plane.detokenizer import Detokenizer

_MAX_TEMPLATE_MESSAGE = 500

# Arguments of the renderer or of the template that are not for clients to set: a template sent by
# a client would be a program.
_RESERVED_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversations",
        "messages",
        "return_assistant_tokens_mask",
        "tools",
    }
)


class Tokenizer:
    """One model's tokenizer. Safe to use from several threads."""

    def __init__(self, path: Path, *, vocab_size: int = 0) -> None:
        """Read a model directory.

        Args:
            path: Holds tokenizer.json and tokenizer_config.json.
            vocab_size: Of the model, where it exceeds the tokenizer's: those ids have no text.

        Raises:
            ValueError: The directory holds no usable tokenizer; the message names it.
        """
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(path), local_files_only=True, trust_remote_code=False
            )
            self._backend: Any = self._tokenizer.backend_tokenizer
        except Exception as error:
            raise ValueError(
                f"{path} holds no tokenizer that can be read without torch "
                f"({type(error).__name__}: {error}). It needs tokenizer.json and "
                f"tokenizer_config.json."
            ) from error
        # Files may carry a truncation of their training time; a prompt is used whole or refused.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.eos_token_id: int | None = self._tokenizer.eos_token_id
        self.has_chat_template = bool(self._tokenizer.chat_template)
        # Every id up to the highest: some vocabularies have holes.
        vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        self.num_tokens = max(vocabulary.values()) + 1
        self._codec = TextCodec(self._backend, vocab_size=max(vocab_size, self.num_tokens))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> NDArray[np.int32]:
        """Ids of a text, int32 [num_tokens].

        Raises:
            InvalidRequestError: The text is no Unicode text: it has a lone surrogate.
        """
        check_text(text, field="text")
        # The batch form gives up the interpreter lock while it encodes, the single form does not.
        # The fast one leaves out which characters each token came from, which nobody asks for.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return np.array(encoding.ids, dtype=np.int32)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """The text that the model's chat template makes of a conversation.

        Raises:
            InvalidRequestError: There is no template, or it refuses the messages; then the message
                is the template's own.
        """
        if not self.has_chat_template:
            raise InvalidRequestError(
                "This model has no chat template. Send the prompt as text or token_ids.",
                field="chat",
                value="chat",
                limit="text or token_ids",
            )
        extra = dict(template_kwargs or {})
        for name in sorted(_RESERVED_KWARGS & extra.keys()):
            raise InvalidRequestError(
                f"chat.template_kwargs may not set {name!r}. Use the fields of the same meaning.",
                field=f"chat.template_kwargs.{name}",
                value=name,
                limit="variables of the template",
            )
        tool_list: Any = [dict(tool) for tool in tools] or None
        # Special tokens such as bos_token are variables of every template.
        variables: dict[str, Any] = {**self._tokenizer.special_tokens_map, **extra}
        template = self._tokenizer.get_chat_template(None, tool_list)
        try:
            rendered, _ = render_jinja_template(
                conversations=[[_with_parsed_arguments(message) for message in messages]],
                tools=tool_list,
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except jinja2.TemplateError as error:
            message = str(error.message or type(error).__name__)[:_MAX_TEMPLATE_MESSAGE]
            raise InvalidRequestError(
                f"The model's chat template refused the conversation: {message}",
                field="chat",
                template_message=message,
            ) from error
        except Exception as error:
            # What else a template can trip over may quote the conversation.
            raise InvalidRequestError(
                f"The model's chat template failed on the conversation with "
                f"{type(error).__name__}. Check roles, the order of the messages and tool calls.",
                field="chat",
                template_message=type(error).__name__,
            ) from None
        return rendered[0]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> NDArray[np.int32]:
        """Ids of a conversation; the template brings the special tokens itself.

        Raises:
            InvalidRequestError: As `render_chat`.
        """
        text = self.render_chat(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=template_kwargs,
        )
        return self.encode(text, add_special_tokens=False)

    def detokenizer(
        self, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> Detokenizer:
        """A detokenizer placed at the end of a prompt, of which the last tokens suffice."""
        return self._codec.detokenizer(prompt_token_ids, skip_special_tokens=skip_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids, exactly what a detokenizer releases in pieces."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        detokenizer.extend(token_ids)
        return detokenizer.text(final=True)


def check_text(text: str, *, field: str) -> None:
    """Refuse what is no text for a model.

    Raises:
        InvalidRequestError: A lone surrogate or a NUL; names its place, never the text.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{field} has a lone surrogate (U+{ord(text[error.start]):04X}) at character "
            f"{error.start}, which is no Unicode text. Remove it or send the whole pair.",
            field=field,
            value=f"U+{ord(text[error.start]):04X}",
            position=error.start,
            limit="valid Unicode",
        ) from None
    if (position := text.find("\0")) != -1:
        raise InvalidRequestError(
            f"{field} has a NUL character at character {position}, which is not accepted in text. "
            "Remove it, or send token_ids if the model was trained on it.",
            field=field,
            value="U+0000",
            position=position,
            limit="text without NUL",
        )


def _with_parsed_arguments(message: Mapping[str, object]) -> dict[str, object]:
    """Tool calls with their arguments as objects: OpenAI's shape has them as a JSON string."""
    calls: Any = message.get("tool_calls")
    if not isinstance(calls, list):
        return dict(message)
    parsed: list[Any] = []
    call: Any
    for call in calls:
        function: Any = call.get("function") if isinstance(call, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError):  # some templates take any string
                call = {**call, "function": {**function, "arguments": json.loads(arguments)}}
        parsed.append(call)
    return {**message, "tool_calls": parsed}
