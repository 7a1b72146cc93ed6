"""The layers on our own kernels against plain torch; in Triton's interpreter where no GPU is."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

import pytest
import torch
from paged import attention_inputs, scattered_tables
from tiny_models import make_model

from data_plane.attention.torch_backend import TorchAttention
from data_plane.attention.triton_backend import TritonAttention
from data_plane.models.loader import load_model

if TYPE_CHECKING:
    from pathlib import Path

BLOCK_SIZE = 16
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("variant", ["llama-3-rope", "llama-biases", "qwen3", "mistral-window"])
@torch.inference_mode()
def test_fused_layers_compute_what_plain_torch_does(variant: str, tmp_path: Path) -> None:
    make_model(
        variant, tmp_path, head_dim=64, hidden_size=96, intermediate_size=112, num_hidden_layers=2
    )
    model = load_model(tmp_path, device=DEVICE).model
    spec = model.attention_spec(BLOCK_SIZE)
    tables = scattered_tables(2, 3, 16)
    outputs: list[list[torch.Tensor]] = []
    for backend in (TorchAttention(spec), TritonAttention(spec)):
        shape = backend.get_kv_cache_shape(16, BLOCK_SIZE, spec.num_kv_heads, spec.head_size)
        caches = [torch.zeros(shape, device=DEVICE) for _ in model.layers]
        outputs.append([])
        # A prefill beside a shorter one, a chunk beside a decode, decodes.
        for computed, new in (([0, 0], [20, 3]), ([20, 3], [17, 1]), ([37, 4], [1, 1])):
            batch = attention_inputs(
                num_computed=computed, num_new=new, block_tables=tables, block_size=BLOCK_SIZE
            )
            tensors = {field.name: getattr(batch, field.name) for field in fields(batch)}
            moved = {k: v.to(DEVICE) for k, v in tensors.items() if isinstance(v, torch.Tensor)}
            batch = replace(batch, **moved)
            token_ids = torch.arange(batch.num_tokens, device=DEVICE) % 101
            hidden = model.forward_hidden(
                token_ids, batch.positions, caches, backend, backend.build_metadata(batch)
            )
            outputs[-1].append(hidden)
        outputs[-1] += caches
    for plain, fused in zip(*outputs, strict=True):
        torch.testing.assert_close(fused, plain, atol=2e-4, rtol=2e-4)
