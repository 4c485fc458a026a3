"""The README's figure: validation loss relative to `standard`, from results/*/suite.json, for light and dark pages.

python benchmarks/results_figure.py
"""

import json
from pathlib import Path

import matplotlib
from matplotlib import pyplot

ROOT = Path(__file__).parent.parent
PANELS = (("nano-novels", "2.0M tokens", ("dar-block",)), ("nano-study", "0.5M tokens", None))
THEMES = {"": ("#1f2328", "#818b98", "#0a69da"), "-dark": ("#f0f6fc", "#7d8590", "#58a6ff")}  # ink, other methods, DAR


def main() -> None:
    """One SVG per theme."""
    matplotlib.use("Agg")
    pyplot.rcParams.update({"font.size": 12, "svg.hashsalt": "dualres"})  # the same file every time
    panels = [(title, differences(folder, methods)) for folder, title, methods in PANELS]
    for suffix, colors in THEMES.items():
        draw(panels, ROOT / "docs" / "images" / f"results{suffix}.svg", *colors)


def differences(folder: str, methods: tuple[str, ...] | None) -> list[tuple[str, float, float]]:
    """Method, mean difference from `standard` paired by seed, half of its 95% interval; the lowest first."""
    rows = json.loads((ROOT / "results" / folder / "suite.json").read_text())["rows"]
    found = [(row["method"], row["difference"]["mean"], row["difference"]["half"]) for row in rows]
    return sorted((row for row in found if row[0] in (methods or row[0]) and row[0] != "standard"), key=lambda r: r[1])


def draw(
    panels: list[tuple[str, list[tuple[str, float, float]]]], path: Path, ink: str, other: str, highlight: str
) -> None:
    """One row per method: the mean as a dot, its 95% interval as a bar."""
    heights = [len(rows) + 0.6 for _, rows in panels]
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(7.2, 4.6), sharex=True, height_ratios=heights, layout="constrained"
    )
    for axis, (title, rows) in zip(axes, panels, strict=True):
        for place, (method, mean, half) in enumerate(rows):
            color = highlight if method.startswith("dar") else other
            axis.errorbar(mean, place, xerr=half, fmt="o", color=color, markersize=7, capsize=3, linewidth=2)
        axis.axvline(0, color=ink, linewidth=1)
        axis.set_yticks(range(len(rows)), [row[0] for row in rows])
        axis.set_ylim(len(rows) - 0.3, -0.7)
        axis.text(0.995, 0, title, transform=axis.get_yaxis_transform(), ha="right", va="center", color=ink)
        axis.tick_params(colors=ink, length=0)
        axis.grid(axis="x", color=other, alpha=0.25)
        axis.set_axisbelow(True)
        for spine in axis.spines.values():
            spine.set_visible(False)
    axes[-1].set_xlabel("validation loss − standard (nats/token), lower is better", color=ink)
    figure.savefig(path, transparent=True, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    main()
