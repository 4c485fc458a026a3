"""Heat maps: the numbers in their cells are legible, and have room."""

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dualres.analyze import figures, panels
from dualres.analyze.analysis import Analysis, Array
from dualres.util.curves import COLORS

CKA, RESCUE = (kind for kind in figures.KINDS if kind.name in ("cka", "rescue"))
LEGIBLE = 7  # points, as the ticks have


def drawn(kind: figures.FigureKind, **arrays: Array) -> Figure:
    analysis = Analysis({}, {}, arrays)
    figure = figures._alone(kind, analysis, panels.limits([analysis]))
    FigureCanvasAgg(figure).draw()
    return figure


@pytest.mark.parametrize("layers", [2, 8, 12])
def test_similarities_have_numbers_with_room(layers: int):
    check_numbers(drawn(CKA, cka=np.ones((2, 2, layers, layers))), layers * layers)


@pytest.mark.parametrize("layers", [2, 8, 24])
def test_rescue_gains_have_numbers_with_room(layers: int):
    check_numbers(drawn(RESCUE, rescue=np.full((layers, 2), -12.5), rescue_gaps=np.zeros(layers)), 2 * layers)


def check_numbers(figure: Figure, count: int) -> None:
    axis = figure.axes[0]
    assert len(axis.texts) == count
    [[left, _], [right, _]] = axis.transData.transform([[0, 0], [1, 0]])
    [[_, top], [_, bottom]] = axis.transData.transform([[0, 0], [0, 1]])
    for text in axis.texts:
        size = float(text.get_fontsize())
        assert size >= LEGIBLE
        assert text.get_window_extent().width <= abs(right - left)
        assert size * figure.dpi / 72 <= abs(top - bottom)
        assert text.get_color() not in ("black", "white", COLORS[0])  # which a dark page would swap


def test_a_map_without_room_has_none():
    assert not drawn(CKA, cka=np.ones((2, 2, 13, 13))).axes[0].texts
    assert not drawn(RESCUE, rescue=np.ones((25, 2)), rescue_gaps=np.zeros(25)).axes[0].texts
