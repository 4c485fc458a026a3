"""The panel of one model for each kind of figure, drawn into a whole figure or a part of one."""
# L layers  J streams  N blocks  O output streams  E experts

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import Colormap, Normalize, PowerNorm, TwoSlopeNorm
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import EngFormatter, MaxNLocator

from dualres.analyze.analysis import Analysis, Array
from dualres.util.curves import COLORS, STYLES, smooth

FigureSize = tuple[float, float]  # inches
SHARES, SIGNED = "viridis", "PuOr"  # color maps safe for color blindness; the first also in grayscale
MAX_NUMBERED = (24, 12)  # most rows and columns of a heat map whose cells have room for their values
CELL = 0.25  # inches of a cell with a value
REFERENCE_LINE: Any = {"color": "0.4", "linestyle": ":", "linewidth": 1.2}
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")


class Limits(NamedTuple):
    """Axis limits that all panels of a comparison share."""

    write_gap: float
    rescue_gap: tuple[float, float]
    rms: float
    divergence: float
    load: float  # relative to uniform
    auxiliary: float


def limits(analyses: Iterable[Analysis]) -> Limits:
    arrays = [analysis.arrays for analysis in analyses]

    def largest(minimum: float, *names: str) -> float:
        peaks = [float(np.nanmax(np.abs(each[name]))) for each in arrays for name in names if name in each]
        return max([minimum, *filter(math.isfinite, peaks)])

    gaps = np.concatenate([[-0.1, 0.1], *(each["rescue_gaps"] for each in arrays if "rescue_gaps" in each)])
    low, high = float(np.nanmin(gaps)), float(np.nanmax(gaps))
    margin = 0.08 * (high - low)
    shares = [each["expert_load"] for each in arrays if "expert_load" in each]
    return Limits(
        write_gap=1.08 * largest(0.05, "write_gaps"),
        rescue_gap=(low - margin, high + margin),
        rms=largest(0.0, "stream_rms", "history_rms"),
        divergence=largest(0.05, "divergence", "divergence_output"),
        load=max([2.0, *(float((share * share.shape[1]).max()) for share in shares)]),
        auxiliary=largest(1.1, "auxiliary"),
    )


def cka_size(analysis: Analysis) -> FigureSize:
    pairs = len(_pairs(analysis))
    columns = min(pairs, 3)
    side = 0.9 + CELL * min(len(analysis.arrays["cka"][0, 0]), MAX_NUMBERED[1])
    return 0.7 + side * columns, 0.35 + side * math.ceil(pairs / columns)


def cka(figure: Figure | SubFigure, analysis: Analysis, limits: Limits) -> None:
    """One heat map per pair of streams."""
    pairs = _pairs(analysis)
    columns = min(len(pairs), 3)
    axes: Any = figure.subplots(math.ceil(len(pairs) / columns), columns, squeeze=False)
    for axis, (i, j) in zip(axes.flat, pairs, strict=False):
        mesh = _heat(axis, analysis.arrays["cka"][i, j], Normalize(0, 1), SHARES, numbers=True)
        axis.set(xlabel=f"stream {j}, layer", ylabel=f"stream {i}, layer", aspect="equal")
    for axis in axes.flat[len(pairs) :]:
        axis.axis("off")
    figure.colorbar(mesh, ax=axes, label="linear CKA", shrink=0.8)


def rescue_size(analysis: Analysis) -> FigureSize:
    layers, streams = analysis.arrays["rescue"].shape
    return 1.7 + 0.5 * streams, 0.9 + CELL * min(layers, 16)


def rescue(figure: Figure | SubFigure, analysis: Analysis, limits: Limits) -> None:
    """Rows are layers, columns the kept stream."""
    gains = analysis.arrays["rescue"]
    axis = figure.subplots()
    mesh = _heat(axis, gains, TwoSlopeNorm(0, -1, 1), SIGNED, numbers=True, first_column=0)
    axis.set(xlabel="kept stream", ylabel="layer")
    figure.colorbar(mesh, ax=axis, label="rescue gain R", extend="min" if np.nanmin(gains) < -1 else "neither")


def gates(figure: Figure | SubFigure, analysis: Analysis, limits: Limits) -> None:
    """Write gap against rescue gap, one point per layer colored by depth, with the least-squares line."""
    write, gaps = analysis.arrays["write_gaps"], analysis.arrays["rescue_gaps"]
    names = ("mean_absolute_write_gap", "gap_slope", "gap_intercept", "gap_correlation")
    gap, slope, intercept, r = (analysis.summary[name] for name in names)
    axis = figure.subplots()
    axis.axhline(0, color="0.8", linewidth=0.8)
    axis.axvline(0, color="0.8", linewidth=0.8)
    depth = np.arange(1, len(write) + 1)
    points = axis.scatter(
        write, gaps, c=depth, cmap=SHARES, vmin=1, vmax=len(write), edgecolors="black", linewidths=0.4
    )
    if math.isfinite(slope):
        ends = np.array([write.min(), write.max()])
        axis.plot(ends, slope * ends + intercept, color="black", linewidth=1)
    axis.set(
        xlim=(-limits.write_gap, limits.write_gap),
        ylim=limits.rescue_gap,
        xlabel="write gap g = E[β¹ − β⁰]",
        ylabel="rescue gap d = R₁ − R₀",
        title=f"mean |g| = {gap:.2f}" + (f",  r = {r:.2f}" if math.isfinite(r) else ""),
    )
    figure.colorbar(points, ax=axis, label="layer", ticks=MaxNLocator(integer=True))


def retrieval_size(analysis: Analysis) -> FigureSize:
    branches, outputs, states = analysis.arrays["retrieval"].shape
    return 1.2 + outputs * (0.7 + CELL * min(max(states, 4), 14)), 1.9 + 2 * CELL * min(branches // 2, 12)


def retrieval(figure: Figure | SubFigure, analysis: Analysis, limits: Limits) -> None:
    """Reads before attention, before the MLP, and of the output, one column per stream."""
    weights, output = analysis.arrays["retrieval"], analysis.arrays["retrieval_output"]
    branches, outputs, _ = weights.shape
    rows = min(branches // 2, 12)
    axes: Any = figure.subplots(3, outputs, squeeze=False, height_ratios=[rows, rows, 1.2], sharex=True)
    norm = PowerNorm(0.5, 0, 1)  # weights are small when there are many states
    for j in range(outputs):
        for axis, values in zip(axes[:, j], (weights[0::2, j], weights[1::2, j], output[j : j + 1]), strict=True):
            mesh = _heat(axis, values, norm, SHARES, numbers=False, first_column=0)
        axes[0, j].set_title(f"stream {j}" if outputs > 1 else "single stream")
        axes[2, j].set_yticks([0.5], ["output"] if j == 0 else [""])
        axes[2, j].set_xlabel("state H")
    axes[0, 0].set_ylabel("before attention, layer")
    axes[1, 0].set_ylabel("before MLP, layer")
    figure.colorbar(mesh, ax=axes, label="mean depth weight", shrink=0.8, ticks=[0, 0.05, 0.1, 0.25, 0.5, 1])


def health(figure: Figure | SubFigure, analysis: Analysis, limits: Limits) -> None:
    """RMS of streams and states by depth, and the divergence of depth weights."""
    arrays = analysis.arrays
    axes = figure.subplots(1, 3 if "divergence" in arrays else 2)
    for axis, values, first in ((axes[0], arrays["stream_rms"], 1), (axes[1], arrays["history_rms"], 0)):
        _lines(axis, values.T, [f"stream {j}" for j in range(values.shape[1])], first)
        axis.set_ylim(0, 1.35 * limits.rms)
    axes[0].set(xlabel="layer", ylabel="RMS", title="streams after the MLP")
    axes[0].legend(loc="upper left", ncols=2)
    axes[1].set(xlabel="state H", title="states")
    if "divergence" in arrays:
        curves = arrays["divergence"].reshape(-1, 2).T
        _lines(axes[2], curves, ["before attention", "before MLP"])
        axes[2].axhline(float(arrays["divergence_output"]), label="output's read", **REFERENCE_LINE)
        axes[2].set(xlabel="layer", ylabel="nats", ylim=(0, 1.5 * limits.divergence))
        axes[2].set_title("divergence of depth weights")
        axes[2].legend(loc="upper left")


def experts(figure: Figure | SubFigure, analysis: Analysis, limits: Limits) -> None:
    """Load by expert, balance by layer, and balance during training."""
    arrays = analysis.arrays
    axes = figure.subplots(1, 3 if "router_curve" in arrays else 2)
    load = arrays["expert_load"] * arrays["expert_load"].shape[1]
    mesh = _heat(axes[0], load, TwoSlopeNorm(1, 0, limits.load), SIGNED, numbers=False)
    axes[0].set(xlabel="expert", ylabel="layer", title="load relative to uniform")
    figure.colorbar(mesh, ax=axes[0])
    _lines(axes[1], [arrays["auxiliary"]], [""])
    axes[1].set(xlabel="layer", ylim=(0.95, 1.02 * limits.auxiliary), title="auxiliary loss")
    if "router_curve" in arrays:
        steps, losses = arrays["router_curve"].T
        width, smoothed = smooth(losses)
        axes[2].plot(steps[width - 1 :], smoothed, color=COLORS[0], linewidth=1.2)
        axes[2].xaxis.set_major_formatter(EngFormatter())
        axes[2].set(xlabel="step", title=f"during training, {width}-step average")
        axes[2].grid(alpha=0.3)
    for axis in axes[1:]:
        axis.axhline(1, **REFERENCE_LINE)


def _heat(axis: Axes, values: Array, norm: Normalize, cmap: str, numbers: bool, first_column: int = 1) -> QuadMesh:
    """Rows count from 1 at the top, NaN cells are blank; `numbers` prints the values in the cells of small maps."""
    mesh = axis.pcolormesh(np.ma.masked_invalid(values), norm=norm, cmap=cmap, edgecolors="white", linewidth=0.3)
    axis.invert_yaxis()
    if numbers and len(values) <= MAX_NUMBERED[0] and values.shape[1] <= MAX_NUMBERED[1]:
        for (row, column), value in np.ndenumerate(values):
            if math.isfinite(value):
                text = f"{value:.2f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.1f}"
                color = _readable(mesh.cmap, norm(value))
                axis.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=7, color=color)
    for ticked, cells, first in ((axis.yaxis, len(values), 1), (axis.xaxis, values.shape[1], first_column)):
        places = range(0, cells, math.ceil(cells / 12))  # at most twelve, centered on cells
        ticked.set_ticks([place + 0.5 for place in places], [str(first + place) for place in places])
    return mesh


def _readable(cmap: Colormap, at: float) -> str:
    """Black or white, whichever contrasts with the cell; not quite, because a dark page swaps plain black and white."""
    red, green, blue, _ = cmap(float(at))
    return "#010101" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "#fefefe"


def _lines(axis: Axes, curves: Sequence[Array] | Array, labels: Sequence[str], first: int = 1) -> None:
    """Curves with one value per layer or state, counted from `first`."""
    for number, (curve, label) in enumerate(zip(curves, labels, strict=True)):
        axis.plot(
            np.arange(first, first + len(curve)),
            curve,
            STYLES[number % len(STYLES)],
            color=COLORS[number % len(COLORS)],
            marker=MARKS[number % len(MARKS)],
            markersize=3,
            linewidth=1.2,
            label=label,
        )
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.3)


def _pairs(analysis: Analysis) -> list[tuple[int, int]]:
    return list(itertools.combinations(range(len(analysis.arrays["cka"])), 2))
