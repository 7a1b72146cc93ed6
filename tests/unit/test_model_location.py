"""What --model names: directories, GGUF files, hub repositories in a cache laid out here."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from protos.model_fingerprint import base_fingerprint
from protos.model_location import HubModel, ModelLocationError, fetch_model, locate_model

REPO_ID = "some-org/some-model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write_model(directory: Path, weights: str = "model.safetensors") -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text('{"vocab_size": 7}')
    (directory / "tokenizer.json").write_text("{}")
    (directory / weights).write_bytes(b"weights")
    return directory


def test_directory_is_itself(tmp_path: Path) -> None:
    model_dir = write_model(tmp_path / "org" / "model")
    assert locate_model(str(model_dir)) == model_dir
    assert fetch_model(model_dir) == model_dir


def test_directory_here_comes_before_a_hub_id_of_the_same_spelling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "some-org" / "some-model")
    monkeypatch.chdir(tmp_path)
    assert locate_model(REPO_ID) == Path(REPO_ID)


def test_name_is_looked_up_below_the_models_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / ".pagewire" / "models" / "small")
    monkeypatch.chdir(tmp_path)
    assert locate_model("small") == Path(".pagewire/models/small")


def test_gguf_file_stands_for_its_directory(tmp_path: Path) -> None:
    model_dir = write_model(tmp_path / "m", weights="q8.gguf")
    assert locate_model(str(model_dir / "q8.gguf")) == model_dir


def test_gguf_file_without_tokenizer_is_refused_with_the_command_that_converts_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "q8.gguf"
    path.touch()
    with pytest.raises(ModelLocationError) as refused:
        locate_model(str(path))
    assert "no config.json and no tokenizer.json beside it" in str(refused.value)
    assert f"data_plane.models.convert_gguf {path} DIR" in str(refused.value)


def test_gguf_file_beside_other_weights_is_refused(tmp_path: Path) -> None:
    model_dir = write_model(tmp_path / "m", weights="q8.gguf")
    (model_dir / "q4.gguf").touch()
    with pytest.raises(ModelLocationError, match=r"shares its directory with q4\.gguf"):
        locate_model(str(model_dir / "q8.gguf"))


@pytest.mark.parametrize("text", [REPO_ID, "Qwen/Qwen2.5-0.5B", "a/b"])
def test_hub_id_is_told_by_its_form(text: str) -> None:
    assert locate_model(text) == HubModel(text)


@pytest.mark.parametrize(
    "text", ["nowhere", "/no/where", "./no", "a/b/c", "../b", "a/", "", "a/b c"]
)
def test_everything_else_is_a_mistyped_directory(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ModelLocationError, match="is not a directory; give one with config"):
        locate_model(text)


def fetch_elsewhere(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Fetch REPO_ID in a new process: the library reads its environment when it is imported."""
    code = (
        "from protos.model_location import HubModel, ModelLocationError, fetch_model\n"
        "try:\n"
        f"    print(fetch_model(HubModel({REPO_ID!r})))\n"
        "except ModelLocationError as error:\n"
        "    raise SystemExit(str(error))\n"
    )
    settings = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1", **environment}
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **settings},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def cache_repository(tmp_path: Path) -> Path:
    repository = tmp_path / "hf" / "hub" / ("models--" + REPO_ID.replace("/", "--"))
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    return write_model(repository / "snapshots" / COMMIT)


def test_cached_repository_is_served_offline(tmp_path: Path) -> None:
    snapshot = cache_repository(tmp_path)
    fetched = fetch_elsewhere(tmp_path, HF_HUB_OFFLINE="1")
    assert fetched.returncode == 0, fetched.stderr
    assert Path(fetched.stdout.strip()).resolve() == snapshot.resolve()
    assert base_fingerprint(Path(fetched.stdout.strip())) == base_fingerprint(snapshot)


def test_repository_that_is_not_cached_is_refused_offline(tmp_path: Path) -> None:
    fetched = fetch_elsewhere(tmp_path, HF_HUB_OFFLINE="1")
    assert fetched.returncode == 1
    assert f"--model {REPO_ID} is no directory here" in fetched.stderr
    assert str(tmp_path / "hf" / "hub") in fetched.stderr
    assert "HF_HUB_OFFLINE forbids to download it" in fetched.stderr


@pytest.mark.parametrize("is_cached", [False, True])
def test_hub_that_does_not_answer_is_named_unless_the_cache_has_it(
    tmp_path: Path, is_cached: bool
) -> None:
    if is_cached:
        cache_repository(tmp_path)
    with socket.socket() as taken:
        # Bound and not listening: every connection is refused.
        taken.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        fetched = fetch_elsewhere(tmp_path, HF_ENDPOINT=endpoint)
    if is_cached:
        assert fetched.returncode == 0, fetched.stderr
        return
    assert fetched.returncode == 1
    assert f"it cannot be had from {endpoint}" in fetched.stderr
    assert "Traceback" not in fetched.stderr
