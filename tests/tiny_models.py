"""Tiny random models of each architecture, as transformers saves and computes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers

if TYPE_CHECKING:
    from pathlib import Path

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
BASE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama-3-rope": ("Llama", {"rope_parameters": LLAMA3_ROPE, "head_dim": 20}),
    "llama-linear-rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}},
    ),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha": ("Llama", {"num_key_value_heads": 6, "head_dim": 10}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 12}),
    "mistral-window": ("Mistral", {"sliding_window": 19}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 18, "max_window_layers": 0},
    ),
    "qwen2-mqa": ("Qwen2", {"num_key_value_heads": 1}),
    "qwen3": ("Qwen3", {"head_dim": 18, "tie_word_embeddings": True}),
    "qwen3-untied": ("Qwen3", {"head_dim": 32, "attention_bias": True}),
}


def make_model(variant: str, directory: Path, **overrides: Any) -> Any:
    """Saves a random model to `directory` and gives transformers' own."""
    family, changes = VARIANTS[variant]
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(**{**BASE, **changes, **overrides})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Fresh norms are 1 and fresh biases 0, which would hide a wrong order of things.
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.25)
    model.save_pretrained(directory)
    return model


@torch.inference_mode()
def reference_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """[num_tokens, vocab_size] float32, computed in the model's dtype where the model is."""
    return model(torch.tensor([token_ids], device=model.device)).logits[0].float()


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 101, (n,), generator=generator).tolist() for n in lengths]
