"""A tiny random model, transformers' greedy search on it, and drivers of a ModelRunner."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch
from step_driver import VOCAB, StepDriver

from data_plane.model_runner import ModelRunner, RunnerConfig
from data_plane.models.loader import LoadedModel, load_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import LlamaForCausalLM

    Reference = Callable[[list[int], int], list[int]]


@pytest.fixture
def idle_gpu() -> None:
    """For tests that measure how much memory is free: nobody else may be taking it."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("measures free memory of the GPU: run it without -n")


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        # The smallest that the GPU kernels serve.
        head_dim=64,
        max_position_embeddings=256,
        # Far from uniform, so that greedy search wanders instead of repeating a token.
        initializer_range=0.4,
        tie_word_embeddings=False,
        dtype="float32",
    )
    path = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def reference(tiny_dir: Path) -> Reference:
    """Greedy continuation by transformers; it never stops early."""
    from transformers import LlamaForCausalLM

    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)
    known: dict[tuple[int, ...], list[int]] = {}

    def continuation(prompt: list[int], num_tokens: int) -> list[int]:
        cached = known.get(tuple(prompt), [])
        if len(cached) < num_tokens:
            out = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                do_sample=False,
                max_new_tokens=num_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
            cached = known[tuple(prompt)] = out[0, len(prompt) :].tolist()
        return cached[:num_tokens]

    return continuation


# How a step treats rows that stopped, and how it is padded: each way gives the same tokens.
MODES = {
    "cpu-skipping": ("cpu", {}),
    "cpu-masking-padded": ("cpu", {"skip_inactive": False, "decode_sizes": (2, 4, 8)}),
    "cpu-resident": ("cpu", {"resident": True}),
    "cuda-planned": ("cuda", {"attention_backend": "torch", "decode_sizes": (2, 4, 8)}),
    "cuda": ("cuda", {}),
    "cuda-eager": ("cuda", {"enforce_eager": True}),
}


@pytest.fixture(
    params=[
        "cpu-skipping",
        "cpu-masking-padded",
        "cpu-resident",
        pytest.param("cuda-planned", marks=pytest.mark.gpu),
        pytest.param("cuda", marks=pytest.mark.gpu),
        pytest.param("cuda-eager", marks=pytest.mark.gpu),
    ]
)
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def models(tiny_dir: Path) -> Callable[[str], LoadedModel]:
    loaded: dict[str, LoadedModel] = {}

    def load(device: str) -> LoadedModel:
        if device not in loaded:
            loaded[device] = load_model(tiny_dir, dtype="float32", device=device)
        return loaded[device]

    return load


@pytest.fixture
def make_driver(mode: str, models: Callable[[str], LoadedModel]) -> Callable[..., StepDriver]:
    def make(*, block_size: int = 16, num_blocks: int = 120, seed: int = 0) -> StepDriver:
        device, extra = MODES[mode]
        config = RunnerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=512,
            max_model_len=256,
            block_size=block_size,
            num_blocks=num_blocks,
            **extra,
        )
        runner = ModelRunner(models(device), config)
        return StepDriver(runner, block_size=block_size, seed=seed)

    return make
