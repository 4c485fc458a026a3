"""Style of curves in figures: moving average, colors and line styles."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SMOOTHED = 300  # steps of the moving average, as in the paper; fewer in short runs
SHARE = 20  # in a short run the window is 1 / SHARE of its steps
# Okabe and Ito's colors, distinguishable for color-blind readers; beyond eight the line style changes.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442")
STYLES = ("-", "--", ":")


def window(steps: int) -> int:
    return max(1, min(SMOOTHED, steps // SHARE))


def smooth(values: Sequence[float] | NDArray[np.float64]) -> tuple[int, NDArray[np.float64]]:
    """The width w of the moving average, and its values. (N,) -> (N−w+1,)"""
    width = window(len(values))
    return width, np.convolve(values, np.ones(width) / width, "valid")
