"""Turns the byte-level BPE tokenizer inside a GGUF file into tokenizer.json.

Owns: tokenizer.json and tokenizer_config.json of a converted model. The result is loaded by
`AutoTokenizer` without torch. Does not know weights.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from data_plane.models.errors import ModelError

if TYPE_CHECKING:
    from data_plane.models.gguf_file import GgufFile

_CONTROL = 3  # token types of the format: 3 control, 4 user defined
_USER_DEFINED = 4

_LLAMA3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def tokenizer_json(file: GgufFile) -> dict[str, Any]:
    """Gives the content of tokenizer.json.

    Raises:
        ModelError: the tokenizer is not byte-level BPE, or splits text in a way not known here.
    """
    kind = file.field("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(
            f"{file.path} has a tokenizer of kind {kind!r}; only byte-level BPE ('gpt2') is "
            f"converted. Put the model's own tokenizer.json beside its safetensors instead."
        )
    tokens: list[str] = file.field("tokenizer.ggml.tokens", [])
    types: list[int] = file.field("tokenizer.ggml.token_type", [1] * len(tokens))
    merges: list[str] = file.field("tokenizer.ggml.merges", [])
    added = [
        {
            "id": token_id,
            "content": tokens[token_id],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": token_type == _CONTROL,
        }
        for token_id, token_type in enumerate(types)
        if token_type in (_CONTROL, _USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": _pre_tokenizer(file),
        "post_processor": _post_processor(file, tokens),
        "decoder": {**_BYTE_LEVEL, "add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": file.field("tokenizer.ggml.pre") == "llama-bpe",
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
        },
    }


def tokenizer_config_json(file: GgufFile, *, max_model_len: int) -> dict[str, Any]:
    """Gives the content of tokenizer_config.json, the chat template inside."""
    tokens: list[str] = file.field("tokenizer.ggml.tokens", [])
    types: list[int] = file.field("tokenizer.ggml.token_type", [1] * len(tokens))
    config: dict[str, Any] = {
        # The generic class: it takes tokenizer.json as it is. A model's own class rebuilds the
        # pre-tokenizer by itself and would lose the split of digits.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_model_len,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "added_tokens_decoder": {
            str(token_id): {
                "content": tokens[token_id],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": token_type == _CONTROL,
            }
            for token_id, token_type in enumerate(types)
            if token_type in (_CONTROL, _USER_DEFINED)
        },
    }
    for key, name in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        token_id = file.field(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{name}_token"] = tokens[int(token_id)]
    template = file.field("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    return config


def dump_json(value: dict[str, Any], *, indent: int | None = 2) -> str:
    """Formats one file of a model directory."""
    return json.dumps(value, ensure_ascii=False, indent=indent) + "\n"


def _pre_tokenizer(file: GgufFile) -> dict[str, Any]:
    pre = file.field("tokenizer.ggml.pre", "default")
    if pre in ("gpt-2", "default"):
        return {**_BYTE_LEVEL, "use_regex": True}
    if pre in ("smollm", "starcoder", "refact", "command-r"):
        digits = {"type": "Digits", "individual_digits": True}
        return {"type": "Sequence", "pretokenizers": [digits, {**_BYTE_LEVEL, "use_regex": True}]}
    if pre == "llama-bpe":
        split = {
            "type": "Split",
            "pattern": {"Regex": _LLAMA3_REGEX},
            "behavior": "Isolated",
            "invert": False,
        }
        return {"type": "Sequence", "pretokenizers": [split, {**_BYTE_LEVEL, "use_regex": False}]}
    raise ModelError(
        f"{file.path} splits text by the rule {pre!r}; known rules: default, gpt-2, smollm, "
        f"starcoder, refact, command-r, llama-bpe. Use the model's own tokenizer.json instead."
    )


def _post_processor(file: GgufFile, tokens: list[str]) -> dict[str, Any]:
    if not file.field("tokenizer.ggml.add_bos_token", False):
        return {**_BYTE_LEVEL, "trim_offsets": False, "use_regex": True}
    bos_id = int(file.field("tokenizer.ggml.bos_token_id"))
    bos = tokens[bos_id]
    first: dict[str, Any] = {"SpecialToken": {"id": bos, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            first,
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }
