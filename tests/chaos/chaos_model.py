"""The model of the chaos suite: a llama so small that two cores serve faults and streams at once.

Its weights are random and large, so that a continuation wanders through the vocabulary and depends
on every token before it: a lost token, a doubled one or a wrong block changes what follows within a
few tokens. It goes through the same loader, cache and kernels as any other model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers
from tiny_tokenizers import byte_level

if TYPE_CHECKING:
    from pathlib import Path

MODEL_NAME = "chaos"
MAX_MODEL_LEN = 2112
EOS_TOKEN_ID = 2
_WEIGHT_STD = 0.25
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ bos_token }}{{ message['role'] }}: {{ message['content'] }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ bos_token }}assistant: {% endif %}"
)


def build_model(directory: Path) -> Path:
    """Save model and tokenizer as any checkpoint is; the same bytes every time."""
    tiny = byte_level()
    tokenizer: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tiny.backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=tiny.vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_MODEL_LEN,
        rms_norm_eps=1e-5,
        bos_token_id=1,
        eos_token_id=EOS_TOKEN_ID,
        tie_word_embeddings=False,
        dtype="float32",
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Fresh norms are 1, which would hide one that is left out.
            parameter.normal_(1.0 if "norm" in name else 0.0, _WEIGHT_STD)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
