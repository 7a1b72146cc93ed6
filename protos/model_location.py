"""What `--model` names, the same for both planes: a directory, a GGUF file, or a hub repository.

Part of the contract like the fingerprint: both planes must come to the same files, or no worker is
ever accepted. Standard library only, but for a hub repository.

Owns: how the text is read, which files of a repository make a model. Does not know: their content.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from protos.model_fingerprint import weight_files

MODELS_DIR = Path(".pagewire/models")
# Some organisation's some model: never a bare name, which would be a mistyped directory.
_REPO_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
# Of the top folder only: others hold the same weights for other programs.
_FILES = ("*.json", "*.jinja", "*.safetensors")
_IGNORED_FILES = ("*/*", "consolidated*.safetensors")


class ModelLocationError(ValueError):
    """`--model` names nothing that can be served; the message says what was looked for."""


@dataclass(frozen=True, slots=True)
class HubModel:
    """A repository of a model hub, such as `HuggingFaceTB/SmolLM2-135M-Instruct`."""

    repo_id: str


ModelLocation = Path | HubModel


def locate_model(text: str) -> ModelLocation:
    """Read the value of `--model`; the network is not asked.

    A directory that is there comes first, then a name below MODELS_DIR, then a GGUF file, which
    stands for the directory that it is the only weight file of.

    Raises:
        ModelLocationError: It is none of these and no repository id either.
    """
    path = Path(text)
    for directory in (path, MODELS_DIR / text):
        if text and directory.is_dir():
            return directory
    if path.suffix == ".gguf" and path.is_file():
        return _directory_of(path)
    if _REPO_ID.fullmatch(text):
        return HubModel(text)
    raise ModelLocationError(
        f"--model {text} is not a directory; give one with config.json, tokenizer.json, "
        f"tokenizer_config.json and weights, a name below {MODELS_DIR}, a GGUF file with those "
        "files beside it, or a hub id such as ORGANISATION/MODEL"
    )


def fetch_model(location: ModelLocation) -> Path:
    """The directory of a model. Only a hub repository asks the network, and then only for files
    that its local cache does not have; HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE count.

    Raises:
        ModelLocationError: The repository cannot be had; the message says why.
    """
    if isinstance(location, Path):
        return location
    # Here: nobody who serves a directory needs the package.
    from huggingface_hub import constants, snapshot_download

    try:
        return Path(
            snapshot_download(
                location.repo_id,
                allow_patterns=list(_FILES),
                ignore_patterns=list(_IGNORED_FILES),
            )
        )
    # Whatever the library or the way to the hub can come up with; its own first line tells.
    except Exception as error:
        if constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE forbids to download it. Unset that"
        else:
            cause = (str(error).strip() or "no message").splitlines()[0]
            why = (
                f"it cannot be had from {constants.ENDPOINT} ({type(error).__name__}: {cause}). "
                "Check its name, the network, and HF_TOKEN if it is gated"
            )
        raise ModelLocationError(
            f"--model {location.repo_id} is no directory here, so it was taken for a hub id. It is "
            f"not in {constants.HF_HUB_CACHE} and {why}, or give a directory."
        ) from error


def _directory_of(gguf: Path) -> Path:
    directory = gguf.parent
    missing = [n for n in ("config.json", "tokenizer.json") if not (directory / n).is_file()]
    if missing:
        raise ModelLocationError(
            f"--model {gguf} has no {' and no '.join(missing)} beside it, which both planes need. "
            f"Convert it once: python -m data_plane.models.convert_gguf {gguf} DIR"
        )
    others = [path.name for path in weight_files(directory) if path.name != gguf.name]
    if others:
        # The fingerprint covers all of them, so it could not tell which one a worker has loaded.
        raise ModelLocationError(
            f"--model {gguf} shares its directory with {', '.join(others[:4])}. Keep one model per "
            "directory"
        )
    return directory
