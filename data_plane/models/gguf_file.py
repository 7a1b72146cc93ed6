"""Reads Llama-architecture GGUF files: configuration and dequantized weights under HF names.

Owns: the mapping between llama.cpp's names and layouts and those of transformers. Does not know
torch or where the weights go. The `gguf` package is imported when a file is opened, so that a
worker that serves safetensors needs no such package.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from data_plane.models.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SUPPORTED_ARCHITECTURES = ("llama",)

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_PATTERN = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GgufFile:
    """One open GGUF file of the Llama architecture.

    Tensors are memory-mapped; nothing is dequantized before `tensors` yields it.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file and checks that its architecture is known.

        Raises:
            ModelError: there is no such file, it is no GGUF file, its architecture is not
                supported, or the `gguf` package is missing.
        """
        if not path.is_file():
            raise ModelError(f"{path} does not exist")
        try:
            import gguf
        except ImportError as error:
            raise ModelError(
                f"{path} is a GGUF file and the package 'gguf' is not installed. "
                f"Install it, or convert the model to safetensors elsewhere."
            ) from error
        self.path = path
        self._dequantize = gguf.quants.dequantize
        try:
            self._reader = gguf.GGUFReader(path)
        except (ValueError, KeyError, IndexError) as error:
            raise ModelError(f"{path} is not a readable GGUF file: {error}") from error
        self.architecture = str(self.field("general.architecture", ""))
        if self.architecture not in SUPPORTED_ARCHITECTURES:
            raise ModelError(
                f"{path} has architecture {self.architecture!r}; GGUF files are read for "
                f"{', '.join(SUPPORTED_ARCHITECTURES)} only. Use the model's safetensors instead."
            )
        self._infos = {tensor.name: tensor for tensor in self._reader.tensors}

    def field(self, key: str, default: Any = None) -> Any:
        """Gives a metadata value as plain Python, or `default` when the file has none."""
        entry = self._reader.fields.get(key)
        return default if entry is None else entry.contents()

    def hf_config(self) -> dict[str, Any]:
        """Gives the content of the config.json that transformers would write for this model.

        Raises:
            ModelError: a required key is missing or the rope scaling cannot be expressed.
        """
        num_heads = int(self._required("attention.head_count"))
        hidden_size = int(self._required("embedding_length"))
        head_size = int(
            self._model_field("attention.key_length")
            or self._model_field("rope.dimension_count")
            or hidden_size // num_heads
        )
        if "token_embd.weight" not in self._infos:
            raise ModelError(f"{self.path} has no tensor 'token_embd.weight'")
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": hidden_size,
            "intermediate_size": int(self._required("feed_forward_length")),
            "num_hidden_layers": int(self._required("block_count")),
            "num_attention_heads": num_heads,
            "num_key_value_heads": int(self._model_field("attention.head_count_kv") or num_heads),
            "head_dim": head_size,
            "vocab_size": int(self._infos["token_embd.weight"].shape[1]),
            "max_position_embeddings": int(self._required("context_length")),
            "rms_norm_eps": _shortest(self._required("attention.layer_norm_rms_epsilon")),
            "rope_theta": _shortest(self._model_field("rope.freq_base") or 10000.0),
            "rope_scaling": self._rope_scaling(),
            "attention_bias": "blk.0.attn_q.bias" in self._infos,
            "mlp_bias": False,
            "tie_word_embeddings": "output.weight" not in self._infos,
            "torch_dtype": "float32",
        }
        for name in ("bos", "eos"):
            token_id = self.field(f"tokenizer.ggml.{name}_token_id")
            if token_id is not None:
                config[f"{name}_token_id"] = int(token_id)
        return config

    def tensor_names(self) -> list[str]:
        """Gives the HF name of every tensor, in file order."""
        return [self._hf_name(name) for name in self._infos]

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields (HF name, fp32 array) one by one, q and k in transformers' head layout."""
        num_heads = int(self._required("attention.head_count"))
        num_kv_heads = int(self._model_field("attention.head_count_kv") or num_heads)
        for name, info in self._infos.items():
            hf_name = self._hf_name(name)
            array = np.asarray(self._dequantize(info.data, info.tensor_type), dtype=np.float32)
            if not array.flags.writeable:
                array = array.copy()  # fp32 tensors come as views of the read-only file
            if ".q_proj." in hf_name:
                array = undo_permutation(array, num_heads)
            elif ".k_proj." in hf_name:
                array = undo_permutation(array, num_kv_heads)
            yield hf_name, array

    def _hf_name(self, name: str) -> str:
        if name in _TOP_NAMES:
            return _TOP_NAMES[name]
        match = _LAYER_PATTERN.fullmatch(name)
        if match is None or match[2] not in _LAYER_NAMES:
            raise ModelError(f"{self.path} has an unexpected tensor {name!r}")
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"

    def _rope_scaling(self) -> dict[str, Any] | None:
        # Llama 3.1 files keep its frequencies as this tensor and drop the numbers that made it.
        if "rope_freqs.weight" in self._infos:
            raise ModelError(
                f"{self.path} carries llama3 rope factors as a tensor (rope_freqs.weight), "
                f"which is not read. Use the model's safetensors instead."
            )
        kind = self._model_field("rope.scaling.type") or "none"
        if kind == "none":
            return None
        if kind == "linear":
            return {"rope_type": "linear", "factor": float(self._required("rope.scaling.factor"))}
        raise ModelError(f"{self.path} has rope scaling {kind!r}; supported: none, linear")

    def _model_field(self, key: str) -> Any:
        return self.field(f"{self.architecture}.{key}")

    def _required(self, key: str) -> Any:
        value = self._model_field(key)
        if value is None:
            raise ModelError(f"{self.path} lacks the metadata key {self.architecture}.{key}")
        return value


def undo_permutation(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Turns q or k rows from llama.cpp's interleaved rope pairs into transformers' halves.

    Args:
        weight: [num_heads * head_size, ...] as stored in the file.
        num_heads: Heads along the first axis.

    Returns:
        An array of the same shape.
    """
    rest = weight.shape[1:]
    pairs = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, pairs, 2, *rest).swapaxes(1, 2).reshape(weight.shape)


def _shortest(value: Any) -> float:
    # The file holds fp32; 9.999999747378752e-06 is 1e-05 to everybody who wrote it.
    return float(str(np.float32(value)))
