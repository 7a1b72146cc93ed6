"""Checkpoints that fit are loaded whole; everything else is refused by name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from data_plane.models.errors import ModelError
from data_plane.models.loader import load_model

if TYPE_CHECKING:
    from pathlib import Path

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "torch_dtype": "float16",
}


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).half()

    result = {
        "model.embed_tokens.weight": random(40, 16),
        "model.norm.weight": random(16),
        "lm_head.weight": random(40, 16),
    }
    for index in range(2):
        prefix = f"model.layers.{index}"
        result[f"{prefix}.input_layernorm.weight"] = random(16)
        result[f"{prefix}.post_attention_layernorm.weight"] = random(16)
        for name, size in (("q_proj", 16), ("k_proj", 8), ("v_proj", 8)):
            result[f"{prefix}.self_attn.{name}.weight"] = random(size, 16)
            result[f"{prefix}.self_attn.{name}.bias"] = random(size)
        result[f"{prefix}.self_attn.o_proj.weight"] = random(16, 16)
        result[f"{prefix}.mlp.gate_proj.weight"] = random(24, 16)
        result[f"{prefix}.mlp.up_proj.weight"] = random(24, 16)
        result[f"{prefix}.mlp.down_proj.weight"] = random(16, 24)
    return result


def write(
    directory: Path, weights: dict[str, torch.Tensor], changes: dict[str, Any] | None = None
) -> None:
    (directory / "config.json").write_text(json.dumps({**CONFIG, **(changes or {})}))
    save_file(weights, directory / "model.safetensors")


def loaded_tensors(path: Path, **options: Any) -> dict[str, torch.Tensor]:
    # Half precision is not packed on the CPU, so the plain weights can be read back.
    return dict(load_model(path, **options).model.checkpoint_tensors())


def test_every_tensor_lands_in_its_place(tmp_path: Path) -> None:
    write(tmp_path, tensors())
    loaded = loaded_tensors(tmp_path)
    assert loaded.keys() == tensors().keys()
    for name, expected in tensors().items():
        assert torch.equal(loaded[name], expected), name


def test_merged_matrices_hold_their_parts_in_order(tmp_path: Path) -> None:
    write(tmp_path, tensors())
    layer = load_model(tmp_path).model.layers[1]
    weights = tensors()
    parts = [weights[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert layer.qkv.weight is not None
    assert torch.equal(layer.qkv.weight, torch.cat(parts))
    parts = [weights[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert layer.gate_up.weight is not None
    assert torch.equal(layer.gate_up.weight, torch.cat(parts))


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    write(tmp_path, tensors())
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors())
    weight_map: dict[str, str] = {}
    for index, part in enumerate((names[:9], names[9:])):
        file = f"model-{index}.safetensors"
        save_file({name: tensors()[name] for name in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    index_path = tmp_path / "model.safetensors.index.json"
    index_path.write_text(json.dumps({"weight_map": weight_map}))
    loaded = loaded_tensors(tmp_path)
    assert all(torch.equal(loaded[name], tensors()[name]) for name in names)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(ModelError, match=r"names files that are missing: model-1\.safetensors"):
        load_model(tmp_path)


def test_dtype_is_the_checkpoints_own_unless_given(tmp_path: Path) -> None:
    write(tmp_path, tensors())
    assert load_model(tmp_path).model.dtype == torch.float16
    assert load_model(tmp_path, dtype="bfloat16").model.dtype == torch.bfloat16
    assert load_model(tmp_path, dtype=torch.float32).model.dtype == torch.float32
    with pytest.raises(ModelError, match="unsupported dtype 'int8'"):
        load_model(tmp_path, dtype="int8")


def test_progress_counts_every_tensor(tmp_path: Path) -> None:
    write(tmp_path, tensors())
    seen: list[tuple[int, int]] = []
    load_model(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(index, len(tensors())) for index in range(1, len(tensors()) + 1)]


def test_dummy_weights_need_no_checkpoint_and_are_the_same_every_time(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    first = loaded_tensors(tmp_path, load_format="dummy")
    second = loaded_tensors(tmp_path, load_format="dummy")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(bool(tensor.isfinite().all()) for tensor in first.values())


def test_tied_model_ignores_a_stored_head(tmp_path: Path) -> None:
    write(tmp_path, tensors(), {"tie_word_embeddings": True})
    model = load_model(tmp_path).model
    assert model.lm_head.weight is model.embedding


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lm_head.weight": None}, "lacks 1 tensors of Qwen2ForCausalLM: lm_head.weight"),
        (
            {"model.layers.1.mlp.up_proj.bias": torch.zeros(24)},
            r"has unexpected 1 tensors .*model\.layers\.1\.mlp\.up_proj\.bias",
        ),
        (
            {"model.norm.weight": torch.zeros(17)},
            r"tensor model\.norm\.weight has shape \[17\], config\.json asks for \[16\]",
        ),
        (
            {"model.norm.weight": torch.zeros(16, dtype=torch.int8)},
            r"model\.norm\.weight has dtype torch\.int8; quantized weights are not supported",
        ),
    ],
)
def test_checkpoint_that_does_not_match_is_refused(
    change: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    weights = {**tensors(), **change}
    write(tmp_path, {name: tensor for name, tensor in weights.items() if tensor is not None})
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path)


def test_old_rope_buffers_are_ignored(tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    write(tmp_path, {**tensors(), **extra})
    load_model(tmp_path)


def test_missing_model_is_refused_with_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"has no weights \(\*\.safetensors or \*\.gguf\)"):
        load_model(tmp_path)
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        load_model(tmp_path, load_format="dummy")
    with pytest.raises(ModelError, match="unknown load format 'pickle'"):
        load_model(tmp_path, load_format="pickle")
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelError, match=r"2 GGUF files \(a\.gguf, b\.gguf\); name one"):
        load_model(tmp_path)


def test_damaged_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path, tensors())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        load_model(tmp_path)


def test_packed_linear_gives_the_plain_product_for_any_number_of_rows() -> None:
    from data_plane.models.linear import Linear

    torch.manual_seed(0)
    weight, bias = torch.randn(24, 16), torch.randn(24)
    linear = Linear(weight.clone(), bias)
    linear.pack()
    for num_rows in (0, 1, 2, 3, 4, 5, 8, 33):
        x = torch.randn(num_rows, 16)
        with torch.inference_mode():
            torch.testing.assert_close(linear(x), torch.nn.functional.linear(x, weight, bias))


def test_stop_tokens_of_the_generation_config_win(tmp_path: Path) -> None:
    write(tmp_path, tensors())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 3, 5]}))
    assert load_model(str(tmp_path)).eos_token_ids == (3, 5)
