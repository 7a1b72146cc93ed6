"""Model shapes, workloads, floors and targets of the GPU benchmarks.

The shapes are those of published models, with random weights; the workloads those that the peers'
figures in docs/performance.md were measured with.
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "use_sliding_window": False,
        "sliding_window": None,
        "eos_token_id": 151645,
        "torch_dtype": "bfloat16",
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "eos_token_id": 128001,
        "torch_dtype": "bfloat16",
    },
    # For trying the benchmark itself where there is no GPU.
    "tiny": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    },
}
DECODE_BATCHES = (1, 8, 32, 128, 256)
DECODE_CONTEXT, DECODE_STEPS = 1024, 128
PREFILL_LENGTHS = (128, 1024, 8192)
MAX_MODEL_LEN = 33792
# One H200, measured in the same way as everything else: bytes/s of a copy, FLOP/s of 8192^3 bf16.
COPY_BYTES_PER_S, MATMUL_FLOPS_PER_S = 4.25e12, 667e12

# (must, aim, a peer's figure on the same kind of GPU); ms, and output tokens/s.
TARGETS: dict[tuple[str, str, int], tuple[float, float, float]] = {
    ("qwen3-0.6b", "decode", 1): (1.2, 0.95, 1.77),
    ("qwen3-0.6b", "decode", 8): (1.4, 1.1, 1.83),
    ("qwen3-0.6b", "decode", 32): (2.1, 1.8, 2.66),
    ("qwen3-0.6b", "decode", 128): (5.0, 4.7, 5.73),
    ("qwen3-0.6b", "decode", 256): (9.2, 8.8, 10.02),
    ("llama-3.1-8b", "decode", 1): (4.5, 4.2, 4.94),
    ("llama-3.1-8b", "decode", 8): (4.8, 4.5, 5.23),
    ("llama-3.1-8b", "decode", 32): (5.9, 5.6, 6.24),
    ("llama-3.1-8b", "decode", 128): (9.9, 9.4, 10.40),
    ("llama-3.1-8b", "decode", 256): (16.8, 16.0, 17.35),
    ("qwen3-0.6b", "ttft", 128): (5.0, 3.0, 11.8),
    ("qwen3-0.6b", "ttft", 1024): (8.0, 5.0, 24.8),
    ("llama-3.1-8b", "ttft", 128): (8.0, 5.5, 9.7),
    ("llama-3.1-8b", "ttft", 1024): (29.0, 26.0, 28.1),
    ("llama-3.1-8b", "ttft", 8192): (240.0, 225.0, 214.0),
    ("qwen3-0.6b", "throughput", 256): (25_000, 28_000, 22_860),
    ("llama-3.1-8b", "throughput", 256): (9_700, 10_200, 9_730),
}


def write_model(name: str, root: Path) -> Path:
    """Make a directory with config.json alone: weights are random."""
    path = root / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(MODELS[name], indent=1), encoding="utf-8")
    return path


def step_bytes(name: str, batch: int, context: float) -> float:
    """Bytes that a decode step in bf16 has to read: weights and KV."""
    config = MODELS[name]
    kv_bytes = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    return 2 * _num_weights(config) + batch * context * kv_bytes


def prefill_flops(name: str, num_tokens: int) -> float:
    """Matrix operations of a causal prefill, logits for the last token only."""
    config = MODELS[name]
    body = _num_weights(config) - config["vocab_size"] * config["hidden_size"]
    attention = 4 * config["num_hidden_layers"] * config["num_attention_heads"] * config["head_dim"]
    head = 2 * config["vocab_size"] * config["hidden_size"]
    return num_tokens * 2 * body + head + attention * num_tokens * (num_tokens + 1) // 2


def throughput_requests(count: int = 256) -> tuple[list[list[int]], list[int]]:
    """Prompts and output lengths of nano-vllm's published benchmark, in its random order."""
    generator = random.Random(0)
    prompts = [
        [generator.randint(0, 10000) for _ in range(generator.randint(100, 1024))]
        for _ in range(count)
    ]
    return prompts, [generator.randint(100, 1024) for _ in range(count)]


def uniform_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randint(0, 10000) for _ in range(length)] for _ in range(count)]


def _num_weights(config: dict[str, Any]) -> int:
    # An embedding that is not the head is a gather of a few rows.
    hidden, head_size = config["hidden_size"], config["head_dim"]
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    layer = hidden * head_size * (num_heads + 2 * num_kv_heads) + num_heads * head_size * hidden
    layer += 3 * hidden * config["intermediate_size"]
    return config["num_hidden_layers"] * layer + config["vocab_size"] * hidden
