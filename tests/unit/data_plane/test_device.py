"""Which device a worker takes, with a driver that says what the test wants."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from data_plane.device import DeviceError, resolve_device

if TYPE_CHECKING:
    from pathlib import Path

LISTS_A_GPU = "#!/bin/sh\necho 'GPU 0: Some GPU (UUID: GPU-1)'\n"
FAILS = "#!/bin/sh\necho 'NVIDIA-SMI has failed' >&2\nexit 9\n"


def install_driver(
    directory: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, *, torch_sees: bool
) -> None:
    if script is not None:
        (directory / "nvidia-smi").write_text(script)
        (directory / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(directory))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: torch_sees)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))


@pytest.mark.parametrize(
    ("script", "torch_sees", "device"),
    [
        (LISTS_A_GPU, True, "cuda:0"),
        (LISTS_A_GPU, False, "cpu"),
        (FAILS, True, "cpu"),
        (None, True, "cpu"),
    ],
    ids=["gpu", "torch cannot use it", "driver fails", "no driver"],
)
def test_auto_takes_a_gpu_only_if_driver_and_torch_agree(
    script: str | None,
    torch_sees: bool,
    device: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install_driver(tmp_path, monkeypatch, script, torch_sees=torch_sees)
    assert str(resolve_device("auto")) == device


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, "nvidia-smi is not installed"),
        (FAILS, "nvidia-smi lists no GPU"),
        (LISTS_A_GPU, f"torch {torch.__version__}"),
    ],
    ids=["no driver", "driver fails", "torch cannot use it"],
)
def test_cuda_without_a_usable_gpu_is_refused_with_what_is_missing(
    script: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_driver(tmp_path, monkeypatch, script, torch_sees=False)
    with pytest.raises(DeviceError) as refused:
        resolve_device("cuda")
    assert message in str(refused.value)
    assert "use --device cpu" in str(refused.value)


def test_gpu_that_is_too_old_is_refused_with_its_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_driver(tmp_path, monkeypatch, LISTS_A_GPU, torch_sees=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
    with pytest.raises(DeviceError, match=r"Some GPU has compute capability 7\.5, .* need 8\.0"):
        resolve_device("cuda")
    assert str(resolve_device("auto")) == "cpu"


def test_cpu_is_the_cpu_whatever_else_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_driver(tmp_path, monkeypatch, LISTS_A_GPU, torch_sees=True)
    assert str(resolve_device("cpu")) == "cpu"
