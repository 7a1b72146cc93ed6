"""What both planes must agree on before a worker may serve: is this the same model?

Part of the contract, hence beside the protos: the control plane computes it from its model
directory, the worker from its own, and Hello carries the worker's. Standard library only.

Reads at most 2 MiB of each weight file, so a 100 GB checkpoint costs milliseconds.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from pathlib import Path

_EDGE_BYTES = 1 << 20  # read at both ends of each weight file
_WEIGHT_SUFFIXES = (".safetensors", ".gguf")


def base_fingerprint(model_dir: Path) -> bytes:
    """Hash configuration, tokenizer and weight files of a model directory.

    SHA-256 over length-prefixed, tagged fields: config.json in canonical JSON, tokenizer.json as
    bytes, then for each weight file in name order its name, size, first and last MiB.

    Returns:
        32 bytes.

    Raises:
        FileNotFoundError: config.json, tokenizer.json or every weight file is missing.
        ValueError: config.json is not a JSON object.
    """
    config = read_json_object(model_dir / "config.json")
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    digest = hashlib.sha256()
    digest.update(_field(b"pagewire-model-1", b""))
    digest.update(_field(b"config", canonical.encode()))
    digest.update(_field(b"tokenizer", (model_dir / "tokenizer.json").read_bytes()))
    weights = weight_files(model_dir)
    if not weights:
        raise FileNotFoundError(
            f"{model_dir} has no weight file ({' or '.join('*' + s for s in _WEIGHT_SUFFIXES)})"
        )
    for path in weights:
        digest.update(_field(b"weights", path.name.encode()))
        size = path.stat().st_size
        digest.update(_field(b"size", size.to_bytes(8, "little")))
        with path.open("rb") as file:
            digest.update(_field(b"head", file.read(_EDGE_BYTES)))
            file.seek(max(0, size - _EDGE_BYTES))
            digest.update(_field(b"tail", file.read(_EDGE_BYTES)))
    return digest.digest()


def weight_files(model_dir: Path) -> list[Path]:
    """The weight files of a model directory, in name order."""
    return sorted(path for path in model_dir.iterdir() if path.suffix in _WEIGHT_SUFFIXES)


def read_json_object(path: Path) -> dict[str, Any]:
    """Read one of a model's JSON files.

    Raises:
        ValueError: It holds something else; the message names the file.
    """
    try:
        value: object = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return cast("dict[str, Any]", value)


def served_fingerprint(base: bytes, *, kv_dtype: str, kv_scales: bytes = b"") -> bytes:
    """Bind a model to how its KV cache is stored: blocks of one are garbage to another.

    Args:
        base: What `base_fingerprint` returned.
        kv_dtype: "float32", "bfloat16", "float16" or "fp8_e4m3".
        kv_scales: Canonical bytes of quantization scales; empty without any.

    Returns:
        32 bytes, the `model_fingerprint` of Hello.
    """
    digest = hashlib.sha256()
    digest.update(_field(b"pagewire-served-1", base))
    digest.update(_field(b"kv_dtype", kv_dtype.encode()))
    digest.update(_field(b"kv_scales", kv_scales))
    return digest.digest()


def _field(tag: bytes, value: bytes) -> bytes:
    # Length prefixes: no two different sequences of fields have the same encoding.
    return b"".join(len(part).to_bytes(8, "little") + part for part in (tag, value))
