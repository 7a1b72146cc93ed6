"""Tokenizers that know more than their model: no text may cost a worker its stream."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from api_harness import Api, load_catalog_model, running_api
from pagewire_client import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

PADDING = "[PAD]"


@pytest.fixture
def padded_dir(model_dir: Path, tmp_path: Path) -> Path:
    """A model whose tokenizer has a padding token that the model was never given a row for."""
    for path in model_dir.glob("*.json"):
        shutil.copy(path, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    path = tmp_path / "tokenizer.json"
    tokenizer: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    token = tokenizer["added_tokens"][0] | {"id": 49152, "content": PADDING, "special": True}
    tokenizer["added_tokens"].append(token)
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    return tmp_path


@pytest.fixture
async def api(padded_dir: Path) -> AsyncGenerator[Api]:
    model = load_catalog_model(padded_dir)
    assert model.served.vocab_size == 49152
    async with running_api(model, padded_dir) as api, api.ready_worker():
        yield api


@pytest.mark.parametrize(
    "prompt", [f"one {PADDING} two", [{"role": "user", "content": f"one {PADDING} two"}]]
)
async def test_a_text_with_a_token_that_the_model_does_not_have_is_refused(
    prompt: Any, api: Api
) -> None:
    with pytest.raises(InvalidRequestError) as error:
        await api.client.complete(prompt, max_tokens=2, timeout_s=20.0)
    assert "49152" in error.value.message
    assert "[0, 49152)" in error.value.message
    assert not sum(replica.num_nacks for replica in api.control_plane.cluster.stats().replicas)


async def test_other_texts_of_such_a_model_are_answered(api: Api) -> None:
    completion = await api.client.complete("one two", max_tokens=2, temperature=0, ignore_eos=True)
    assert len(completion.token_ids) == 2
