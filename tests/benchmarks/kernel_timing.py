"""How the kernels' benchmark times a launch, judges a figure and shows it."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    Launch = Callable[[int], object]

DEVICE = torch.device("cuda")


def timed(launch: Launch, num_sets: int, *, budget_s: float = 0.1) -> float:
    """Median µs of one launch inside a graph; launch(i) works on set i."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(min(3, num_sets)):
            launch(i)
        stream.synchronize()
        started = time.perf_counter()
        launch(0)
        stream.synchronize()
        once_s = time.perf_counter() - started
    count = num_sets * max(1, min(64, int(2e-3 / max(once_s, 1e-6))) // num_sets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(count):
            launch(i % num_sets)
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    samples: list[float] = []
    end = time.perf_counter() + budget_s
    while len(samples) < 5 or (time.perf_counter() < end and len(samples) < 50):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        graph.replay()
        after.record()
        after.synchronize()
        samples.append(before.elapsed_time(after) * 1e3 / count)
    return statistics.median(samples)


def copy_bandwidth() -> float:
    """Bytes per second of a large copy, read and written."""
    src = torch.randn(1 << 29, device=DEVICE)
    dst = torch.empty_like(src)
    samples: list[float] = []
    for _ in range(12):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        for _ in range(5):
            dst.copy_(src)
        after.record()
        after.synchronize()
        samples.append(before.elapsed_time(after) / 5e3)
    return 2 * src.nbytes / statistics.median(samples)


def goal_of(goal: tuple[float, float] | None, us: float, rate: float) -> dict[str, Any]:
    """Must and aim: of the time where the aim is the smaller number, of the rate otherwise."""
    if goal is None:
        return {}
    must, aim = goal
    is_time = aim < must
    met, reached = (us <= must, us <= aim) if is_time else (rate >= must, rate >= aim)
    return {"must": must, "aim": aim, "met": met, "aim_reached": reached}


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        line = f"{row['what']:<44}{row['us']:>10.1f} us"
        if "share" in row:
            line += f"{row['share']:>8.0%}"
        if "tflops" in row:
            line += f"{row['tflops']:>6.0f} TFLOP/s"
        for name in ("sdpa_cudnn_us", "sdpa_flash_us", "torch_us"):
            if row.get(name) is not None:
                line += f"  {name[:-3]} {row[name]:.1f}"
        if "must" in row:
            verdict = "aim reached" if row["aim_reached"] else "met" if row["met"] else "MISSED"
            line += f"  must {row['must']:g} aim {row['aim']:g}: {verdict}"
        print(line, flush=True)
