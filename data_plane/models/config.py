"""What a model is, read from config.json: shapes, rope, biases, windows, stop tokens.

Owns: which architectures and options are supported, and the refusal of everything else by name. A
config that asks for something unknown is never served approximately.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from data_plane.models.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3")
# What transformers takes where Mistral's or Qwen's config.json has no such key (null is "none").
_DEFAULT_SLIDING_WINDOW = 4096
DTYPE_NAMES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding of the whole head.

    Attributes:
        theta: Base of the frequencies.
        rope_type: "default", "linear" or "llama3".
        factor: By which "linear" and "llama3" stretch positions.
        low_freq_factor: llama3 only, as the three below.
        high_freq_factor: Wavelengths shorter than original / this stay as they are.
        original_max_position: Context length before stretching.
    """

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and options of one decoder model. Immutable.

    Attributes:
        architecture: One of SUPPORTED_ARCHITECTURES.
        max_model_len: Positions the model was trained for.
        qkv_bias: Whether q, k and v projections have biases.
        o_bias: Whether the attention output projection has one.
        mlp_bias: Whether the three MLP projections have biases.
        qk_norm: Whether q and k are RMS-normalized per head before rope.
        sliding_window: Keys a query sees in every layer, itself included; None: all.
        tie_word_embeddings: Whether lm_head is the embedding matrix.
        dtype_name: Of the checkpoint, as config.json says; "float32" when it does not.
        eos_token_ids: Ids that end a sequence, ascending; may be empty.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_model_len: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    tie_word_embeddings: bool = False
    dtype_name: str = "float32"
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"):
            if getattr(self, name) <= 0:
                raise ModelError(f"{name} must be positive, got {getattr(self, name)}")
        if self.num_kv_heads <= 0 or self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"num_attention_heads ({self.num_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})"
            )
        if self.head_size <= 0 or self.head_size % 2:
            raise ModelError(f"head_dim must be positive and even, got {self.head_size}")

    @property
    def scale(self) -> float:
        """Factor on attention scores."""
        return self.head_size**-0.5


def load_config(model_dir: Path) -> ModelConfig:
    """Reads config.json and, where present, generation_config.json (for its stop tokens).

    Raises:
        ModelError: a file is missing or malformed, or asks for something unsupported.
    """
    config = _read_object(model_dir / "config.json")
    generation_path = model_dir / "generation_config.json"
    generation = _read_object(generation_path) if generation_path.is_file() else {}
    try:
        return parse_config(config, generation)
    except ModelError as error:
        raise ModelError(f"{model_dir / 'config.json'}: {error}") from error


def parse_config(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Turns the content of config.json into a ModelConfig.

    Both spellings are read: rope_theta and rope_scaling at the top level, and the
    rope_parameters of transformers 5.

    Raises:
        ModelError: the architecture or an option is not supported, or a key is missing.
    """
    architecture = _architecture(config)
    _refuse_unsupported(config)
    num_heads = _integer(config, "num_attention_heads")
    hidden_size = _integer(config, "hidden_size")
    is_llama = architecture == "LlamaForCausalLM"
    attention_bias = bool(config.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_integer(config, "intermediate_size"),
        num_layers=_integer(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(config, is_llama=is_llama),
        head_size=_head_size(config, architecture),
        max_model_len=_integer(config, "max_position_embeddings"),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(config),
        qkv_bias=architecture == "Qwen2ForCausalLM"
        or (attention_bias and architecture != "MistralForCausalLM"),
        o_bias=attention_bias and architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM"),
        mlp_bias=is_llama and bool(config.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        sliding_window=_sliding_window(config, architecture),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        dtype_name=_dtype_name(config),
        eos_token_ids=_eos_token_ids(config, generation or {}),
    )


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    if len(names) == 1 and names[0] in SUPPORTED_ARCHITECTURES:
        return str(names[0])
    raise ModelError(
        f"unsupported architecture {', '.join(map(str, names)) or '(none named)'}; "
        f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
    )


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"unsupported hidden_act {activation!r}; supported: silu")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ModelError(f"unsupported quantization_config (quant_method {method!r})")
    partial = (config.get("rope_parameters") or config).get("partial_rotary_factor", 1.0)
    if partial not in (None, 1.0):
        raise ModelError(f"unsupported partial_rotary_factor {partial}; supported: 1.0")


def _rope(config: Mapping[str, Any]) -> RopeConfig:
    parameters: dict[str, Any] = dict(
        config.get("rope_parameters") or config.get("rope_scaling") or {}
    )
    theta = parameters.get("rope_theta", config.get("rope_theta"))
    if any(isinstance(value, dict) for value in parameters.values()):
        raise ModelError("unsupported rope_parameters: one set per layer type")
    rope_type = str(parameters.get("rope_type") or parameters.get("type") or "default")
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise ModelError(
            f"unsupported rope_type {rope_type!r}; supported: {', '.join(SUPPORTED_ROPE_TYPES)}"
        )
    theta = float(10000.0 if theta is None else theta)
    if rope_type == "default":
        return RopeConfig(theta=theta)
    factor = _rope_number(parameters, "factor", rope_type)
    if rope_type == "linear":
        return RopeConfig(theta=theta, rope_type=rope_type, factor=factor)
    return RopeConfig(
        theta=theta,
        rope_type=rope_type,
        factor=factor,
        low_freq_factor=_rope_number(parameters, "low_freq_factor", rope_type),
        high_freq_factor=_rope_number(parameters, "high_freq_factor", rope_type),
        original_max_position=int(
            _rope_number(parameters, "original_max_position_embeddings", rope_type)
        ),
    )


def _rope_number(parameters: Mapping[str, Any], key: str, rope_type: str) -> float:
    value = parameters.get(key)
    if not isinstance(value, int | float) or value <= 0:
        raise ModelError(f"rope_type {rope_type!r} needs a positive {key!r}, got {value!r}")
    return float(value)


def _num_kv_heads(config: Mapping[str, Any], *, is_llama: bool) -> int:
    # Only Llama's default is the number of query heads; the others' depend on who reads the file.
    if "num_key_value_heads" not in config and not is_llama:
        raise ModelError("needs an integer 'num_key_value_heads'")
    return int(config.get("num_key_value_heads") or _integer(config, "num_attention_heads"))


def _head_size(config: Mapping[str, Any], architecture: str) -> int:
    # transformers' default for Qwen 3, where the key is absent.
    default = 128 if architecture == "Qwen3ForCausalLM" and "head_dim" not in config else None
    derived = _integer(config, "hidden_size") // _integer(config, "num_attention_heads")
    return int(config.get("head_dim") or default or derived)


def _sliding_window(config: Mapping[str, Any], architecture: str) -> int | None:
    window = config.get("sliding_window", _DEFAULT_SLIDING_WINDOW)
    num_layers = int(config.get("num_hidden_layers") or 0)
    if window is None or architecture == "LlamaForCausalLM":
        return None
    if architecture == "MistralForCausalLM":
        sliding_layers = num_layers
    elif not config.get("use_sliding_window", False):
        return None
    elif config.get("layer_types"):
        sliding_layers = sum(kind == "sliding_attention" for kind in config["layer_types"])
    else:
        # Layers below max_window_layers see everything.
        sliding_layers = max(0, num_layers - int(config.get("max_window_layers", 28)))
    if sliding_layers not in (0, num_layers):
        raise ModelError(
            f"unsupported mix of attention: {sliding_layers} of {num_layers} layers have a "
            f"sliding window; supported: all or none"
        )
    return int(window) if sliding_layers else None


def _dtype_name(config: Mapping[str, Any]) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    if name not in DTYPE_NAMES:
        raise ModelError(f"unsupported dtype {name!r}; supported: {', '.join(DTYPE_NAMES)}")
    return name


def _eos_token_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    for source in (generation, config):
        value = source.get("eos_token_id")
        if value is not None:
            return tuple(sorted(set(value) if isinstance(value, list) else {int(value)}))
    return ()


def _integer(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelError(f"needs an integer {key!r}, got {value!r}")
    return value


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing") from error
    except json.JSONDecodeError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value
