"""The demo model in fp32: a GPU gives the CPU's greedy tokens, however it computes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from step_driver import GREEDY, StepDriver

from data_plane.model_runner import ModelRunner, RunnerConfig
from data_plane.models.loader import load_model

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

NUM_TOKENS = 40
# Token ids of running text are below a few thousand; lengths lie around edges of blocks and chunks.
PROMPTS = [
    [(7 * length + 13 * i * i) % 4000 + 20 for i in range(length)] for length in (3, 16, 65, 130)
]


def run(model_dir: Path, device: str, *, block_size: int, eager: bool, chunk: int | None) -> list:
    runner = ModelRunner(
        load_model(model_dir, dtype="float32", device=device),
        RunnerConfig(
            max_num_seqs=4,
            max_num_batched_tokens=256,
            max_model_len=512,
            block_size=block_size,
            num_blocks=2048 // block_size + 1,
            enforce_eager=eager,
        ),
    )
    runner.warm_up()
    driver = StepDriver(runner, block_size=block_size)
    rows = [driver.add(row, ids, sampling=GREEDY) for row, ids in enumerate(PROMPTS[:2])]
    # Others join later: prefills beside decodes.
    driver.run(3, chunk=chunk)
    rows += [driver.add(row + 2, ids, sampling=GREEDY) for row, ids in enumerate(PROMPTS[2:])]
    driver.run(NUM_TOKENS + 20, chunk=chunk, lookahead=2)
    assert all(len(driven.output) >= NUM_TOKENS for driven in rows)
    return [driven.output[:NUM_TOKENS] for driven in rows]


@pytest.fixture(scope="module")
def demo_dir(request: pytest.FixtureRequest) -> Path:
    try:
        return request.getfixturevalue("model_dir")
    except RuntimeError as error:
        pytest.skip(f"the demo model is not here: {error}")


@pytest.fixture(scope="module")
def cpu_tokens(demo_dir: Path) -> list[list[int]]:
    return run(demo_dir, "cpu", block_size=16, eager=True, chunk=None)


@pytest.mark.parametrize(
    ("block_size", "eager", "chunk"),
    [(16, False, None), (16, True, None), (32, False, 24), (64, False, None), (64, True, 24)],
)
def test_greedy_tokens_of_gpu_and_cpu_are_the_same(
    block_size: int, eager: bool, chunk: int | None, demo_dir: Path, cpu_tokens: list[list[int]]
) -> None:
    assert not torch.backends.cuda.matmul.allow_tf32
    tokens = run(demo_dir, "cuda", block_size=block_size, eager=eager, chunk=chunk)
    assert tokens == cpu_tokens
