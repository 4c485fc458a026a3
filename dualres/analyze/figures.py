"""Analyses as figures: one panel per model and kind, on shared scales, legible in print and with color blindness."""
# L layers  J streams  N blocks  O output streams  E experts

import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import yaml
from matplotlib.figure import Figure, SubFigure

from dualres.analyze import panels
from dualres.analyze.analysis import Analysis
from dualres.analyze.panels import FigureSize, Limits
from dualres.config.paper import GATE_RESCUE
from dualres.util.atomic_files import write_bytes

FOLDER = Path(__file__).parent
FORMATS = ("svg", "png")
STYLE: Any = matplotlib.rc_params_from_file(FOLDER / "figures.mplstyle", use_default_template=False)
MAX_WIDTH = 14.0  # inches of a figure with several models; beyond it panels wrap
Draw = Callable[[Figure | SubFigure, Analysis, Limits], None]


class FigureKind(NamedTuple):
    name: str  # file name
    title: str
    text: str  # what it shows, and what the paper reports
    needs: str  # the array it requires
    size: Callable[[Analysis], FigureSize]
    draw: Draw


class Panel(NamedTuple):
    """The figure of one model."""

    method: str
    svg: str  # a complete document with a white background


class Section(NamedTuple):
    """One kind of figure, for every model that has it."""

    name: str
    title: str
    text: str
    panels: tuple[Panel, ...]


def _kinds() -> Iterator[FigureKind]:
    """The kinds of figures.yaml, in its order."""
    drawn: dict[str, tuple[Callable[[Analysis], FigureSize], Draw]] = {
        "cka": (panels.cka_size, panels.cka),
        "rescue": (panels.rescue_size, panels.rescue),
        "gates": (lambda analysis: (3.3, 2.7), panels.gates),
        "retrieval": (panels.retrieval_size, panels.retrieval),
        "health": (lambda analysis: (7.2 if "divergence" in analysis.arrays else 4.9, 2.3), panels.health),
        "experts": (lambda analysis: (8.0 if "router_curve" in analysis.arrays else 5.6, 2.5), panels.experts),
    }
    paper = "; ".join(f"{row.name} {row.gap} and r = {row.correlation}" for row in GATE_RESCUE)
    for name, declared in yaml.safe_load((FOLDER / "figures.yaml").read_text(encoding="utf-8")).items():
        text = declared["text"].format(paper=paper)
        yield FigureKind(name, declared["title"], text, declared["needs"], *drawn[name])


KINDS = tuple(_kinds())


def sections(analyses: Mapping[str, Analysis]) -> list[Section]:
    """The figures of every model for a page; `analyses` by model name."""
    limits = panels.limits(analyses.values())
    result = []
    for kind, analyzed in _drawable(analyses):
        drawings = (Panel(name, _render(_alone(kind, a, limits), "svg").decode()) for name, a in analyzed.items())
        result.append(Section(kind.name, kind.title, kind.text, tuple(drawings)))
    return result


def draw_one(analysis: Analysis, folder: Path) -> None:
    """Write the figures of one model to `folder`."""
    limits = panels.limits([analysis])
    for kind, _ in _drawable({"": analysis}):
        _write(_alone(kind, analysis, limits), folder / kind.name)


def is_drawn(analysis: Analysis, folder: Path) -> bool:
    kinds = [kind for kind, _ in _drawable({"": analysis})]
    return all((folder / f"{kind.name}.{format}").is_file() for kind in kinds for format in FORMATS)


def draw_together(analyses: Mapping[str, Analysis], folder: Path) -> None:
    """Write one figure of each kind with all models side by side to `folder`."""
    limits = panels.limits(analyses.values())
    for kind, analyzed in _drawable(analyses):
        _write(_together(kind, analyzed, limits), folder / kind.name)


def _drawable(analyses: Mapping[str, Analysis]) -> Iterator[tuple[FigureKind, dict[str, Analysis]]]:
    """Every kind of figure with the analyses that have its array, if there are any."""
    for kind in KINDS:
        if analyzed := {name: analysis for name, analysis in analyses.items() if kind.needs in analysis.arrays}:
            yield kind, analyzed


def _alone(kind: FigureKind, analysis: Analysis, limits: Limits) -> Figure:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=kind.size(analysis), layout="constrained")
        kind.draw(figure, analysis, limits)
    return figure


def _together(kind: FigureKind, analyses: Mapping[str, Analysis], limits: Limits) -> Figure:
    """Panels in rows no wider than MAX_WIDTH."""
    sizes = {method: kind.size(analysis) for method, analysis in analyses.items()}
    rows: list[list[str]] = [[]]
    for method in analyses:
        if rows[-1] and sum(sizes[name][0] for name in [*rows[-1], method]) > MAX_WIDTH:
            rows.append([])
        rows[-1].append(method)
    widths = [[sizes[method][0] for method in row] for row in rows]
    heights = [max(sizes[method][1] for method in row) + 0.3 for row in rows]  # 0.3 for the model's name
    widest = max(sum(row) for row in widths)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(widest, sum(heights)), layout="constrained")
        lines: Any = figure.subfigures(len(rows), 1, height_ratios=heights, squeeze=False)
        for row, line, shares in zip(rows, lines[:, 0], widths, strict=True):
            rest = widest - sum(shares)
            ratios = [*shares, rest] if rest > 0.1 else shares
            cells: Any = line.subfigures(1, len(ratios), width_ratios=ratios, squeeze=False)
            for method, cell in zip(row, cells[0], strict=False):
                kind.draw(cell, analyses[method], limits)
                cell.suptitle(method, fontsize=9, fontweight="bold")
    return figure


def _write(figure: Figure, stem: Path) -> None:
    stem.parent.mkdir(parents=True, exist_ok=True)
    for format in FORMATS:
        write_bytes(stem.with_name(f"{stem.name}.{format}"), _render(figure, format))


def _render(figure: Figure, format: str) -> bytes:
    image = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(image, format=format, dpi=200, metadata={"Date": None} if format == "svg" else {})
    return image.getvalue()
