"""Converts a GGUF file into the directory of a transformers model, atomically.

Owns: writing config.json, tokenizer files, generation_config.json and model.safetensors (fp32).
Run it as `python -m data_plane.models.convert_gguf SRC DIR`, where SRC is a GGUF file, a directory
with one, or `package:NAME` for one that an installed package carries.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_plane.models.errors import ModelError
from data_plane.models.gguf_file import GgufFile
from data_plane.models.gguf_tokenizer import dump_json, tokenizer_config_json, tokenizer_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

_PACKAGE_PREFIX = "package:"


def convert(
    gguf_path: Path, out_dir: Path, progress: Callable[[int, int], None] | None = None
) -> None:
    """Writes the model of `gguf_path` to `out_dir`, which appears complete or not at all.

    Args:
        gguf_path: A Llama-architecture GGUF file.
        out_dir: Must not exist; its parents are made.
        progress: Called with (tensors done, tensors in all) after each tensor.

    Raises:
        FileExistsError: `out_dir` is there already, or appeared meanwhile.
        ModelError: the file cannot be converted.
    """
    from safetensors.numpy import save_file

    if out_dir.exists():
        raise FileExistsError(f"{out_dir} exists already; remove it to convert again")
    file = GgufFile(gguf_path)
    config = file.hf_config()
    texts = {
        "config.json": dump_json(config),
        "generation_config.json": dump_json(_generation_config(file, config)),
        "tokenizer.json": dump_json(tokenizer_json(file), indent=None),
        "tokenizer_config.json": dump_json(
            tokenizer_config_json(file, max_model_len=config["max_position_embeddings"])
        ),
    }
    num_tensors = len(file.tensor_names())
    weights: dict[str, np.ndarray] = {}
    for name, array in file.tensors():
        weights[name] = array
        if progress is not None:
            progress(len(weights), num_tensors)
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target: a rename is atomic only within one file system.
    part_dir = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
    try:
        for name, text in texts.items():
            (part_dir / name).write_text(text, encoding="utf-8")
        save_file(weights, part_dir / "model.safetensors", metadata={"format": "pt"})
        _seal(part_dir)
        part_dir.chmod(0o755)
        try:
            part_dir.rename(out_dir)
        except OSError as error:
            if out_dir.exists():
                raise FileExistsError(f"{out_dir} was made by somebody else meanwhile") from error
            raise
    finally:
        shutil.rmtree(part_dir, ignore_errors=True)


def packaged_gguf(distribution: str) -> Path:
    """Finds the GGUF file that an installed package carries, without importing the package.

    Raises:
        ModelError: the package is not installed or does not carry exactly one GGUF file.
    """
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ModelError(f"the package {distribution!r} is not installed") from error
    found = [Path(str(entry.locate())) for entry in files if entry.suffix == ".gguf"]
    if len(found) != 1:
        raise ModelError(f"the package {distribution!r} carries {len(found)} GGUF files, not one")
    return found[0]


def _source(text: str) -> Path:
    if text.startswith(_PACKAGE_PREFIX):
        return packaged_gguf(text.removeprefix(_PACKAGE_PREFIX))
    path = Path(text)
    if not path.is_dir():
        return path
    found = sorted(path.glob("*.gguf"))
    if len(found) != 1:
        raise ModelError(f"{path} has {len(found)} GGUF files, not one; name the file")
    return found[0]


def _generation_config(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}
    pad = file.field("tokenizer.ggml.padding_token_id")
    if pad is not None:
        generation["pad_token_id"] = int(pad)
    return generation


def _seal(directory: Path) -> None:
    # The rename must not become durable before the bytes: a crash would leave an empty model.
    for path in directory.iterdir():
        path.chmod(0o644)  # temporary directories and safetensors make files private
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; a directory that is there already is left alone and counts as done."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if len(arguments) != 2:
        sys.stderr.write("usage: python -m data_plane.models.convert_gguf SRC DIR\n")
        return 2
    out_dir = Path(arguments[1])
    if out_dir.exists():
        sys.stderr.write(f"{out_dir} exists already, nothing to do\n")
        return 0
    try:
        convert(_source(arguments[0]), out_dir)
    except (ModelError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stderr.write(f"wrote {out_dir}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
