"""Curves: the moving average, the range over seeds, thinning, styles; and colors with enough contrast."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from dualres.report.charts import MAX_POINTS, Chart, as_data, as_svg, loss_charts, router_charts
from dualres.report.page import STYLE, _themed
from dualres.report.runs import Curve, Run, find_runs, group_runs
from dualres.util.curves import COLORS, STYLES
from tests.report.conftest import STEPS
from tests.train.tiny import rows


def falling(steps: int, offset: float) -> Curve:
    """A noisy loss curve."""
    noise = np.random.default_rng(int(offset * 100)).normal(0, 0.1, steps)
    return tuple((128 * (n + 1), float(3 + offset + 5 / (1 + n) + noise[n])) for n in range(steps))


def runs_of(suite: Path, *curves: Curve) -> list[Run]:
    [run] = find_runs([suite / "standard-seed0"])
    return [changed(run, seed=n)._replace(folder=Path(f"run-{n}"), training=curve) for n, curve in enumerate(curves)]


def changed(run: Run, **train: Any) -> Run:
    return run._replace(config=replace(run.config, train=replace(run.config.train, **train)))


def drawn(runs: list[Run]) -> Chart:
    [chart] = loss_charts(group_runs(runs)[0])
    return chart


@pytest.mark.parametrize(("steps", "window"), [(7000, 300), (6000, 300), (700, 35), (39, 1), (1, 1)])
def test_the_mean_of_moving_averages_and_its_range(suite: Path, steps: int, window: int):
    curves = [falling(steps, 0.0), falling(steps, 0.5)]
    chart = drawn(runs_of(suite, *curves))
    assert chart.window == str(window)
    [series] = chart.series
    assert series.seeds == 2
    for at in {0, len(series.x) // 2, len(series.x) - 1}:
        end = next(n for n, (tokens, _) in enumerate(curves[0]) if tokens == series.x[at]) + 1
        means = [np.mean([loss for _, loss in curve[end - window : end]]) for curve in curves]
        assert series.mean[at] == pytest.approx(np.mean(means), abs=1e-5)
        assert (series.low[at], series.high[at]) == pytest.approx((min(means), max(means)), abs=1e-5)
    assert series.x[-1] == 128 * steps
    assert len(series.x) == len(series.mean) == min(MAX_POINTS, steps - window + 1)


def test_a_longer_seed_is_cut_where_the_shorter_ends(suite: Path):
    assert drawn(runs_of(suite, falling(100, 0.0), falling(50, 0.0))).series[0].x[-1] == 50 * 128


def test_one_seed_has_no_range(suite: Path):
    made = as_data(drawn(runs_of(suite, falling(30, 0.0))))["series"][0]
    assert (made["low"], made["high"]) == (None, None)


def test_windows_that_differ_are_told(suite: Path):
    short, long = runs_of(suite, falling(40, 0.0), falling(400, 0.0))
    assert drawn([short._replace(summary=None), long]).window == "2 to 20"


def test_colors_and_styles(suite: Path):
    """Beyond eight the line style changes."""
    [run] = runs_of(suite, falling(20, 0.0))
    many = [changed(run, clip=1.0 + n)._replace(folder=Path(str(n))) for n in range(10)]
    looks = [(series.color, series.style) for series in drawn(many).series]
    assert looks == [(n % len(COLORS), n // len(COLORS) % len(STYLES)) for n in range(10)]


def test_validation_losses_are_points(suite: Path):
    [chart] = loss_charts(group_runs(find_runs([suite]))[0])
    points = chart.series[0].points
    assert [tokens for tokens, _ in points] == [step * 128 for step in (8, 16, 24)] * 2  # two seeds


def test_routers_have_a_chart_of_their_own(suite: Path, sparse: Path):
    groups = group_runs(find_runs([suite, sparse]))[0]
    [chart] = router_charts(groups)
    assert (chart.title, chart.reference) == ("2×32, 4 experts", 1.0)
    [series] = chart.series
    logged = [row["router_loss"] for row in rows(sparse) if "router_loss" in row]
    assert series.mean == pytest.approx(logged, abs=1e-5)
    assert (len(logged), series.points) == (STEPS, [])
    assert router_charts(group_runs(find_runs([suite]))[0]) == []
    assert [loss.title for loss in loss_charts(groups)] == ["2×32", "2×32, 4 experts"]


def test_the_static_figure(suite: Path, sparse: Path):
    groups = group_runs(find_runs([suite, sparse]))[0]
    for chart in (*loss_charts(groups), *router_charts(groups)):
        text = as_svg(chart)
        assert text == as_svg(chart)  # the same bytes for the same runs
        assert text.count("<path") > 5
        for series in chart.series:
            assert f"stroke: {COLORS[series.color].lower()}" in text.lower()


def variables(block: str) -> dict[str, str]:
    return dict(re.findall(r"--(\w+): (#\w+|transparent)", block))


LIGHT = variables(re.split(r"@media screen and \(prefers-color-scheme: dark\)", STYLE)[0])
DARK = {**LIGHT, **variables(re.split(r"@media screen and \(prefers-color-scheme: dark\)", STYLE)[1].split("}")[0])}


def contrast(a: str, b: str) -> float:
    """WCAG 2's."""

    def luminance(color: str) -> float:
        digits = color[1:] if len(color) == 7 else "".join(2 * digit for digit in color[1:])
        parts = [int(digits[n : n + 2], 16) / 255 for n in (0, 2, 4)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_everything_contrasts_with_the_background(scheme: dict[str, str]):
    """WCAG AA: 4.5 for text, 3 for lines; a pale line has a casing that is seen instead."""
    for background in (scheme["background"], scheme["soft"]):
        for text in ("text", "muted", "link"):
            assert contrast(scheme[text], background) >= 4.5
    for number in range(len(COLORS)):
        line, casing = scheme[f"c{number}"], scheme[f"k{number}"]
        seen = line if casing == "transparent" else casing
        assert contrast(seen, scheme["background"]) >= 3, number
    assert scheme["background"] == "#fff" or contrast(scheme["c0"], "#000") > 15  # black is light in the dark


def test_the_page_has_every_color_and_style():
    for number, color in enumerate(COLORS):
        assert LIGHT[f"c{number}"] == color.lower()
        assert f".c{number} " in STYLE
    assert all(f".s{number} .line" in STYLE for number in range(1, len(STYLES)))


def test_a_figure_has_the_colors_of_the_page(suite: Path):
    """All that would be dark ink or white paper follows the theme; colors that stand for values do not."""
    [chart] = loss_charts(group_runs(find_runs([suite]))[0])
    drawing = _themed(as_svg(chart).replace("</svg>", '<path style="fill: #440154"/><text fill="#010101"/></svg>'))
    ElementTree.fromstring(drawing)
    style, _, drawn = drawing.partition("</style>")
    assert {*re.findall("#[0-9a-f]{6}", drawn)} <= {"#440154", "#010101", "#b0b0b0"}
    used = {*re.findall(r"var\(--(\w+)\)", drawing)}
    assert {"c0", "c1", "c2", "background"} <= used <= {*variables(style)}
    assert "prefers-color-scheme: dark" in style
