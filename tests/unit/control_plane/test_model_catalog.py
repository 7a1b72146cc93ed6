"""Model directories and names."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

from control_plane.errors import InvalidRequestError, UnknownModelError
from control_plane.model_catalog import CatalogModel, ModelCatalog, load_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def small_dir(model_dir: Path, tmp_path: Path) -> Path:
    """The demo model with weights of a few bytes."""
    for path in model_dir.glob("*.json"):
        shutil.copy(path, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def rewrite(path: Path, **changes: object) -> None:
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not None}))


def test_a_model_directory_is_read(small_dir: Path) -> None:
    served = load_model(small_dir, "m").served
    assert (served.name, served.vocab_size, served.max_model_len) == ("m", 49152, 8192)
    assert served.eos_token_ids == (2,)


def test_end_of_sequence_comes_from_the_generation_config_first(small_dir: Path) -> None:
    rewrite(small_dir / "generation_config.json", eos_token_id=[5, 6, 5])
    assert load_model(small_dir, "m").served.eos_token_ids == (5, 6)


def test_end_of_sequence_comes_from_the_config_next(small_dir: Path) -> None:
    (small_dir / "generation_config.json").unlink()
    rewrite(small_dir / "config.json", eos_token_id=7)
    assert load_model(small_dir, "m").served.eos_token_ids == (7,)


def test_end_of_sequence_comes_from_the_tokenizer_last(small_dir: Path) -> None:
    rewrite(small_dir / "generation_config.json", eos_token_id=None)
    rewrite(small_dir / "config.json", eos_token_id=None)
    model = load_model(small_dir, "m")
    assert model.served.eos_token_ids == (model.tokenizer.eos_token_id,)


@pytest.mark.parametrize("eos_token_id", [49152, [2, 49152], -1])
def test_an_end_of_sequence_that_the_model_does_not_have_is_refused(
    eos_token_id: int | list[int], small_dir: Path
) -> None:
    # Workers would refuse every plan.
    rewrite(small_dir / "generation_config.json", eos_token_id=eos_token_id)
    with pytest.raises(ValueError, match=r"not all in the vocabulary \[0, 49152\)"):
        load_model(small_dir, "m")


def test_a_text_model_inside_a_multimodal_one_is_found(small_dir: Path) -> None:
    config = json.loads((small_dir / "config.json").read_text())
    (small_dir / "config.json").write_text(
        json.dumps({"model_type": config["model_type"], "text_config": config})
    )
    assert load_model(small_dir, "m").served.vocab_size == 49152


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(small_dir: Path, name: str) -> None:
    (small_dir / name).unlink()
    with pytest.raises(ValueError, match="not a complete model directory"):
        load_model(small_dir, "m")


def test_a_config_without_a_vocabulary_is_refused(small_dir: Path) -> None:
    rewrite(small_dir / "config.json", vocab_size="many")
    with pytest.raises(ValueError, match="no usable vocab_size: got 'many'"):
        load_model(small_dir, "m")


def test_names_are_found_and_missed(small_dir: Path) -> None:
    model = load_model(small_dir, "one")
    only = ModelCatalog([model])
    assert only.find("") is only.find("one") is model
    two = ModelCatalog([model, CatalogModel(load_model(small_dir, "two").served, model.tokenizer)])
    with pytest.raises(InvalidRequestError, match="one, two"):
        two.find("")
    with pytest.raises(UnknownModelError):
        two.find("three")
    with pytest.raises(ValueError, match="'one'"):
        ModelCatalog([model, model])


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_file_that_is_not_json_is_named(small_dir: Path, name: str) -> None:
    (small_dir / name).write_text("{half")
    with pytest.raises(ValueError, match=rf"{name} is not JSON: Expecting"):
        load_model(small_dir, "m")
