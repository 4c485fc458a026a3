"""A chart as a still picture, for readers without scripts."""

import io

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from dualres.report.charts import Chart
from dualres.util.curves import COLORS, STYLES

MOST_POINTS = 200  # of a curve: it is looked at in one size
EARLY = 1 / 5  # of the tokens: the first steep fall, which the vertical axis leaves out


def still(chart: Chart) -> str:
    """The panel as an SVG document; the same bytes for the same runs."""
    figure = Figure(figsize=(8.0, 4.4), layout="constrained")
    axis = figure.subplots()
    start = EARLY * max(series.x[-1] for series in chart.series)
    ends: list[float] = []  # late values, for the axis
    for series in chart.series:
        colour, style = COLORS[series.colour], STYLES[series.style]
        label = series.name.replace("$", r"\$")  # which would begin a formula
        some = slice(None, None, -max(1, len(series.x) // MOST_POINTS))  # from the end, which must be among them
        axis.plot(series.x[some], series.mean[some], style, color=colour, label=label, linewidth=1.4)
        axis.fill_between(series.x[some], series.low[some], series.high[some], color=colour, alpha=0.15, linewidth=0)
        axis.plot([x for x, _ in series.points], [y for _, y in series.points], "o", color=colour, markersize=3)
        curves = [*zip(series.x, series.low, strict=True), *zip(series.x, series.high, strict=True), *series.points]
        ends += [value for tokens, value in curves if tokens >= start]
    if chart.reference is not None:
        axis.axhline(chart.reference, color="black", linestyle=":", linewidth=1)
        ends.append(chart.reference)
    room = 0.05 * (max(ends) - min(ends)) + 1e-3
    axis.set_ylim(min(ends) - room, max(ends) + room)
    axis.set_xlabel("tokens")
    axis.xaxis.set_major_formatter(EngFormatter())
    axis.set_ylabel(chart.unit)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    drawn = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "dualres"}):  # the same picture, the same bytes
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue()
