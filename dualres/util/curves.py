"""Curves in pictures: the moving average, and colours and line styles that everyone tells apart."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SMOOTHED = 300  # steps of the moving average, as in the paper; fewer in short runs
SHARE = 20  # a short run is averaged over this part of its steps
# Okabe and Ito's colours, which the colour-blind tell apart; beyond eight the line style changes.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442")
STYLES = ("-", "--", ":")


def window(steps: int) -> int:
    """How many of `steps` steps an average takes."""
    return max(1, min(SMOOTHED, steps // SHARE))


def smooth(values: Sequence[float] | NDArray[np.float64]) -> tuple[int, NDArray[np.float64]]:
    """The width w of the moving average, and the average of each w values in a row. (N,) -> (N−w+1,)"""
    width = window(len(values))
    return width, np.convolve(values, np.ones(width) / width, "valid")
