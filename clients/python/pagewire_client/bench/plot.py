"""A picture of a run: how latencies are distributed, and tokens per second over its time.

Needs matplotlib, which nothing else here does: `pip install 'pagewire[bench]'`.
Owns: what is drawn. Does not know: how it was measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from pagewire_client.bench.records import Outcome


class PlotUnavailableError(ValueError):
    """matplotlib is not installed; the message says how to get it."""


def require_matplotlib() -> Any:
    """Matplotlib's pyplot, drawing into files.

    Raises:
        PlotUnavailableError: It is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise PlotUnavailableError(
            "--plot needs matplotlib, which is not installed: pip install 'pagewire[bench]', or "
            "leave --plot out; --json holds the same numbers"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw(path: Path, summary: dict[str, Any], outcome: Outcome) -> None:
    """Write a PNG.

    Raises:
        PlotUnavailableError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    pyplot = require_matplotlib()
    good = [record for record in outcome.records if not record.reason]
    firsts = sorted(1e3 * (r.first_s - r.sent_s) for r in good if r.first_s is not None)
    ends = sorted(1e3 * (r.end_s - r.sent_s) for r in good)
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7.5), constrained_layout=True)
    parameters, results = summary["parameters"], summary["results"]
    figure.suptitle(
        f"pagewire bench: {parameters['workload']}, {parameters['arrivals']}, "
        f"{results['output_tok_s'] or 0:.0f} output tokens/s, {summary['date']}"
    )
    _cumulative(axes[0][0], "time to the first token (ms)", _steps(firsts))
    total = max(1, outcome.gaps.count)
    seen = 0
    gaps: list[tuple[float, float]] = []
    for seconds, count in outcome.gaps.points():
        seen += count
        gaps.append((seconds * 1e3, seen / total))
    _cumulative(axes[0][1], "time between messages (ms)", gaps)
    _cumulative(axes[1][0], "time of a whole request (ms)", _steps(ends))
    over_time = axes[1][1]
    last = max(outcome.tokens_by_second, default=0)
    rates = [outcome.tokens_by_second.get(second, 0) for second in range(last + 1)]
    over_time.step(range(last + 1), rates, where="post")
    over_time.set_xlabel("second of the run")
    over_time.set_ylabel("output tokens/s")
    over_time.set_ylim(bottom=0)
    over_time.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _steps(values: list[float]) -> list[tuple[float, float]]:
    return [(value, number / len(values)) for number, value in enumerate(values, start=1)]


def _cumulative(axis: Any, label: str, points: list[tuple[float, float]]) -> None:
    axis.set_xlabel(label)
    axis.set_ylabel("share at or below")
    axis.set_ylim(0, 1.02)
    # From zero, so that a narrow distribution looks narrow.
    axis.set_xlim(0, 1.05 * points[-1][0] if points else 1.0)
    axis.grid(alpha=0.3)
    if not points:
        axis.text(0.5, 0.5, "nothing was measured", ha="center", transform=axis.transAxes)
        return
    axis.step([x for x, _ in points], [y for _, y in points], where="post")
    for share, style in ((0.5, "--"), (0.99, ":")):
        x = next(x for x, y in points if y >= share)
        axis.axvline(x, linestyle=style, alpha=0.6, label=f"p{share * 100:.0f} {x:.1f} ms")
    axis.legend(loc="lower right")
