"""Every architecture on the GPU, through the runner: prefill, chunks, decode, graphs on and off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from step_driver import GREEDY, StepDriver
from tiny_models import VARIANTS, make_model, prompts, reference_logits

from data_plane.model_runner import ModelRunner, RunnerConfig
from data_plane.models.loader import load_model
from data_plane.resident_steps import ResidentSteps
from data_plane.step_work import RowSampling
from data_plane.stop_check import FINISH_ERROR

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gpu

# Sizes that the kernels serve; everything else of a variant stays.
SIZES = {"hidden_size": 96, "intermediate_size": 112}
HEAD_SIZES = {"llama": 64, "llama-mha": 80, "mistral": 96, "qwen3-untied": 128, "qwen2": 256}
LENGTHS = (70, 33, 16, 1)
NUM_STEPS = 8
FREE = RowSampling(temperature=0.8)
FILTERED = RowSampling(temperature=0.8, top_k=12, top_p=0.9, min_p=0.01)


def make_gpu_model(variant: str, path: Path, **overrides: Any) -> Any:
    sizes = {**SIZES, "head_dim": HEAD_SIZES.get(variant, 64), **overrides}
    return make_model(variant, path, **sizes)


def make_driver(
    path: Path,
    dtype: str,
    *,
    block_size: int = 16,
    enforce_eager: bool = False,
    max_num_batched_tokens: int = 256,
    max_model_len: int = 256,
    num_blocks: int = 120,
) -> StepDriver:
    runner = ModelRunner(
        load_model(path, dtype=dtype, device="cuda"),
        RunnerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            block_size=block_size,
            num_blocks=num_blocks,
            enforce_eager=enforce_eager,
        ),
    )
    runner.warm_up()
    return StepDriver(runner, block_size=block_size)


def step_logits(driver: StepDriver, **options: Any) -> dict[int, torch.Tensor]:
    """Runs a step; gives the logits that each sampled row drew from."""
    ordered = driver.launch(**options)
    driver.collect(ordered)
    steps = driver.runner._steps
    assert isinstance(steps, ResidentSteps)
    hidden = steps._sample_hidden[: len(ordered.sampled)]
    logits = driver.runner._model.compute_logits(hidden).float().cpu()
    return {driven.row: logits[i] for i, driven in enumerate(ordered.sampled)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_as_close_to_fp32_as_those_of_transformers(
    variant: str, dtype: str, tmp_path: Path
) -> None:
    exact_model = make_gpu_model(variant, tmp_path)
    driver = make_driver(tmp_path, dtype)
    rows = [driver.add(row + 2, ids) for row, ids in enumerate(prompts(*LENGTHS))]
    got: list[tuple[int, int, torch.Tensor]] = []
    # Two chunks, so that a prefill reads history too; then decodes, of all rows together.
    for chunks in ({2: 40, 3: 33, 4: 9, 5: 1}, {2: 30, 4: 7}, *[None] * NUM_STEPS):
        for row, logits in step_logits(driver, chunks=chunks).items():
            got.append((row, len(driver.rows[row].token_ids) - 1, logits))
    assert len(got) == sum(len(driven.output) for driven in rows)
    exact_model = exact_model.to("cuda")
    exact = {d.row: reference_logits(exact_model, d.token_ids).cpu() for d in rows}
    model = exact_model.to(getattr(torch, dtype))
    same_dtype = {d.row: reference_logits(model, d.token_ids).cpu() for d in rows}
    ours = max(float((logits - exact[row][length - 1]).abs().max()) for row, length, logits in got)
    theirs = max(
        float((same_dtype[row][length - 1] - exact[row][length - 1]).abs().max())
        for row, length, _ in got
    )
    scale = max(float(logits.abs().max()) for logits in exact.values())
    assert ours <= 2 * theirs + 2e-5 * scale, f"{ours} against {theirs} at a scale of {scale}"


@pytest.mark.parametrize("variant", ["llama-3-rope", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_change_no_bit(variant: str, dtype: str, tmp_path: Path) -> None:
    make_gpu_model(variant, tmp_path)
    drivers = [make_driver(tmp_path, dtype, enforce_eager=eager) for eager in (False, True)]
    for driver in drivers:
        for row, ids in enumerate(prompts(*LENGTHS)):
            sampling = (GREEDY, FREE, FILTERED, FREE)[row]
            driver.add(row, ids, sampling=sampling, max_total=len(ids) + 9)
    for step in range(12):
        chunks = {0: 40, 1: 33, 2: 9} if step == 0 else None
        captured, eager = (step_logits(driver, chunks=chunks) for driver in drivers)
        assert captured.keys() == eager.keys()
        for row, logits in captured.items():
            assert torch.equal(logits, eager[row]), (step, row)
    for a, b in zip(drivers[0].rows.values(), drivers[1].rows.values(), strict=True):
        assert a.token_ids == b.token_ids
        assert len(a.output) == 9


@pytest.mark.parametrize("chunk", [None, 700])
def test_steps_longer_than_any_graph_compute_the_same(chunk: int | None, tmp_path: Path) -> None:
    exact_model = make_gpu_model("llama-3-rope", tmp_path, max_position_embeddings=4096)
    driver = make_driver(
        tmp_path,
        "float32",
        max_num_batched_tokens=2050,
        max_model_len=2048,
        num_blocks=300,
    )
    # 1 500 and 500 tokens: more than a graph holds in one step, or one chunk of each kind.
    rows = [driver.add(row, ids, max_total=1800) for row, ids in enumerate(prompts(1500, 500))]
    exact_model = exact_model.to("cuda")
    for _ in range(8):
        chunks = None
        if chunk is not None:
            chunks = {d.row: min(chunk, max(0, d.num_known - d.num_computed)) for d in rows}
        for row, logits in step_logits(driver, chunks=chunks).items():
            expected = reference_logits(exact_model, driver.rows[row].token_ids[:-1])[-1].cpu()
            torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)
    assert all(len(driven.output) >= 6 for driven in rows)


@pytest.mark.parametrize("lookahead", [0, 3])
def test_replays_over_and_over_give_the_same_tokens(lookahead: int, tmp_path: Path) -> None:
    make_gpu_model("qwen3", tmp_path)
    outputs: list[list[list[int]]] = []
    driver = make_driver(tmp_path, "bfloat16")
    for _ in range(4):
        rows = [
            driver.add(row, ids, sampling=FREE, max_total=len(ids) + 120, seed=row)
            for row, ids in enumerate(prompts(*LENGTHS))
        ]
        driver.run(125, lookahead=lookahead)
        outputs.append([driven.output for driven in rows])
        for row in range(len(rows)):
            driver.remove(row)
    assert all(output == outputs[0] for output in outputs)
    assert all(len(output) == 120 for output in outputs[0])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_ordering_steps_neither_waits_nor_allocates(tmp_path: Path) -> None:
    make_gpu_model("qwen3", tmp_path)
    driver = make_driver(tmp_path, "bfloat16")
    for row, ids in enumerate(prompts(*LENGTHS)):
        driver.add(row, ids, sampling=(GREEDY, FREE, FILTERED, FREE)[row])
    driver.run(3)
    in_flight = []
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["num_alloc_retries"], torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(40):
            if step in (10, 20):
                # A new row: a mixed step among decodes.
                driver.remove(1)
                driver.add(1, prompts(20)[0], sampling=FREE)
            in_flight.append(driver.launch())
            if len(in_flight) > 2:
                driver.collect(in_flight.pop(0))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for ordered in in_flight:
        driver.collect(ordered)
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()["num_alloc_retries"], torch.cuda.memory_allocated()
    assert after == before


def test_nan_in_one_row_fails_that_row_alone(tmp_path: Path) -> None:
    make_gpu_model("qwen3-untied", tmp_path)
    driver = make_driver(tmp_path, "bfloat16")
    driver.runner._model.embedding[5] = float("nan")
    rows = [driver.add(row, [7, token, 9]) for row, token in enumerate((8, 5, 10))]
    driver.run(4)
    assert [driven.finish_reason for driven in rows] == [0, FINISH_ERROR, 0]
    assert [len(driven.output) for driven in rows] == [4, 0, 4]
