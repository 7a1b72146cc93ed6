"""What all kernels share about being launched one behind the other.

With programmatic dependent launch a kernel starts while the one before it still runs; its programs
wait where they first read or write anything that an earlier kernel touches. Every kernel launched
that way waits, whether it needs the result or not: otherwise the one behind it would not know that
the one before it is done.
"""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Waits until the kernels before this one have ended and their writes are seen."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Lets the next kernel start; what it reads it still waits for."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


def pdl_options(device: torch.device) -> dict[str, bool]:
    """Launch options, and the kernel's own constexpr, of a dependent launch on this device."""
    if device.type == "cuda":
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def coarse_power_of_2(n: int) -> int:
    """The smallest of 16, 64, 256, 1024 … that is >= n: few binaries serve all batch sizes."""
    size = 16
    while size < n:
        size *= 4
    return size
