"""Means over seeds with 95% confidence intervals by Student's t, and differences paired by seed."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# The 97.5% quantile of Student's t for 1, 2, … 30 degrees of freedom.
T_POINTS = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


class Interval(NamedTuple):
    """A mean and the half-width of its 95% confidence interval, which is None for a single value."""

    mean: float
    half: float | None
    seeds: int

    def text(self, digits: int = 4, sign: str = "") -> str:
        """'2.6530 ± 0.0021'"""
        mean = f"{self.mean:{sign}.{digits}f}"
        return mean if self.half is None else f"{mean} ± {self.half:.{digits}f}"


def estimate(values: Sequence[float]) -> Interval:
    """x̄ ± t · s / √n"""
    count = len(values)
    if count == 1:
        return Interval(values[0], None, 1)
    half = t_point(count - 1) * statistics.stdev(values) / math.sqrt(count)
    return Interval(statistics.fmean(values), half, count)


def paired_difference(ours: Mapping[int, float], base: Mapping[int, float]) -> Interval | None:
    """The mean difference over common seeds: data order and branch weights are equal, so most of the noise cancels."""
    both = sorted(ours.keys() & base.keys())
    return estimate([ours[seed] - base[seed] for seed in both]) if both else None


def t_point(degrees: int) -> float:
    """The 97.5% quantile of Student's t; beyond the table, by expansion around the normal quantile."""
    if degrees <= len(T_POINTS):
        return T_POINTS[degrees - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
