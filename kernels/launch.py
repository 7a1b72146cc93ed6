"""What all kernels share about being launched one behind the other.

With programmatic dependent launch a kernel starts while the one before it still runs; its programs
wait where they first read or write anything that an earlier kernel touches. Every kernel launched
that way waits, whether it needs the result or not: otherwise the one behind it would not know that
the one before it is done.
"""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl


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
    """Launch options, and the kernel's own constexpr, of a launch on this device.

    Dependent launch came with compute capability 9.0: older GPUs launch one kernel after the other.
    """
    if device.type == "cuda" and _has_dependent_launch(device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@functools.cache
def _has_dependent_launch(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes that one program may take; without bound where kernels are interpreted."""
    if device.type != "cuda":
        return 1 << 62
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 227 << 10)


def coarse_power_of_2(n: int) -> int:
    """The smallest of 16, 64, 256, 1024 … that is >= n: few binaries serve all batch sizes."""
    size = 16
    while size < n:
        size *= 4
    return size
