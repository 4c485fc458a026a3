"""Curves for the page as data: moving averages over seeds, thinned, which its script and still.py draw."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dualres.report.groups import Group
from dualres.report.runs import Curve, Run
from dualres.util.curves import COLORS, STYLES, smooth

MOST_POINTS = 600  # of a curve
UNFINISHED = len(STYLES) - 1  # the style that other methods are the last to have
DIGITS = 5  # after the point: a ten-thousandth can still be read between two methods


class Series(NamedTuple):
    """One method's curve: tokens, the mean over seeds, their range, and single points."""

    name: str
    colour: int  # of COLORS
    style: int  # of STYLES
    seeds: int
    x: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]
    points: list[tuple[int, float]]


class Chart(NamedTuple):
    """One panel."""

    name: str  # of its element in the page
    title: str
    unit: str  # of the vertical axis
    reference: float | None  # a line to hold the curves against
    window: str  # of the moving average, in words
    series: list[Series]


def loss_charts(groups: Sequence[Group]) -> list[Chart]:
    """A panel per scale; unfinished runs are curves of their own, so that they cut no one's mean short."""
    return _charts(groups, "loss", "training loss, nats per token", None, "training", "validation")


def router_charts(groups: Sequence[Group]) -> list[Chart]:
    """The same of the routers' balance, where there are experts."""
    return _charts(groups, "router", "load-balancing loss of the routers", 1.0, "router", None)


def as_data(chart: Chart) -> dict[str, Any]:
    """For the page's script; without a range where there is one seed."""

    def series(given: Series) -> dict[str, Any]:
        return {**given._asdict(), **({"low": None, "high": None} if given.seeds == 1 else {})}

    return {**chart._asdict(), "series": [series(given) for given in chart.series]}


def _charts(
    groups: Sequence[Group], kind: str, unit: str, reference: float | None, line: str, points: str | None
) -> list[Chart]:
    """`line` and `points` are curves of a run."""
    charts: list[Chart] = []
    for scale in dict.fromkeys(group.scale for group in groups):
        series, windows = [], set()
        for number, group in enumerate([group for group in groups if group.scale == scale]):
            for ending, runs in (("", group.finished), (", unfinished", group.unfinished)):
                there = [run for run in runs if getattr(run, line)]
                if there:
                    style = UNFINISHED if ending else number // len(COLORS) % len(STYLES)
                    look = number % len(COLORS), style
                    drawn, width = _series(group.method + ending, look, there, line, points)
                    series.append(drawn)
                    windows.add(width)
        if series:
            window = f"{min(windows)} to {max(windows)}" if len(windows) > 1 else str(min(windows))
            charts.append(Chart(f"{kind}-{len(charts) + 1}", scale, unit, reference, window, series))
    return charts


def _series(name: str, look: tuple[int, int], runs: Sequence[Run], line: str, points: str | None) -> tuple[Series, int]:
    """The mean ends where the shortest of the runs does."""
    curves: list[Curve] = [getattr(run, line) for run in runs]
    steps = min(len(curve) for curve in curves)
    averages = [smooth([value for _, value in curve[:steps]]) for curve in curves]
    width, values = averages[0][0], np.stack([average for _, average in averages])
    kept = np.unique(np.linspace(0, values.shape[1] - 1, min(MOST_POINTS, values.shape[1])).round().astype(int))
    tokens = [curves[0][width - 1 + number][0] for number in kept]
    mean, low, high = (np.round(of[kept], DIGITS).tolist() for of in (values.mean(0), values.min(0), values.max(0)))
    single = [point for run in runs for point in getattr(run, points)] if points else []
    found = [(count, round(value, DIGITS)) for count, value in single]
    return Series(name, *look, len(runs), tokens, mean, low, high, found), width
