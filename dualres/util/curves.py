"""The moving average, and the colorblind-safe colors and line styles, of every curve."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

WINDOW = 300  # steps of the moving average, as in the paper
SHORT_RUN = 20  # a run of N steps is averaged over at most N / SHORT_RUN of them
# The palette of Okabe and Ito; further curves change the line style.
COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442")
STYLES = ("-", "--", ":")


def smooth(values: Sequence[float] | NDArray[np.float64]) -> tuple[int, NDArray[np.float64]]:
    """The window w of the moving average, and the averages of w consecutive values. (N,) -> (N−w+1,)"""
    width = max(1, min(WINDOW, len(values) // SHORT_RUN))
    return width, np.convolve(values, np.ones(width) / width, "valid")
