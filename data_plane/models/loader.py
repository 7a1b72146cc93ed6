"""Loads a model directory or GGUF file into memory.

Owns: which files are read and how, and the refusal of checkpoints that do not match their
configuration. Does not know arithmetic.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from safetensors import SafetensorError, safe_open

from data_plane.models.config import DTYPE_NAMES, ModelConfig, load_config, parse_config
from data_plane.models.errors import ModelError
from data_plane.models.gguf_file import GgufFile
from data_plane.models.llama import LlamaModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Progress = Callable[[int, int], None]

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
_INDEX_NAME = "model.safetensors.index.json"
# Leftovers of old checkpoints, computed here and never read.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        model: Its `forward` runs one step.
        config: Shapes and options.
        eos_token_ids: Ids that end a sequence, ascending; may be empty.
    """

    model: LlamaModel
    config: ModelConfig
    eos_token_ids: tuple[int, ...]


def load_model(
    path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    load_format: str = "auto",
    progress: Progress | None = None,
) -> LoadedModel:
    """Reads a model directory (safetensors or one GGUF file) or a GGUF file.

    Args:
        path: Directory with config.json, or FILE.gguf.
        dtype: Of weights and KV cache; "auto" takes the checkpoint's own.
        device: Where the weights go.
        load_format: One of LOAD_FORMATS. "auto" prefers safetensors over GGUF; "dummy" needs
            config.json only and makes small random weights, the same ones every time.
        progress: Called with (tensors done, tensors in all) after each tensor.

    Raises:
        ModelError: nothing to load at `path`, an unsupported model, or a checkpoint whose tensors
            do not match the configuration.
    """
    if load_format not in LOAD_FORMATS:
        raise ModelError(f"unknown load format {load_format!r}; known: {', '.join(LOAD_FORMATS)}")
    config, checkpoint = _open(Path(path), load_format)
    model = LlamaModel(config, dtype=resolve_dtype(dtype, config), device=torch.device(device))
    if checkpoint is None:
        _fill_randomly(model)
    else:
        _fill(model, checkpoint, progress)
    model.finish_loading()
    return LoadedModel(model=model, config=config, eos_token_ids=config.eos_token_ids)


def resolve_dtype(dtype: str | torch.dtype, config: ModelConfig) -> torch.dtype:
    """Turns a flag's value into a dtype; "auto" gives the checkpoint's own.

    Raises:
        ModelError: not one of the supported dtypes.
    """
    name = str(dtype).removeprefix("torch.")
    if name == "auto":
        name = config.dtype_name
    if name not in DTYPE_NAMES:
        raise ModelError(f"unsupported dtype {name!r}; supported: auto, {', '.join(DTYPE_NAMES)}")
    resolved = getattr(torch, name)
    assert isinstance(resolved, torch.dtype)
    return resolved


class _Checkpoint(Protocol):
    """Tensors on disk under the names that transformers gives them."""

    where: Path

    def names(self) -> list[str]: ...

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]: ...


class _GgufCheckpoint:
    def __init__(self, file: GgufFile) -> None:
        self.where = file.path
        self._file = file

    def names(self) -> list[str]:
        return self._file.tensor_names()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, array in self._file.tensors():
            yield name, torch.from_numpy(array)


class _SafetensorsCheckpoint:
    def __init__(self, model_dir: Path) -> None:
        self.where = model_dir
        self._files: dict[Path, list[str]] = {}
        for path in _safetensors_files(model_dir):
            try:
                with safe_open(path, framework="pt") as file:
                    self._files[path] = list(file.keys())
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} cannot be read: {error}") from error

    def names(self) -> list[str]:
        return [name for names in self._files.values() for name in names]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for path, names in self._files.items():
            # Memory-mapped: a tensor's pages are read when it is copied to its place.
            with safe_open(path, framework="pt") as file:
                for name in names:
                    yield name, file.get_tensor(name)


def _open(path: Path, load_format: str) -> tuple[ModelConfig, _Checkpoint | None]:
    if path.is_file():
        if path.suffix != ".gguf" or load_format not in ("auto", "gguf"):
            raise ModelError(
                f"{path} is a file; with load format {load_format!r} a model is "
                f"{'a directory' if load_format != 'auto' else 'a directory or FILE.gguf'}"
            )
        return _open_gguf(path)
    if not path.is_dir():
        raise ModelError(f"{path} does not exist; a model is a directory or FILE.gguf")
    if load_format == "dummy":
        return load_config(path), None
    has_safetensors = any(path.glob("*.safetensors"))
    gguf_files = sorted(path.glob("*.gguf"))
    if load_format == "safetensors" or (load_format == "auto" and has_safetensors):
        return load_config(path), _SafetensorsCheckpoint(path)
    if len(gguf_files) == 1:
        return _open_gguf(gguf_files[0])
    if gguf_files:
        names = ", ".join(file.name for file in gguf_files)
        raise ModelError(f"{path} has {len(gguf_files)} GGUF files ({names}); name one of them")
    wanted = "*.gguf" if load_format == "gguf" else "*.safetensors or *.gguf"
    raise ModelError(f"{path} has no weights ({wanted})")


def _open_gguf(path: Path) -> tuple[ModelConfig, _Checkpoint]:
    file = GgufFile(path)
    return parse_config(file.hf_config()), _GgufCheckpoint(file)


def _safetensors_files(model_dir: Path) -> list[Path]:
    index_path = model_dir / _INDEX_NAME
    if not index_path.is_file():
        single = model_dir / "model.safetensors"
        # Some directories hold the same weights twice, in two namings.
        files = [single] if single.is_file() else sorted(model_dir.glob("*.safetensors"))
        if not files:
            raise ModelError(f"{model_dir} has no weights (*.safetensors)")
        return files
    try:
        weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index_path} is not a safetensors index: {error!r}") from error
    missing = [name for name in names if not (model_dir / name).is_file()]
    if missing:
        raise ModelError(f"{index_path} names files that are missing: {_some(missing)}")
    return [model_dir / name for name in names]


def _fill(model: LlamaModel, checkpoint: _Checkpoint, progress: Progress | None) -> None:
    targets = dict(model.checkpoint_tensors())
    ignored = {"lm_head.weight"} if model.config.tie_word_embeddings else set[str]()
    names = checkpoint.names()
    missing = sorted(targets.keys() - set(names))
    extra = sorted(
        name
        for name in set(names) - targets.keys() - ignored
        if not name.endswith(_IGNORED_SUFFIXES)
    )
    repeated = sorted(name for name, count in Counter(names).items() if count > 1)
    for problem, found in (("lacks", missing), ("has unexpected", extra), ("repeats", repeated)):
        if found:
            raise ModelError(
                f"{checkpoint.where} {problem} {len(found)} tensors of "
                f"{model.config.architecture}: {_some(found)}"
            )
    for count, (name, tensor) in enumerate(checkpoint.tensors(), start=1):
        target = targets.get(name)
        if target is not None:
            if tensor.shape != target.shape:
                raise ModelError(
                    f"{checkpoint.where}: tensor {name} has shape {list(tensor.shape)}, "
                    f"config.json asks for {list(target.shape)}"
                )
            if not tensor.is_floating_point():
                raise ModelError(
                    f"{checkpoint.where}: tensor {name} has dtype {tensor.dtype}; quantized "
                    f"weights are not supported"
                )
            target.copy_(tensor)
        if progress is not None:
            progress(count, len(names))


def _fill_randomly(model: LlamaModel) -> None:
    generator = torch.Generator(device=model.device).manual_seed(0)
    for name, target in model.checkpoint_tensors():
        if name.endswith("norm.weight"):
            target.fill_(1.0)
        else:
            target.normal_(0.0, 0.02, generator=generator)


def _some(names: list[str], limit: int = 5) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest
