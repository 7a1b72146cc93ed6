"""A model directory with a tokenizer, a chat template and no weights worth the name.

For tests of the control plane that need a real tokenizer and no real model: nothing is downloaded
or converted, and it loads in a moment.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tiny_tokenizers import ALL

if TYPE_CHECKING:
    from pathlib import Path

EOS_TOKEN_ID = 2
MAX_MODEL_LEN = 512
_CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}</s>"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def write_tiny_model(directory: Path) -> Path:
    """Fill a directory and return it."""
    tiny = ALL["byte_level"]
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "llama",
        "vocab_size": tiny.vocab_size,
        "max_position_embeddings": MAX_MODEL_LEN,
        "eos_token_id": EOS_TOKEN_ID,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "chat_template": _CHAT_TEMPLATE,
    }
    tiny.backend.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (directory / "model.safetensors").write_bytes(b"no weights")
    return directory
