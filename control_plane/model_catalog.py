"""The models that this control plane serves, read from their directories.

A directory has config.json, tokenizer.json, tokenizer_config.json and the weight files, of which
only the fingerprint is taken. generation_config.json may name the end-of-sequence tokens.

Owns: name -> model. Does not know: replicas, requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from control_plane.errors import InvalidRequestError, UnknownModelError
from control_plane.served_model import ServedModel
from control_plane.tokenizer import Tokenizer
from protos.model_fingerprint import base_fingerprint, read_json_object

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_MAX_NAME_SHOWN = 64


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """One model: what the engine knows of it, and how text becomes its tokens."""

    served: ServedModel
    tokenizer: Tokenizer


class ModelCatalog:
    """The served models by name, in the order of the command line."""

    def __init__(self, models: Iterable[CatalogModel]) -> None:
        """Take the models.

        Raises:
            ValueError: Two have one name, or there are none.
        """
        self.models: dict[str, CatalogModel] = {}
        for model in models:
            if model.served.name in self.models:
                raise ValueError(
                    f"two models are called {model.served.name!r}; name them with one "
                    "--served-model-name per --model"
                )
            self.models[model.served.name] = model
        if not self.models:
            raise ValueError("no model to serve; give at least one --model")

    def find(self, name: str) -> CatalogModel:
        """The model a client means; the empty name means the only one.

        Raises:
            UnknownModelError: No model has that name.
            InvalidRequestError: None is named and there are several.
        """
        if not name and len(self.models) == 1:
            return next(iter(self.models.values()))
        served = ", ".join(self.models)
        if not name:
            raise InvalidRequestError(
                f"model is empty and {len(self.models)} models are served. Name one of: {served}.",
                field="model",
                value="",
                limit=served,
            )
        model = self.models.get(name)
        if model is None:
            shown = name[:_MAX_NAME_SHOWN]
            raise UnknownModelError(
                f"No model is called {shown!r}. Name one of: {served}.",
                field="model",
                value=shown,
                limit=served,
            )
        return model


def load_model(path: Path, name: str) -> CatalogModel:
    """Read one model directory.

    Raises:
        ValueError: It is not a complete model directory; the message says what is missing.
    """
    try:
        config = read_json_object(path / "config.json")
        fingerprint = base_fingerprint(path)
    except FileNotFoundError as error:
        raise ValueError(
            f"{path} is not a complete model directory: {error}. It needs config.json, "
            "tokenizer.json, tokenizer_config.json and the weight files."
        ) from error
    # Multimodal configurations keep the language model's part apart.
    text_config: Any = config.get("text_config")
    if not isinstance(text_config, dict):
        text_config = config
    vocab_size = _positive_int(path, text_config, "vocab_size")
    max_model_len = _positive_int(path, text_config, "max_position_embeddings")
    tokenizer = Tokenizer(path, vocab_size=vocab_size)
    eos_token_ids = _eos_token_ids(path, text_config, tokenizer)
    if not all(0 <= i < vocab_size for i in eos_token_ids):
        raise ValueError(
            f"{path} ends sequences with the tokens {list(eos_token_ids)}, which are not all in "
            f"the vocabulary [0, {vocab_size}). Correct eos_token_id in generation_config.json, or "
            "in config.json if there is no such file."
        )
    served = ServedModel(
        name=name,
        base_fingerprint=fingerprint,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
    )
    return CatalogModel(served, tokenizer)


def _positive_int(path: Path, config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{path}/config.json has no usable {key}: got {value!r}")
    return value


def _eos_token_ids(path: Path, config: dict[str, Any], tokenizer: Tokenizer) -> tuple[int, ...]:
    """As generation_config.json says, else config.json, else the tokenizer."""
    generation = path / "generation_config.json"
    sources = [read_json_object(generation)] if generation.is_file() else []
    for source in (*sources, config, {"eos_token_id": tokenizer.eos_token_id}):
        value = source.get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            return tuple(dict.fromkeys(int(i) for i in ids))
    return ()
