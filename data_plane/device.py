"""Which device a worker computes on."""

from __future__ import annotations

import subprocess

import torch

# bf16 and asynchronous copies into shared memory.
_MIN_CAPABILITY = (8, 0)


class DeviceError(ValueError):
    """The device that was asked for is not there; the message says what is missing."""


def resolve_device(name: str) -> torch.device:
    """Turn --device into a torch device.

    "auto" is a GPU if the driver lists one and torch can use it, else the CPU.

    Raises:
        DeviceError: "cuda" without a usable GPU.
    """
    if name == "cpu":
        return torch.device("cpu")
    missing = _missing_for_cuda()
    if missing is None:
        return torch.device("cuda", 0)
    if name == "auto":
        return torch.device("cpu")
    raise DeviceError(f"--device cuda, but {missing}. Fix that, or use --device cpu.")


def _missing_for_cuda() -> str | None:
    try:
        # Some hosts have the library but no device; only the driver's own list tells.
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False
        )
    except FileNotFoundError:
        return "nvidia-smi is not installed, so there is no NVIDIA driver"
    except subprocess.TimeoutExpired:
        return "nvidia-smi did not answer within 30 s"
    if listed.returncode != 0 or "GPU" not in listed.stdout:
        return "nvidia-smi lists no GPU"
    if not torch.cuda.is_available():
        build = torch.version.cuda
        return (
            f"torch {torch.__version__} cannot use the GPU (built for CUDA {build})"
            if build
            else f"torch {torch.__version__} is a build without CUDA"
        )
    capability = torch.cuda.get_device_capability(0)
    if capability < _MIN_CAPABILITY:
        return (
            f"{torch.cuda.get_device_name(0)} has compute capability {_dotted(capability)}, the "
            f"kernels need {_dotted(_MIN_CAPABILITY)} or newer"
        )
    return None


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
