"""The panel of one model for each kind of figure, drawn into a whole figure or a part of one."""
# L layers  J streams  N blocks  O output streams  E experts

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, Normalize, PowerNorm, TwoSlopeNorm
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import EngFormatter, MaxNLocator

from dualres.analyze.analysis import Analysis, Array
from dualres.util.curves import COLORS, STYLES, smooth

Size = tuple[float, float]  # inches
SHARES, SIGNED = "viridis", "PuOr"  # color maps safe for color blindness; the first also in grayscale
NUMBERED = 24  # most rows of a heat map whose cells show their values
CELL = 0.24  # inches of a cell with a value
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
    given = list(analyses)

    def most(name: str, least: float) -> float:
        found = [np.nanmax(np.abs(a.arrays[name])) for a in given if name in a.arrays]
        return max([least, *(float(value) for value in found if math.isfinite(value))])

    gaps = np.concatenate([[-0.1, 0.1], *(a.arrays["rescue_gaps"] for a in given if "rescue_gaps" in a.arrays)])
    shares = [a.arrays["expert_load"] for a in given if "expert_load" in a.arrays]
    loads = [float((share * share.shape[1]).max()) for share in shares]
    low, high = float(np.nanmin(gaps)), float(np.nanmax(gaps))
    room = 0.08 * (high - low)
    rms = max(most("stream_rms", 0.0), most("history_rms", 0.0))
    divergence = max(most("divergence", 0.05), most("divergence_output", 0.0))
    write = 1.08 * most("write_gaps", 0.05)
    return Limits(write, (low - room, high + room), rms, divergence, max([2.0, *loads]), most("auxiliary", 1.1))


def cka_size(analysis: Analysis) -> Size:
    pairs = len(_pairs(analysis))
    columns = min(pairs, 3)
    side = 0.9 + CELL * min(len(analysis.arrays["cka"][0, 0]), 10)
    return 0.7 + side * columns, 0.35 + side * math.ceil(pairs / columns)


def cka(figure: Figure | SubFigure, analysis: Analysis, limits: Limits) -> None:
    """One heat map per pair of streams."""
    found, pairs = analysis.arrays["cka"], _pairs(analysis)
    columns = min(len(pairs), 3)
    axes: Any = figure.subplots(math.ceil(len(pairs) / columns), columns, squeeze=False)
    for axis, (i, j) in zip(axes.flat, pairs, strict=False):
        mesh = _heat(axis, found[i, j], Normalize(0, 1), SHARES, digits=2)
        axis.set(xlabel=f"stream {j}, layer", ylabel=f"stream {i}, layer", aspect="equal")
        _count(axis.xaxis, found.shape[-1])
        _count(axis.yaxis, found.shape[-2])
    for axis in axes.flat[len(pairs) :]:
        axis.axis("off")
    figure.colorbar(mesh, ax=axes, label="linear CKA", shrink=0.8)


def rescue_size(analysis: Analysis) -> Size:
    layers, streams = analysis.arrays["rescue"].shape
    return 1.7 + 0.5 * streams, 0.9 + CELL * min(layers, 16)


def rescue(figure: Figure | SubFigure, analysis: Analysis, limits: Limits) -> None:
    """Rows are layers, columns the kept stream."""
    found = analysis.arrays["rescue"]
    axis = figure.subplots()
    mesh = _heat(axis, found, TwoSlopeNorm(0, -1, 1), SIGNED, digits=2)
    axis.set(xlabel="kept stream", ylabel="layer")
    axis.set_xticks(np.arange(found.shape[1]) + 0.5, [str(j) for j in range(found.shape[1])])
    _count(axis.yaxis, len(found))
    figure.colorbar(mesh, ax=axis, label="rescue gain R", extend="min" if np.nanmin(found) < -1 else "neither")


def gates_size(analysis: Analysis) -> Size:
    return 3.3, 2.7


def gates(figure: Figure | SubFigure, analysis: Analysis, limits: Limits) -> None:
    """Write gap against rescue gap, one point per layer colored by depth, with the least-squares line."""
    write, gaps = analysis.arrays["write_gaps"], analysis.arrays["rescue_gaps"]
    axis = figure.subplots()
    axis.axhline(0, color="0.8", linewidth=0.8)
    axis.axvline(0, color="0.8", linewidth=0.8)
    depth = np.arange(1, len(write) + 1)
    points = axis.scatter(
        write, gaps, c=depth, cmap=SHARES, vmin=1, vmax=len(write), edgecolors="black", linewidths=0.4
    )
    axis.set_xlim(-limits.write_gap, limits.write_gap)
    axis.set_ylim(*limits.rescue_gap)
    slope, intercept = (analysis.summary[name] for name in ("gap_slope", "gap_intercept"))
    if math.isfinite(slope):
        ends = np.array([write.min(), write.max()])
        axis.plot(ends, slope * ends + intercept, color="black", linewidth=1)
    gap, r = (analysis.summary[name] for name in ("mean_absolute_write_gap", "gap_correlation"))
    axis.set_title(f"mean |g| = {gap:.2f},  r = {r:.2f}" if math.isfinite(r) else f"mean |g| = {gap:.2f}")
    axis.set(xlabel="write gap g = E[β¹ − β⁰]", ylabel="rescue gap d = R₁ − R₀")
    bar = figure.colorbar(points, ax=axis, label="layer")
    bar.locator = MaxNLocator(integer=True)
    bar.update_ticks()


def retrieval_size(analysis: Analysis) -> Size:
    branches, outputs, states = analysis.arrays["retrieval"].shape
    return 1.2 + outputs * (0.7 + CELL * min(max(states, 4), 14)), 1.9 + 2 * CELL * min(branches // 2, 12)


def retrieval(figure: Figure | SubFigure, analysis: Analysis, limits: Limits) -> None:
    """Reads before attention, before the MLP, and of the output, one column per stream."""
    found, output = analysis.arrays["retrieval"], analysis.arrays["retrieval_output"]
    branches, outputs, states = found.shape
    rows = min(branches // 2, 12)
    axes: Any = figure.subplots(3, outputs, squeeze=False, height_ratios=[rows, rows, 1.2], sharex=True)
    norm = PowerNorm(0.5, 0, 1)  # weights are small when there are many states
    for j in range(outputs):
        for axis, name, values in zip(
            axes[:, j], ("attention", "MLP", "output"), (found[0::2, j], found[1::2, j], output[j : j + 1]), strict=True
        ):
            mesh = _heat(axis, values, norm, SHARES, digits=None)
            if name == "output":
                axis.set_yticks([0.5], ["output"] if j == 0 else [""])
            else:
                axis.set_ylabel(f"before {name}, layer" if j == 0 else "")
                _count(axis.yaxis, len(values))
        axes[0, j].set_title(f"stream {j}" if outputs > 1 else "single stream")
        _count(axes[2, j].xaxis, states, first=0)
        axes[2, j].set_xlabel("state H")
    figure.colorbar(mesh, ax=axes, label="mean depth weight", shrink=0.8, ticks=[0, 0.05, 0.1, 0.25, 0.5, 1])


def health_size(analysis: Analysis) -> Size:
    return (7.2 if "divergence" in analysis.arrays else 4.9), 2.3


def health(figure: Figure | SubFigure, analysis: Analysis, limits: Limits) -> None:
    """RMS of streams and states by depth, and the divergence of depth weights."""
    arrays = analysis.arrays
    axes = figure.subplots(1, 3 if "divergence" in arrays else 2)
    for axis, values, first, label in (
        (axes[0], arrays["stream_rms"], 1, "layer"),
        (axes[1], arrays["history_rms"], 0, "state H"),
    ):
        for j, column in enumerate(values.T):
            _line(axis, np.arange(first, first + len(column)), column, j, f"stream {j}")
        axis.set(xlabel=label, ylim=(0, 1.35 * limits.rms))
    axes[0].set_ylabel("RMS")
    axes[0].set_title("streams after the MLP")
    axes[1].set_title("states")
    axes[0].legend(loc="upper left", ncols=2)
    if "divergence" in arrays:
        for kind, values in enumerate((arrays["divergence"][0::2], arrays["divergence"][1::2])):
            _line(axes[2], np.arange(1, len(values) + 1), values, kind, ("before attention", "before MLP")[kind])
        axes[2].axhline(
            float(arrays["divergence_output"]), color="0.4", linestyle=":", linewidth=1.2, label="output's read"
        )
        axes[2].set(xlabel="layer", ylim=(0, 1.5 * limits.divergence), title="divergence of depth weights")
        axes[2].set_ylabel("nats")
        axes[2].legend(loc="upper left")
    for axis in axes:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)


def experts_size(analysis: Analysis) -> Size:
    return (8.0 if "router_curve" in analysis.arrays else 5.6), 2.5


def experts(figure: Figure | SubFigure, analysis: Analysis, limits: Limits) -> None:
    """Load by expert, balance by layer, and balance during training."""
    arrays = analysis.arrays
    axes = figure.subplots(1, 3 if "router_curve" in arrays else 2)
    load = arrays["expert_load"] * arrays["expert_load"].shape[1]
    mesh = _heat(axes[0], load, TwoSlopeNorm(1, 0, limits.load), SIGNED, digits=None)
    axes[0].set(xlabel="expert", ylabel="layer", title="load relative to uniform")
    _count(axes[0].yaxis, len(load))
    _count(axes[0].xaxis, load.shape[1])
    figure.colorbar(mesh, ax=axes[0])
    _line(axes[1], np.arange(1, len(load) + 1), arrays["auxiliary"], 0, "")
    axes[1].set(xlabel="layer", ylim=(0.95, 1.02 * limits.auxiliary), title="auxiliary loss")
    axes[1].xaxis.set_major_locator(MaxNLocator(integer=True))
    if "router_curve" in arrays:
        steps, losses = arrays["router_curve"].T
        width, smoothed = smooth(losses)
        axes[2].plot(steps[width - 1 :], smoothed, color=COLORS[0], linewidth=1.2)
        axes[2].xaxis.set_major_formatter(EngFormatter())
        axes[2].set(xlabel="step", title=f"during training, {width}-step average")
    for axis in axes[1:]:
        axis.axhline(1, color="0.4", linestyle=":", linewidth=1.2)
        axis.grid(alpha=0.3)


def _heat(axis: Axes, values: Array, norm: Normalize, cmap: str, digits: int | None) -> Any:
    """Rows from the top, NaN blank, values printed in the cells of small maps."""
    shown = np.ma.masked_invalid(values)
    mesh = axis.pcolormesh(shown, norm=norm, cmap=cmap, edgecolors="white", linewidth=0.3)
    axis.invert_yaxis()
    if digits is not None and max(values.shape) <= NUMBERED:
        for (row, column), value in np.ndenumerate(values):
            if math.isfinite(value):
                text = f"{value:.{digits}f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.1f}"
                color = _readable(mesh.cmap, norm(value))
                axis.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=5, color=color)
    return mesh


def _readable(cmap: Colormap, at: float) -> str:
    """Black or white, whichever contrasts with the cell."""
    red, green, blue, _ = cmap(float(at))
    return "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"


def _line(axis: Axes, x: Array | np.ndarray, y: Array, number: int, label: str) -> None:
    color, style = COLORS[number % len(COLORS)], STYLES[number % len(STYLES)]
    axis.plot(x, y, style, color=color, marker=MARKS[number % len(MARKS)], markersize=3, linewidth=1.2, label=label)


def _count(axis: Any, cells: int, first: int = 1) -> None:
    """At most twelve ticks, centered on cells."""
    step = max(1, math.ceil(cells / 12))
    places: Sequence[int] = range(0, cells, step)
    axis.set_ticks([place + 0.5 for place in places], [str(first + place) for place in places])


def _pairs(analysis: Analysis) -> list[tuple[int, int]]:
    streams = len(analysis.arrays["cka"])
    return [(i, j) for i in range(streams) for j in range(i + 1, streams)]
