"""Matrix products with weights that stay the same: the seam where a device's own kernels go.

Owns: one weight and how it lies in memory. On CPUs with oneDNN the weight is reordered once, for
the small batches of decode; a GPU reads it as it is, with kernels of its own for few rows.
"""

from __future__ import annotations

import torch
from torch.nn import functional

# Measured with SmolLM2-135M on an AVX-512 CPU, all matrix products of one step, 1 / 2 threads:
# 1 row plain 44 / 44 ms, packed 27 / 16 ms; 8 rows plain 70 / 65 ms, packed 36 / 21 ms.
_PACK_ROWS = 8  # the batch size that the layout is made for
# One row goes through a matrix-vector routine that does not scale over threads and reads memory at
# a third of the speed; up to three rows cost as much as four.
_MIN_ROWS = 4


class Linear:
    """y = x W^T + b for one weight, given once.

    Attributes:
        weight: [out_features, in_features]; None once `pack` has taken it over.
        bias: [out_features] or None.
        out_features: Rows of the weight.
        in_features: Columns of the weight.
    """

    __slots__ = ("_packed", "bias", "in_features", "out_features", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight: torch.Tensor | None = weight
        self.bias = bias
        self.out_features, self.in_features = weight.shape
        self._packed: torch.Tensor | None = None

    def pack(self, *, keep_weight: bool = False) -> None:
        """Reorders the weight for this CPU, where that is known to help; otherwise does nothing.

        Args:
            keep_weight: Keep the plain weight too, for somebody else who reads it.
        """
        weight = self.weight
        if weight is None or weight.device.type != "cpu" or weight.dtype != torch.float32:
            return
        if not torch.backends.mkldnn.is_available():
            return
        # The operators that torch's own compiler emits for frozen CPU weights.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
        if not keep_weight:
            self.weight = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies x [num_rows, in_features] into [num_rows, out_features]."""
        if self._packed is None:
            assert self.weight is not None  # only `pack` takes it away
            if x.is_cuda:
                # Imported where it is used: a worker without a GPU needs no triton.
                from kernels.linear import linear

                out = x.new_empty(x.shape[0], self.out_features)
                return linear(x, self.weight, self.bias, out=out)
            return functional.linear(x, self.weight, self.bias)
        num_rows = x.shape[0]
        if 0 < num_rows < _MIN_ROWS:
            x = functional.pad(x, (0, 0, 0, _MIN_ROWS - num_rows))
        y = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return y[:num_rows]

    def gated(self, x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        """Multiplies, then SiLU of the first half of the columns times the second one.

        On our own kernels, so on a GPU but for tests.

        Args:
            x: [num_rows, in_features].
            out: [num_rows, out_features // 2], written.

        Returns:
            `out`.
        """
        from kernels.linear import gated_linear
        from kernels.silu_mul import silu_mul

        if self.weight is None or not x.is_cuda:
            return silu_mul(self(x), out=out)
        return gated_linear(x, self.weight, self.bias, out=out)
