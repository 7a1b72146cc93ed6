"""The layers of a model on our own kernels: what a GPU runs.

Owns: the order of launches. Additions go into the norms behind them, rotation and cache write into
one pass, so that a layer is four matrix products, four small kernels and attention. Computes what
`LlamaModel.forward_hidden` does in plain torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.rms_norm import rms_norm
from kernels.rotary_and_cache import rotary_and_cache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from data_plane.attention.base import AttentionMetadata
    from data_plane.attention.triton_backend import TritonAttention
    from data_plane.models.llama import LlamaModel


def forward_hidden(
    model: LlamaModel,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    kv_caches: Sequence[torch.Tensor],
    backend: TritonAttention,
    metadata: AttentionMetadata,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `LlamaModel.forward_hidden`; every entry of kv_caches is keys, then values."""
    config, layers = model.config, model.layers
    eps = config.rms_norm_eps
    num_tokens = token_ids.shape[0]
    residual = model.embedding.index_select(0, token_ids)
    normed = torch.empty_like(residual)
    query = residual.new_empty(num_tokens, config.num_heads, config.head_size)
    attended = torch.empty_like(query)
    activated = residual.new_empty(num_tokens, config.intermediate_size)
    rms_norm(residual, layers[0].input_norm, eps=eps, out=normed)
    for index, (layer, kv_cache) in enumerate(zip(layers, kv_caches, strict=True)):
        rotary_and_cache(
            layer.qkv(normed),
            positions,
            model.inv_freq,
            metadata.slot_mapping,
            kv_cache[0],
            kv_cache[1],
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=eps,
            query=query,
        )
        backend.forward(query, kv_cache, metadata, attended, settled=True)
        product = layer.out(attended.view(num_tokens, -1))
        rms_norm(product, layer.mlp_norm, eps=eps, residual=residual, out=normed)
        product = layer.down(layer.gate_up.gated(normed, out=activated))
        if index + 1 < len(layers):
            next_norm = layers[index + 1].input_norm
            rms_norm(product, next_norm, eps=eps, residual=residual, out=normed)
        else:
            torch.add(residual, product, out=residual if out is None else out)
    return residual if out is None else out


def final_norm(model: LlamaModel, hidden: torch.Tensor) -> torch.Tensor:
    """Hidden states as the last matrix takes them."""
    return rms_norm(hidden, model.norm, eps=model.config.rms_norm_eps, out=torch.empty_like(hidden))
