"""Loss curves of a suite as a picture."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

from dualres.report.suite import Result
from dualres.util.curves import COLORS, STYLES, smooth


def draw(found: Sequence[Result], path: Path) -> list[Path]:
    """A panel per scale: the mean over seeds with its range, and the validation losses as points. -> PNG and SVG"""
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import EngFormatter

    scales = list(dict.fromkeys(result.cell.scale for result in found))
    figure, axes = pyplot.subplots(1, len(scales), figsize=(6.4 * len(scales), 4.2), squeeze=False)
    for axis, scale in zip(axes[0], scales, strict=True):
        ends: list[float] = []  # losses after the first steep fall, for the axis
        methods = list(dict.fromkeys(_label(r) for r in found if r.cell.scale == scale))
        for number, method in enumerate(methods):
            group = [r for r in found if r.cell.scale == scale and _label(r) == method]
            colour, style = COLORS[number % len(COLORS)], STYLES[number // len(COLORS) % len(STYLES)]
            tokens, curves = smoothed(group)
            late = len(tokens) // 5
            ends += [curves[:, late:].min(), curves[:, late:].max()]
            ends += [loss for result in group for count, loss in result.validation if count >= tokens[late]]
            axis.plot(tokens, curves.mean(0), style, color=colour, label=method, linewidth=1.4)
            axis.fill_between(tokens, curves.min(0), curves.max(0), color=colour, alpha=0.15, linewidth=0)
            for result in group:
                axis.plot(*zip(*result.validation, strict=True), "o", color=colour, markersize=3, alpha=0.7)
        axis.set_title(f"{scale}: training loss (line, range over seeds) and validation loss (points)", fontsize=9)
        axis.set_xlabel("tokens")
        axis.xaxis.set_major_formatter(EngFormatter())
        axis.set_ylabel("loss in nats per token")
        room = 0.05 * (max(ends) - min(ends)) + 1e-3
        axis.set_ylim(min(ends) - room, max(ends) + room)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    files = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
    for file in files:
        figure.savefig(file, dpi=150)
    pyplot.close(figure)
    return files


def smoothed(group: Sequence[Result]) -> tuple[np.ndarray, np.ndarray]:
    """Moving averages of a method's seeds. -> tokens (N,), losses (seeds, N)"""
    steps = min(len(result.curve) for result in group)
    curves = [smooth([loss for _, loss in result.curve[:steps]])[1] for result in group]
    tokens = np.array([count for count, _ in group[0].curve[:steps]])
    return tokens[-len(curves[0]) :], np.stack(curves)


def _label(result: Result) -> str:
    rate = result.cell.learning_rate
    return result.cell.method if rate is None else f"{result.cell.method}, {rate:g}"
