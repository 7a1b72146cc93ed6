"""config.json in both spellings, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from data_plane.models.config import RopeConfig, parse_config
from data_plane.models.errors import ModelError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def parse(**changes: Any) -> Any:
    return parse_config({**LLAMA, **changes})


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    ],
)
def test_rope_is_read_in_every_spelling(spelling: dict[str, Any]) -> None:
    assert parse(**spelling).rope == RopeConfig(
        theta=5e5,
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position=128,
    )


def test_rope_without_scaling_is_default() -> None:
    assert parse(rope_theta=1e5, rope_scaling=None).rope == RopeConfig(theta=1e5)
    assert parse().rope == RopeConfig(theta=10000.0)


def test_head_size_and_kv_heads_are_derived_when_absent() -> None:
    config = parse_config({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"})
    assert (config.head_size, config.num_kv_heads) == (8, 8)
    assert parse(head_dim=32).head_size == 32
    assert parse(architectures=["Qwen3ForCausalLM"]).head_size == 128


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"sliding_window": 64}, None),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 64}, 64),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, None),
        ({"architectures": ["MistralForCausalLM"]}, 4096),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64}, None),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 64,
                "use_sliding_window": True,
                "max_window_layers": 0,
            },
            64,
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 64,
                "use_sliding_window": True,
                "layer_types": ["full_attention"] * 4,
            },
            None,
        ),
    ],
)
def test_sliding_window_follows_the_architecture(
    changes: dict[str, Any], window: int | None
) -> None:
    assert parse(**changes).sliding_window == window


def test_biases_and_norms_follow_the_architecture() -> None:
    qwen2 = parse(architectures=["Qwen2ForCausalLM"])
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = parse(architectures=["Qwen3ForCausalLM"])
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm) == (False, False, True)
    llama = parse(attention_bias=True, mlp_bias=True)
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)


def test_dtype_is_read_in_both_spellings() -> None:
    assert parse(dtype="bfloat16").dtype_name == "bfloat16"
    assert parse(torch_dtype="float16").dtype_name == "float16"
    assert parse().dtype_name == "float32"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "unsupported architecture GPT2LMHeadModel; supported: LlamaForCausalLM, "
            "MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM",
        ),
        ({"architectures": []}, r"unsupported architecture \(none named\)"),
        ({"hidden_act": "gelu"}, "unsupported hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "unsupported rope_type 'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "unsupported rope_type 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "needs a positive 'factor', got None"),
        ({"rope_parameters": {"full_attention": {}}}, "one set per layer type"),
        ({"partial_rotary_factor": 0.5}, r"unsupported partial_rotary_factor 0\.5"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method 'gptq'"),
        ({"dtype": "float8"}, "unsupported dtype 'float8'"),
        ({"vocab_size": "many"}, "needs an integer 'vocab_size', got 'many'"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads"),
        ({"head_dim": 7}, "head_dim must be positive and even, got 7"),
        ({"num_hidden_layers": 0}, "num_layers must be positive"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "max_window_layers": 3,
            },
            "1 of 4 layers have a sliding window",
        ),
    ],
)
def test_unsupported_config_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse(**changes)
