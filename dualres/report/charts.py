"""Loss curves: moving averages over seeds as data, which the page's script draws, and as matplotlib figures."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dualres.report.runs import Curve, Group, Run
from dualres.util.curves import COLORS, STYLES, smooth
from dualres.util.optional_dependencies import need

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_POINTS = 600  # of a curve
STATIC_POINTS = 200  # of a curve in a figure, which cannot be enlarged
UNFINISHED = len(STYLES) - 1  # line style of unfinished runs, the last that methods would use
DIGITS = 5  # of a loss, enough to read differences of 1e-4
EARLY = 1 / 5  # of the tokens: the initial drop, which the vertical axis leaves out


class Series(NamedTuple):
    """The curve of one method: tokens, mean and range over seeds, and individual points."""

    name: str
    color: int  # index in COLORS
    style: int  # index in STYLES
    seeds: int
    x: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]
    points: list[tuple[int, float]]


class Chart(NamedTuple):
    """The curves of one scale, drawn in one panel."""

    name: str  # of its element in the page
    title: str
    unit: str  # of the vertical axis
    reference: float | None  # a horizontal line
    window: str  # of the moving average, in words
    series: list[Series]


def loss_charts(groups: Sequence[Group]) -> list[Chart]:
    """A panel per scale; unfinished runs have curves of their own, so that they do not cut a mean short."""
    return _charts(groups, "loss", "training loss, nats per token", None, "training", "validation")


def router_charts(groups: Sequence[Group]) -> list[Chart]:
    """A panel per scale with experts."""
    return _charts(groups, "router", "load-balancing loss of the routers", 1.0, "router", None)


def as_data(chart: Chart) -> dict[str, Any]:
    """The chart as JSON data for the page's script; a single seed has no range."""
    no_range = {"low": None, "high": None}
    series = [{**one._asdict(), **(no_range if one.seeds == 1 else {})} for one in chart.series]
    return {**chart._asdict(), "series": series}


def draw(charts: Sequence[Chart], titles: bool = True) -> "Figure":
    """The charts side by side: mean over seeds with its range, individual runs' values as points."""
    matplotlib = need("matplotlib.figure", "plots", "drawing curves")
    figure: Figure = matplotlib.Figure(figsize=(8.0 * len(charts), 4.4), layout="constrained")
    axes: Any = figure.subplots(1, len(charts), squeeze=False)
    for axis, chart in zip(axes[0], charts, strict=True):
        _draw(axis, chart)
        if titles:
            axis.set_title(f"{chart.title}: training loss (line, range over seeds) and validation loss (points)")
    return figure


def as_svg(chart: Chart) -> str:
    """The chart as SVG, for readers without scripts; equal runs give equal bytes."""
    svg = io.StringIO()
    matplotlib = need("matplotlib", "plots", "drawing curves")
    with matplotlib.rc_context({"svg.hashsalt": "dualres"}):
        draw([chart], titles=False).savefig(svg, format="svg", metadata={"Date": None})
    return svg.getvalue()


def _draw(axis: "Axes", chart: Chart) -> None:
    from matplotlib.ticker import EngFormatter

    start = EARLY * max(series.x[-1] for series in chart.series)
    late = [] if chart.reference is None else [chart.reference]  # values after the initial drop
    for series in chart.series:
        color, style = COLORS[series.color], STYLES[series.style]
        label = series.name.replace("$", r"\$")  # not a formula
        every = slice(None, None, -max(1, len(series.x) // STATIC_POINTS))  # from the end, which is always shown
        axis.plot(series.x[every], series.mean[every], style, color=color, label=label, linewidth=1.4)
        axis.fill_between(series.x[every], series.low[every], series.high[every], color=color, alpha=0.15, linewidth=0)
        axis.plot([x for x, _ in series.points], [y for _, y in series.points], "o", color=color, markersize=3)
        curves = [*zip(series.x, series.low, strict=True), *zip(series.x, series.high, strict=True), *series.points]
        late += [value for tokens, value in curves if tokens >= start]
    if chart.reference is not None:
        axis.axhline(chart.reference, color="black", linestyle=":", linewidth=1)
    margin = 0.05 * (max(late) - min(late)) + 1e-3
    axis.set_ylim(min(late) - margin, max(late) + margin)
    axis.set_xlabel("tokens")
    axis.xaxis.set_major_formatter(EngFormatter())
    axis.set_ylabel(chart.unit)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def _charts(
    groups: Sequence[Group], kind: str, unit: str, reference: float | None, line: str, points: str | None
) -> list[Chart]:
    """A chart per scale; `line` and `points` are names of a run's curves."""
    charts: list[Chart] = []
    for scale in dict.fromkeys(group.scale for group in groups):
        series, windows = [], set()
        for number, group in enumerate([group for group in groups if group.scale == scale]):
            for suffix, runs in (("", group.finished), (", unfinished", group.unfinished)):
                if started := [run for run in runs if getattr(run, line)]:
                    style = UNFINISHED if suffix else number // len(COLORS) % len(STYLES)
                    look = number % len(COLORS), style
                    one, width = _series(group.method + suffix, look, started, line, points)
                    series.append(one)
                    windows.add(width)
        if series:
            window = f"{min(windows)} to {max(windows)}" if len(windows) > 1 else str(min(windows))
            charts.append(Chart(f"{kind}-{len(charts) + 1}", scale, unit, reference, window, series))
    return charts


def _series(name: str, look: tuple[int, int], runs: Sequence[Run], line: str, points: str | None) -> tuple[Series, int]:
    """The series, which ends with the shortest run, and the window of its moving average."""
    curves: list[Curve] = [getattr(run, line) for run in runs]
    steps = min(len(curve) for curve in curves)
    averages = [smooth([value for _, value in curve[:steps]]) for curve in curves]
    width, values = averages[0][0], np.stack([average for _, average in averages])
    kept = np.unique(np.linspace(0, values.shape[1] - 1, min(MAX_POINTS, values.shape[1])).round().astype(int))
    tokens = [curves[0][width - 1 + number][0] for number in kept]
    mean, low, high = (np.round(of[kept], DIGITS).tolist() for of in (values.mean(0), values.min(0), values.max(0)))
    single = [point for run in runs for point in getattr(run, points)] if points else []
    return Series(name, *look, len(runs), tokens, mean, low, high, [(x, round(y, DIGITS)) for x, y in single]), width
