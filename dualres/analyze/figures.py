"""Analyses as pictures: a panel per method and kind, all methods on one scale, readable in print and colour-blind."""
# L layers  J streams  N blocks  O output streams  E experts

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure, SubFigure

from dualres.analyze import panels
from dualres.analyze.analysis_files import Analysis
from dualres.analyze.panels import Limits, Size
from dualres.config.paper import GATE_RESCUE
from dualres.util.atomic_files import write_bytes

Draw = Callable[[Figure | SubFigure, Analysis, Limits], None]
ENDINGS = ("svg", "png")
STYLE: Any = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.hashsalt": "dualres",  # the same picture, the same bytes
}
MOST_INCHES = 14.0  # of a picture with several methods; then they go on beneath


class Kind(NamedTuple):
    """One sort of picture."""

    name: str  # of its files
    title: str
    text: str  # what it shows, and what the paper says
    needs: str  # the array without which there is nothing to draw
    size: Callable[[Analysis], Size]
    draw: Draw


class Panel(NamedTuple):
    """One method's picture."""

    method: str
    svg: str  # a document of its own, on a white ground


class Section(NamedTuple):
    """One sort of picture, for every method that has it."""

    name: str
    title: str
    text: str
    panels: tuple[Panel, ...]


_PAPERS_GATES = "; ".join(f"{row.name} {row.gap} and r = {row.correlation}" for row in GATE_RESCUE)
KINDS = (
    Kind(
        "cka",
        "Cross-stream linear CKA",
        "How alike two streams represent the analysed tokens, after the MLP of each layer. Rows are layers of the "
        "first stream, columns of the second; 1 is the same up to rotation and size.",
        "cka",
        panels.cka_size,
        panels.cka,
    ),
    Kind(
        "rescue",
        "KL rescue",
        "R = 1 − KL(clean ‖ only this stream) / KL(clean ‖ no stream), the streams being cut right after the MLP of "
        "each layer. 1: this stream alone recovers the prediction; 0: it helps no more than nothing. Colours end at −1",
        "rescue",
        panels.rescue_size,
        panels.rescue,
    ),
    Kind(
        "gates",
        "Write gates and rescue",
        "A point per MLP: how much more the branch writes to stream 1 than to stream 0, against how much more stream 1 "
        "rescues; line by least squares. The paper's 0.5B models (mean absolute write gap, correlation): "
        f"{_PAPERS_GATES}.",
        "write_gaps",
        panels.gates_size,
        panels.gates,
    ),
    Kind(
        "retrieval",
        "Historical retrieval",
        "The mean weight of every earlier state in what a branch reads. Rows are target layers, columns the states H_0 "
        "(the embedding) … H_N, the block's own live state counting as the state it becomes; blank cells are not there "
        "to read. Below, the read of the output.",
        "retrieval",
        panels.retrieval_size,
        panels.retrieval,
    ),
    Kind(
        "health",
        "Sizes and disagreement",
        "Root mean square of the streams after each layer and of the states H_0 … H_N; and how far the two streams' "
        "depth weights differ (Jensen–Shannon divergence, at most ln 2 = 0.693 nats).",
        "stream_rms",
        panels.health_size,
        panels.health,
    ),
    Kind(
        "experts",
        "Experts",
        "Auxiliary loss of the routers by layer (1.0 is uniform) and the share of assignments that each expert gets, "
        "over its uniform share; and the auxiliary loss over training, a moving average.",
        "expert_load",
        panels.experts_size,
        panels.experts,
    ),
)


def sections(analyses: Mapping[str, Analysis]) -> list[Section]:
    """A picture for every method and kind, for a page; `analyses` by method."""
    limits = panels.limits(analyses.values())
    found = []
    for kind in KINDS:
        drawn = [
            Panel(method, _bytes(_alone(kind, analysis, limits), "svg").decode())
            for method, analysis in analyses.items()
            if kind.needs in analysis.arrays
        ]
        if drawn:
            found.append(Section(kind.name, kind.title, kind.text, tuple(drawn)))
    return found


def draw_one(analysis: Analysis, folder: Path) -> list[Path]:
    """A model's pictures, as files in `folder`."""
    limits = panels.limits([analysis])
    drawn = [kind for kind in KINDS if kind.needs in analysis.arrays]
    return [path for kind in drawn for path in _write(_alone(kind, analysis, limits), folder / kind.name)]


def is_drawn(analysis: Analysis, folder: Path) -> bool:
    """Whether `folder` has all the pictures of a model."""
    drawn = [kind for kind in KINDS if kind.needs in analysis.arrays]
    return all((folder / f"{kind.name}.{ending}").is_file() for kind in drawn for ending in ENDINGS)


def draw_together(analyses: Mapping[str, Analysis], folder: Path) -> list[Path]:
    """All methods in one picture of each kind, as files in `folder`."""
    limits = panels.limits(analyses.values())
    written = []
    for kind in KINDS:
        having = {method: analysis for method, analysis in analyses.items() if kind.needs in analysis.arrays}
        if having:
            written += _write(_together(kind, having, limits), folder / kind.name)
    return written


def _alone(kind: Kind, analysis: Analysis, limits: Limits) -> Figure:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=kind.size(analysis), layout="constrained")
        kind.draw(figure, analysis, limits)
    return figure


def _together(kind: Kind, analyses: Mapping[str, Analysis], limits: Limits) -> Figure:
    """Panels in rows, each as wide as its row's widest need be."""
    rows: list[list[str]] = [[]]
    for method, analysis in analyses.items():
        width = sum(kind.size(analyses[name])[0] for name in rows[-1]) + kind.size(analysis)[0]
        if rows[-1] and width > MOST_INCHES:
            rows.append([])
        rows[-1].append(method)
    sizes = [[kind.size(analyses[name]) for name in row] for row in rows]
    widths = [sum(width for width, _ in row) for row in sizes]
    heights = [max(height for _, height in row) + 0.3 for row in sizes]  # and the method's name
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(max(widths), sum(heights)), layout="constrained")
        lines: Any = figure.subfigures(len(rows), 1, height_ratios=heights, squeeze=False)
        for row, line, needed, width in zip(rows, lines[:, 0], sizes, widths, strict=True):
            shares = [size[0] for size in needed]
            rest = [max(widths) - width] if max(widths) - width > 0.1 else []
            cells: Any = line.subfigures(1, len(row) + len(rest), width_ratios=[*shares, *rest], squeeze=False)
            for method, cell in zip(row, cells[0], strict=False):
                kind.draw(cell, analyses[method], limits)
                cell.suptitle(method, fontsize=9, fontweight="bold")
    return figure


def _write(figure: Figure, stem: Path) -> list[Path]:
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(f"{stem.name}.{ending}") for ending in ENDINGS]
    for path, ending in zip(paths, ENDINGS, strict=True):
        write_bytes(path, _bytes(figure, ending))
    return paths


def _bytes(figure: Figure, ending: str) -> bytes:
    drawn = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(drawn, format=ending, dpi=200, metadata={"Date": None} if ending == "svg" else {})
    return drawn.getvalue()
