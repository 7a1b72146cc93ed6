"""A worker put together from a directory that holds shapes and no weights."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from data_plane.config import WorkerConfig
from data_plane.worker import build_worker

if TYPE_CHECKING:
    from pathlib import Path


def test_dummy_weights_need_a_config_and_an_empty_weight_file(tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
        "max_position_embeddings": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    worker = build_worker(
        WorkerConfig(
            model=tmp_path,
            worker_id="w0",
            replica_id="w0",
            device="cpu",
            load_format="dummy",
            num_blocks=20,
            max_num_seqs=2,
        )
    )
    assert worker.runner.num_blocks == 20
    assert worker.runner.max_model_len == 128
