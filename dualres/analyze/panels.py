"""What one method's pictures look like, drawn into a figure of its own or a part of a larger one."""
# L layers  J streams  N blocks  O output streams  E experts

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, Normalize, PowerNorm, TwoSlopeNorm
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import EngFormatter, MaxNLocator

from dualres.analyze.analysis_files import Analysis, Array
from dualres.util.curves import COLOURS, STYLES, smooth

Size = tuple[float, float]  # inches
SHARES, SIGNED = "viridis", "PuOr"  # both told apart by the colour-blind; the first also in grey
NUMBERED = 24  # rows up to which cells have their numbers in them, for print
CELL = 0.24  # inches of a cell with a number
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")


class Limits(NamedTuple):
    """What all methods of one comparison share, so that they can be compared by eye."""

    write_gap: float
    rescue_gap: tuple[float, float]
    rms: float
    divergence: float
    load: float  # over its uniform share
    auxiliary: float


def limits(analyses: Iterable[Analysis]) -> Limits:
    """Axes that hold all of them."""
    given = list(analyses)

    def most(name: str, least: float) -> float:
        found = [np.nanmax(np.abs(a.arrays[name])) for a in given if name in a.arrays]
        return max([least, *(float(value) for value in found if math.isfinite(value))])

    gaps = np.concatenate([[-0.1, 0.1], *(a.arrays["rescue_gaps"] for a in given if "rescue_gaps" in a.arrays)])
    loads = [float((a.arrays["expert_load"] * a.arrays["expert_load"].shape[1]).max()) for a in given if _sparse(a)]
    low, high = float(np.nanmin(gaps)), float(np.nanmax(gaps))
    room = 0.08 * (high - low)
    rms = max(most("stream_rms", 0.0), most("history_rms", 0.0))
    divergence = max(most("divergence", 0.05), most("divergence_output", 0.0))
    write = 1.08 * most("write_gaps", 0.05)
    return Limits(write, (low - room, high + room), rms, divergence, max([2.0, *loads]), most("auxiliary", 1.1))


def cka_size(analysis: Analysis) -> Size:
    """A square per pair of streams."""
    pairs = len(_pairs(analysis))
    columns = min(pairs, 3)
    side = 0.9 + CELL * min(len(analysis.arrays["cka"][0, 0]), 10)
    return 0.7 + side * columns, 0.35 + side * math.ceil(pairs / columns)


def cka(figure: Figure | SubFigure, analysis: Analysis, limits: Limits) -> None:
    """A heat map per pair of streams, 0 to 1."""
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
    """A column per stream."""
    layers, streams = analysis.arrays["rescue"].shape
    return 1.7 + 0.5 * streams, 0.9 + CELL * min(layers, 16)


def rescue(figure: Figure | SubFigure, analysis: Analysis, limits: Limits) -> None:
    """Rows are layers, columns the stream that is kept."""
    found = analysis.arrays["rescue"]
    axis = figure.subplots()
    mesh = _heat(axis, found, TwoSlopeNorm(0, -1, 1), SIGNED, digits=2)
    axis.set(xlabel="kept stream", ylabel="layer")
    axis.set_xticks(np.arange(found.shape[1]) + 0.5, [str(j) for j in range(found.shape[1])])
    _count(axis.yaxis, len(found))
    figure.colorbar(mesh, ax=axis, label="rescue gain R", extend="min" if np.nanmin(found) < -1 else "neither")


def gates_size(analysis: Analysis) -> Size:
    """One plot."""
    return 3.3, 2.7


def gates(figure: Figure | SubFigure, analysis: Analysis, limits: Limits) -> None:
    """Write gap against rescue gap, a point per layer, coloured by depth; the least-squares line."""
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
    """Two maps per output stream, one above the other, and the output's."""
    branches, outputs, states = analysis.arrays["retrieval"].shape
    return 1.2 + outputs * (0.7 + CELL * min(max(states, 4), 14)), 1.9 + 2 * CELL * min(branches // 2, 12)


def retrieval(figure: Figure | SubFigure, analysis: Analysis, limits: Limits) -> None:
    """Before attention, before the MLP, and the output's read, for each stream."""
    found, output = analysis.arrays["retrieval"], analysis.arrays["retrieval_output"]
    branches, outputs, states = found.shape
    rows = min(branches // 2, 12)
    axes: Any = figure.subplots(3, outputs, squeeze=False, height_ratios=[rows, rows, 1.2], sharex=True)
    norm = PowerNorm(0.5, 0, 1)  # weights are small where there is much to read
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
        axes[0, j].set_title(f"stream {j}" if outputs > 1 else "the stream")
        _count(axes[2, j].xaxis, states, first=0)
        axes[2, j].set_xlabel("state H")
    figure.colorbar(mesh, ax=axes, label="mean depth weight", shrink=0.8, ticks=[0, 0.05, 0.1, 0.25, 0.5, 1])


def health_size(analysis: Analysis) -> Size:
    """Two plots, or three."""
    return (7.2 if "divergence" in analysis.arrays else 4.9), 2.3


def health(figure: Figure | SubFigure, analysis: Analysis, limits: Limits) -> None:
    """Sizes of streams and states by depth, and the divergence of retrievals."""
    arrays = analysis.arrays
    axes = figure.subplots(1, 3 if "divergence" in arrays else 2)
    for axis, values, first, label in (
        (axes[0], arrays["stream_rms"], 1, "layer"),
        (axes[1], arrays["history_rms"], 0, "state H"),
    ):
        for j, column in enumerate(values.T):
            _line(axis, np.arange(first, first + len(column)), column, j, f"stream {j}")
        axis.set(xlabel=label, ylim=(0, 1.35 * limits.rms))
    axes[0].set_ylabel("root mean square")
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
    """Two plots, or three."""
    return (8.0 if "router_curve" in analysis.arrays else 5.6), 2.5


def experts(figure: Figure | SubFigure, analysis: Analysis, limits: Limits) -> None:
    """Balance by layer, load by expert, and balance over training."""
    arrays = analysis.arrays
    axes = figure.subplots(1, 3 if "router_curve" in arrays else 2)
    load = arrays["expert_load"] * arrays["expert_load"].shape[1]
    mesh = _heat(axes[0], load, TwoSlopeNorm(1, 0, limits.load), SIGNED, digits=None)
    axes[0].set(xlabel="expert", ylabel="layer", title="load over its uniform share")
    _count(axes[0].yaxis, len(load))
    _count(axes[0].xaxis, load.shape[1])
    figure.colorbar(mesh, ax=axes[0])
    _line(axes[1], np.arange(1, len(load) + 1), arrays["auxiliary"], 0, "")
    axes[1].set(xlabel="layer", ylim=(0.95, 1.02 * limits.auxiliary), title="auxiliary loss")
    axes[1].xaxis.set_major_locator(MaxNLocator(integer=True))
    if "router_curve" in arrays:
        steps, losses = arrays["router_curve"].T
        width, smoothed = smooth(losses)
        axes[2].plot(steps[width - 1 :], smoothed, color=COLOURS[0], linewidth=1.2)
        axes[2].xaxis.set_major_formatter(EngFormatter())
        axes[2].set(xlabel="step", title=f"over training, {width}-step average")
    for axis in axes[1:]:
        axis.axhline(1, color="0.4", linestyle=":", linewidth=1.2)
        axis.grid(alpha=0.3)


def _heat(axis: Axes, values: Array, norm: Normalize, colours: str, digits: int | None) -> Any:
    """Rows from the top; blank where there is no number; numbers in the cells where there are few."""
    shown = np.ma.masked_invalid(values)
    mesh = axis.pcolormesh(shown, norm=norm, cmap=colours, edgecolors="white", linewidth=0.3)
    axis.invert_yaxis()
    if digits is not None and max(values.shape) <= NUMBERED:
        for (row, column), value in np.ndenumerate(values):
            if math.isfinite(value):
                text = f"{value:.{digits}f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.1f}"
                colour = _readable(mesh.cmap, norm(value))
                axis.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=5, color=colour)
    return mesh


def _readable(colours: Colormap, at: float) -> str:
    """Black or white, on a colour."""
    red, green, blue, _ = colours(float(at))
    return "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"


def _line(axis: Axes, x: Array | np.ndarray, y: Array, number: int, label: str) -> None:
    colour, style = COLOURS[number % len(COLOURS)], STYLES[number % len(STYLES)]
    axis.plot(x, y, style, color=colour, marker=MARKS[number % len(MARKS)], markersize=3, linewidth=1.2, label=label)


def _count(axis: Any, cells: int, first: int = 1) -> None:
    """Ticks in the middle of cells, not more than fit."""
    step = max(1, math.ceil(cells / 12))
    places: Sequence[int] = range(0, cells, step)
    axis.set_ticks([place + 0.5 for place in places], [str(first + place) for place in places])


def _pairs(analysis: Analysis) -> list[tuple[int, int]]:
    streams = len(analysis.arrays["cka"])
    return [(i, j) for i in range(streams) for j in range(i + 1, streams)]


def _sparse(analysis: Analysis) -> bool:
    return "expert_load" in analysis.arrays
