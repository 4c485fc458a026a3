"""Intervals against an independent calculation."""

import math
import random

import pytest

from dualres.report.statistics import T_POINTS, Interval, estimate, paired_difference, t_point


def t_distribution(t: float, freedom: int) -> float:
    """Its distribution function at t > 0, by Simpson's rule on the density."""
    factor = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    pieces = 2000
    points = [factor * (1 + (t * i / pieces) ** 2 / freedom) ** (-(freedom + 1) / 2) for i in range(pieces + 1)]
    area = points[0] + points[-1] + 4 * sum(points[1:-1:2]) + 2 * sum(points[2:-1:2])
    return 0.5 + area * t / pieces / 3


@pytest.mark.parametrize("freedom", [*range(1, len(T_POINTS) + 1), 31, 40, 100, 1000])
def test_t_points(freedom: int):
    """Points have three decimals: half a unit of the last, where the density is at most 0.06."""
    assert t_distribution(t_point(freedom), freedom) == pytest.approx(0.975, abs=0.0005 * 0.06)


def test_estimate():
    """Three values by hand: mean 2, s = 1, half = 4.303 / √3."""
    assert estimate([1.0, 2.0, 3.0]) == pytest.approx((2.0, 4.303 / math.sqrt(3), 3))
    assert estimate([1.5]) == Interval(1.5, None, 1)
    assert estimate([1.0, 2.0, 3.0]).text(2) == "2.00 ± 2.48"
    assert Interval(-0.1, None, 1).text(sign="+") == "-0.1000"


def test_the_interval_covers():
    """19 times of 20, over many draws of three."""
    chance = random.Random(0)
    covered = 0
    for _ in range(4000):
        found = estimate([chance.gauss(0, 1) for _ in range(3)])
        assert found.half is not None
        covered += abs(found.mean) <= found.half
    assert covered / 4000 == pytest.approx(0.95, abs=0.012)


def test_pairs_are_of_the_same_seed():
    base = {0: 3.0, 1: 4.0, 2: 5.0}
    ours = {2: 4.9, 0: 2.9, 1: 3.9, 7: 1.0}  # seed 7 has no partner
    found = paired_difference(ours, base)
    assert found is not None
    assert found.mean == pytest.approx(-0.1)
    assert found.half == pytest.approx(0, abs=1e-12)
    assert found.seeds == 3
    assert paired_difference({1: 2.0}, {2: 2.0}) is None
