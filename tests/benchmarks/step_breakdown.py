"""Where the time of a decode step goes: its graphs replayed whole and with parts left out."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import torch

from data_plane import row_state
from data_plane.cuda_graphs import GraphSet
from data_plane.resident_steps import Body, Head, ResidentSteps

if TYPE_CHECKING:
    from collections.abc import Callable

    from data_plane.model_runner import ModelRunner

_REPLAYS = 30
_EMPTY_KERNELS = 100


def break_down(runner: ModelRunner, batches: list[int], context: int) -> list[dict[str, Any]]:
    """Median us of a replayed decode step: each variant leaves one thing out."""
    steps = runner._steps
    if not isinstance(steps, ResidentSteps) or not steps.captures:
        return []
    return [_one(runner, steps, batch, context) for batch in batches]


def _one(runner: ModelRunner, steps: ResidentSteps, batch: int, context: int) -> dict[str, Any]:
    _occupy(runner, batch, context)
    body, head = Body(batch, batch, 0), Head(batch, is_full=False)
    caches = runner._kv_caches
    device = runner.device
    graphs = GraphSet(device)
    graphs.capture("body", lambda: steps._run_body(body, caches))
    graphs.capture("head", lambda: steps._run_head(head))
    forward = runner.backend.forward
    try:
        runner.backend.forward = lambda *_, **__: None  # type: ignore[method-assign]
        graphs.capture("body without attention", lambda: steps._run_body(body, caches))
    finally:
        runner.backend.forward = forward  # type: ignore[method-assign]
    tail = steps._tail
    try:
        steps._tail = lambda *_, **__: None
        graphs.capture("head without sampler", lambda: steps._run_head(head))
    finally:
        steps._tail = tail
    nothing = torch.zeros(1, device=device)
    graphs.capture("empty", lambda: [nothing.add_(1) for _ in range(_EMPTY_KERNELS)] and None)
    _occupy(runner, batch, context)
    times = {
        name: _time(lambda name=name: graphs.replay(name))
        for name in ("body", "body without attention", "head", "head without sampler", "empty")
    }
    times["empty kernel"] = times.pop("empty") / _EMPTY_KERNELS
    both = _time(lambda: graphs.replay("body") and graphs.replay("head"))
    runner.reset()
    steps._decode_rows = None
    return {
        "measure": "breakdown",
        "params": {"batch": batch},
        "us": {
            "step": both,
            "attention": times["body"] - times["body without attention"],
            "rest of body": times["body without attention"],
            "logits": times["head without sampler"],
            "sampler": times["head"] - times["head without sampler"],
            "empty kernel": times["empty kernel"],
        },
    }


def _occupy(runner: ModelRunner, batch: int, context: int) -> None:
    """Make rows 0 to batch decode at `context` tokens, each with blocks of its own."""
    num_rows = runner.row_state.words.shape[0] - 1
    block_size = runner.kv_cache.block_size
    per_row = -(-(context + 16 * _REPLAYS) // block_size)
    table = runner.block_table.device_table
    ids = torch.arange(batch * per_row, device=table.device, dtype=torch.int32)
    table[:batch, :per_row] = (1 + ids % (runner.num_blocks - 1)).view(batch, per_row)
    words = runner.row_state.words
    words[:num_rows] = 0
    words[:batch, row_state.LENGTH] = context - 1
    words[:batch, row_state.ACTIVE] = 1
    words[:batch, row_state.MAX_TOTAL] = 1 << 30
    words.view(torch.float32)[:batch, row_state.TEMPERATURE] = 0.6
    runner._steps._staging.upload(torch.arange(batch, dtype=torch.int32).numpy())


def _time(run: Callable[[], object]) -> float:
    run()
    torch.cuda.synchronize()
    times: list[float] = []
    for _ in range(_REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)
