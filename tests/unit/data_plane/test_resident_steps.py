"""Steps with more prefills than the smallest room for them: no tile of queries may be dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from step_driver import PROMPTS, VOCAB, StepDriver

from data_plane.model_runner import ModelRunner, RunnerConfig
from data_plane.resident_steps import ResidentSteps

if TYPE_CHECKING:
    from collections.abc import Callable

    from data_plane.models.loader import LoadedModel
    from data_plane.resident_steps import Body
    from data_plane.step_work import Int32Array, StepWork

NUM_TOKENS = 6


def make_steps(
    models: Callable[[str], LoadedModel], device: str, *, eager: bool = False
) -> StepDriver:
    config = RunnerConfig(
        max_num_seqs=24,
        max_num_batched_tokens=2048,
        max_model_len=256,
        block_size=16,
        num_blocks=400,
        resident=True,
        enforce_eager=eager,
    )
    return StepDriver(ModelRunner(models(device), config), block_size=16)


def prompt(index: int) -> list[int]:
    # Of 1 to 65 tokens, no two alike.
    ids = PROMPTS[index % len(PROMPTS)]
    return [(token + index) % VOCAB for token in ids]


def test_a_step_has_room_for_all_of_its_prefills(
    models: Callable[[str], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_steps(models, "cpu")
    seen: list[tuple[int, Body]] = []
    upload = ResidentSteps._upload

    def watched(self: ResidentSteps, work: StepWork, sampled_rows: Int32Array) -> Body:
        body = upload(self, work, sampled_rows)
        seen.append((int((work.num_new_tokens > 1).sum()), body))
        return body

    monkeypatch.setattr(ResidentSteps, "_upload", watched)
    row = 0
    for count in (1, 3, 12, 8):
        for _ in range(count):
            driver.add(row, prompt(row))
            row += 1
        driver.run(2)
    # Chunks of one token make a step that is no decode and has no request of several tokens.
    driver.run(3, chunk=1)
    assert max(num_prefills for num_prefills, _ in seen) > 8
    for num_prefills, body in seen:
        assert num_prefills <= body.num_prefills <= body.num_reqs
        assert body.is_decode == (body.num_prefills == 0)
        # The few prefills of a busy step do not pay for as many as there are rows.
        assert num_prefills > 8 or body.num_prefills <= 8


@pytest.mark.parametrize(
    ("device", "eager"),
    [
        ("cpu", False),
        pytest.param("cuda", False, marks=pytest.mark.gpu),
        pytest.param("cuda", True, marks=pytest.mark.gpu),
    ],
)
def test_many_prefills_beside_decodes_give_the_tokens_of_each_alone(
    device: str,
    eager: bool,
    models: Callable[[str], LoadedModel],
    reference: Callable[[list[int], int], list[int]],
) -> None:
    driver = make_steps(models, device, eager=eager)
    if device == "cuda":
        driver.runner.warm_up()
    rows = [driver.add(row, prompt(row)) for row in range(3)]
    driver.run(2)
    rows += [driver.add(row, prompt(row)) for row in range(3, 24)]
    driver.run(NUM_TOKENS + 2)
    for row, driven in enumerate(rows):
        assert driven.output[:NUM_TOKENS] == reference(prompt(row), NUM_TOKENS)
