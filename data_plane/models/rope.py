"""Rotary position embedding, the halves convention of transformers' checkpoints."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from data_plane.models.config import RopeConfig


def rope_inv_freq(rope: RopeConfig, head_size: int, device: torch.device) -> torch.Tensor:
    """Gives [head_size // 2] float32 angular frequencies, scaled as the model asks.

    Source: Su et al., RoFormer, section 3.2; Llama 3.1's reference code for "llama3".
    """
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device=device) / head_size
    inv_freq = 1.0 / rope.theta**exponents
    if rope.rope_type == "linear":
        return inv_freq / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(inv_freq, rope)
    return inv_freq


def rope_cos_sin(
    inv_freq: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives cosines and sines, both [num_tokens, 1, head_size // 2] float32.

    Computed once per step from positions: no table, so no limit on positions.
    """
    angles = positions.to(torch.float32)[:, None, None] * inv_freq
    return angles.cos(), angles.sin()


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates x [num_tokens, num_heads, head_size]; gives a new contiguous tensor of its dtype."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    # fp32 inside, whatever the dtype of x: the products promote.
    out[..., :half] = first * cos - second * sin
    out[..., half:] = second * cos + first * sin
    return out


def _llama3(inv_freq: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    wavelength = 2 * math.pi / inv_freq
    low_wavelength = rope.original_max_position / rope.low_freq_factor
    high_wavelength = rope.original_max_position / rope.high_freq_factor
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq
    stretched = torch.where(wavelength > low_wavelength, inv_freq / rope.factor, blended)
    return torch.where(wavelength < high_wavelength, inv_freq, stretched)
