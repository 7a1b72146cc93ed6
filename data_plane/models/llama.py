"""The Llama family: Llama, Mistral, Qwen 2 and Qwen 3 in one forward pass.

Owns: merged weights in memory and the arithmetic of a layer. Does not know where the KV cache
lies (the attention backend does), what is sampled, or files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch.nn import functional

from data_plane.attention.base import AttentionSpec
from data_plane.models.linear import Linear
from data_plane.models.rope import apply_rope, rope_cos_sin, rope_inv_freq

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from data_plane.attention.base import AttentionBackend, AttentionMetadata
    from data_plane.attention.triton_backend import TritonAttention
    from data_plane.models.config import ModelConfig


class Layer:
    """Weights of one decoder layer; q, k and v are one matrix, gate and up another."""

    __slots__ = ("down", "gate_up", "input_norm", "k_norm", "mlp_norm", "out", "q_norm", "qkv")

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        def linear(out_features: int, in_features: int, *, bias: bool) -> Linear:
            return Linear(empty(out_features, in_features), empty(out_features) if bias else None)

        hidden = config.hidden_size
        q_size = config.num_heads * config.head_size
        kv_size = config.num_kv_heads * config.head_size
        self.input_norm = empty(hidden)
        self.qkv = linear(q_size + 2 * kv_size, hidden, bias=config.qkv_bias)
        self.q_norm = empty(config.head_size) if config.qk_norm else None
        self.k_norm = empty(config.head_size) if config.qk_norm else None
        self.out = linear(hidden, q_size, bias=config.o_bias)
        self.mlp_norm = empty(hidden)
        self.gate_up = linear(2 * config.intermediate_size, hidden, bias=config.mlp_bias)
        self.down = linear(hidden, config.intermediate_size, bias=config.mlp_bias)


class LlamaModel:
    """A decoder-only transformer over a paged KV cache.

    Weights are allocated empty; `data_plane.models.loader` fills them through
    `checkpoint_tensors` and then calls `finish_loading`.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = torch.empty(shape, dtype=dtype, device=device)
        self.layers = [Layer(config, dtype, device) for _ in range(config.num_layers)]
        self.norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
        head = self.embedding
        if not config.tie_word_embeddings:
            head = torch.empty(shape, dtype=dtype, device=device)
        self.lm_head = Linear(head)
        self.inv_freq = rope_inv_freq(config.rope, config.head_size, device)

    def checkpoint_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the name of each tensor in a checkpoint with the memory it belongs in.

        Merged matrices appear as the views that their parts fill. Valid before `finish_loading`.
        """
        config = self.config
        yield "model.embed_tokens.weight", self.embedding
        if not config.tie_word_embeddings:
            yield "lm_head.weight", _weight(self.lm_head)
        yield "model.norm.weight", self.norm
        q_size = config.num_heads * config.head_size
        kv_size = config.num_kv_heads * config.head_size
        qkv_parts = (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size))
        gate_up_parts = tuple((name, config.intermediate_size) for name in ("gate_proj", "up_proj"))
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}"
            yield f"{prefix}.input_layernorm.weight", layer.input_norm
            yield f"{prefix}.post_attention_layernorm.weight", layer.mlp_norm
            yield from _parts(layer.qkv, f"{prefix}.self_attn", qkv_parts)
            yield from _parts(layer.out, f"{prefix}.self_attn", (("o_proj", config.hidden_size),))
            if layer.q_norm is not None and layer.k_norm is not None:
                yield f"{prefix}.self_attn.q_norm.weight", layer.q_norm
                yield f"{prefix}.self_attn.k_norm.weight", layer.k_norm
            yield from _parts(layer.gate_up, f"{prefix}.mlp", gate_up_parts)
            yield from _parts(layer.down, f"{prefix}.mlp", (("down_proj", config.hidden_size),))

    def finish_loading(self) -> None:
        """Lays weights out for this device; called once, when all of them are there."""
        for layer in self.layers:
            for linear in (layer.qkv, layer.out, layer.gate_up, layer.down):
                linear.pack()
        # A tied head shares its memory with the embedding, which is read by rows.
        self.lm_head.pack(keep_weight=self.config.tie_word_embeddings)

    def attention_spec(self, block_size: int) -> AttentionSpec:
        """Gives what an attention backend must do for this model."""
        config = self.config
        return AttentionSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            scale=config.scale,
            sliding_window=config.sliding_window,
            dtype=self.dtype,
            block_size=block_size,
            device=self.device,
        )

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        backend: AttentionBackend,
        metadata: AttentionMetadata,
        logits_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Runs one step: writes the tokens' keys and values, gives logits where asked.

        Args:
            token_ids: [num_tokens] int64.
            positions: [num_tokens] int64, of each token within its sequence.
            kv_caches: One tensor per layer, of the backend's shape; written in place.
            backend: Made for `attention_spec` of this model.
            metadata: What the backend built for this step.
            logits_rows: [n] int64, indices into the token dimension.

        Returns:
            [n, vocab_size] float32.
        """
        hidden = self.forward_hidden(token_ids, positions, kv_caches, backend, metadata)
        # Only the rows that are sampled pay for the largest matrix.
        return self.compute_logits(hidden[logits_rows]).float()

    @torch.inference_mode()
    def forward_hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        backend: AttentionBackend,
        metadata: AttentionMetadata,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs all layers; arguments as of `forward`.

        Returns:
            [num_tokens, hidden_size], what `compute_logits` takes; `out` if given.
        """
        if backend.name == "triton":
            # Imported where it is used: a worker without a GPU needs no triton.
            from data_plane.models import fused_forward

            triton = cast("TritonAttention", backend)
            return fused_forward.forward_hidden(
                self, token_ids, positions, kv_caches, triton, metadata, out
            )
        config = self.config
        eps = config.rms_norm_eps
        num_tokens = token_ids.shape[0]
        num_q, num_kv, head_size = config.num_heads, config.num_kv_heads, config.head_size
        q_size = num_q * head_size
        attended = torch.empty(
            (num_tokens, num_q, head_size), dtype=self.dtype, device=token_ids.device
        )
        cos, sin = rope_cos_sin(self.inv_freq, positions)
        hidden = self.embedding[token_ids]
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            qkv = layer.qkv(_rms_norm(hidden, layer.input_norm, eps))
            heads = qkv.view(num_tokens, num_q + 2 * num_kv, head_size)
            query, key = heads[:, :num_q], heads[:, num_q : num_q + num_kv]
            if layer.q_norm is not None and layer.k_norm is not None:
                query = apply_rope(_rms_norm(query, layer.q_norm, eps), cos, sin)
                key = apply_rope(_rms_norm(key, layer.k_norm, eps), cos, sin)
            else:
                rotated = apply_rope(heads[:, : num_q + num_kv], cos, sin)
                query, key = rotated[:, :num_q], rotated[:, num_q:]
            backend.write_kv(kv_cache, key, heads[:, num_q + num_kv :], metadata.slot_mapping)
            backend.forward(query, kv_cache, metadata, attended)
            hidden = hidden + layer.out(attended.view(num_tokens, q_size))
            gate_up = layer.gate_up(_rms_norm(hidden, layer.mlp_norm, eps))
            gate, up = gate_up.split(config.intermediate_size, dim=-1)
            hidden = hidden + layer.down(functional.silu(gate) * up)
        return hidden if out is None else out.copy_(hidden)

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Gives [n, vocab_size] of hidden states [n, hidden_size].

        float32 on the CPU, the model's dtype on a GPU, where reading them twice as wide would take
        the sampler twice as long.
        """
        if self.device.type == "cuda":
            from data_plane.models import fused_forward

            return self.lm_head(fused_forward.final_norm(self, hidden))
        return self.lm_head(_rms_norm(hidden, self.norm, self.config.rms_norm_eps)).float()


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return functional.rms_norm(x, weight.shape, weight, eps)


def _weight(linear: Linear) -> torch.Tensor:
    if linear.weight is None:
        raise RuntimeError("the weights were laid out already; nothing can be loaded into them")
    return linear.weight


def _parts(
    linear: Linear, prefix: str, parts: Sequence[tuple[str, int]]
) -> Iterator[tuple[str, torch.Tensor]]:
    start = 0
    for name, size in parts:
        yield f"{prefix}.{name}.weight", _weight(linear)[start : start + size]
        if linear.bias is not None:
            yield f"{prefix}.{name}.bias", linear.bias[start : start + size]
        start += size
