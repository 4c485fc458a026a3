"""Arithmetic on float32 rows in compiled loops, with as few passes over them as it takes."""
# D width

import math
from typing import Any

import numpy as np
from numba import njit

from dualres.ops.native.streams import OPTIONS, number


@njit(**OPTIONS)
def dot(a: Any, b: Any) -> Any:
    """a · b"""
    total = np.float32(0)
    for d in range(len(a)):
        total += a[d] * b[d]
    return total


@njit(**OPTIONS)
def two_dots(a: Any, b: Any, row: Any) -> Any:
    """a · row and b · row, reading the row once."""
    first, second = np.float32(0), np.float32(0)
    for d in range(len(row)):
        first += a[d] * row[d]
        second += b[d] * row[d]
    return first, second


@njit(**OPTIONS)
def load_with_dots(into: Any, row: Any, a: Any, b: Any) -> Any:
    """`load`, and of what was loaded the square, a · row and b · row. (D,), (D,), (D,), (D,) -> 3 numbers"""
    square, first, second = np.float32(0), np.float32(0), np.float32(0)
    for d in range(len(into)):
        x = number(row[d])
        into[d] = x
        square += x * x
        first += a[d] * x
        second += b[d] * x
    return square, first, second


@njit(**OPTIONS)
def add(total: Any, weight: Any, row: Any) -> None:
    """total += weight · row"""
    for d in range(len(row)):
        total[d] += weight * row[d]


@njit(**OPTIONS)
def add_rows(total: Any, weights: Any, rows: Any) -> None:
    """total += Σ_n weights[n] · rows[n], four rows at a time. (D,), (n,), (n,D)"""
    n, count = 0, len(weights)
    while n + 4 <= count:
        a, b, c, e = rows[n], rows[n + 1], rows[n + 2], rows[n + 3]
        wa, wb, wc, we = weights[n], weights[n + 1], weights[n + 2], weights[n + 3]
        for d in range(len(total)):
            total[d] += (wa * a[d] + wb * b[d]) + (wc * c[d] + we * e[d])
        n += 4
    while n < count:
        add(total, weights[n], rows[n])
        n += 1


@njit(**OPTIONS)
def add_rows_to_two(total: Any, other: Any, weights: Any, others: Any, rows: Any) -> None:
    """`add_rows` to two totals, each with its weights, reading the rows once. (D,), (D,), (n,), (n,), (n,D)"""
    n, count = 0, len(weights)
    while n + 4 <= count:
        a, b, c, e = rows[n], rows[n + 1], rows[n + 2], rows[n + 3]
        wa, wb, wc, we = weights[n], weights[n + 1], weights[n + 2], weights[n + 3]
        va, vb, vc, ve = others[n], others[n + 1], others[n + 2], others[n + 3]
        for d in range(len(total)):
            x, y, z, w = a[d], b[d], c[d], e[d]
            total[d] += (wa * x + wb * y) + (wc * z + we * w)
            other[d] += (va * x + vb * y) + (vc * z + ve * w)
        n += 4
    while n < count:
        a, wa, va = rows[n], weights[n], others[n]
        for d in range(len(total)):
            total[d] += wa * a[d]
            other[d] += va * a[d]
        n += 1


@njit(**OPTIONS)
def sum_chosen(total: Any, own: Any, row: Any, weights: Any, bank: Any, which: Any) -> None:
    """total = own · row + Σ_n weights[n] · bank[which[n]], n a multiple of four. (D,), 1, (D,), (n,), (·,D), (n,)"""
    scaled(total, own, row)
    for n in range(0, len(which), 4):
        a, b, c, e = bank[which[n]], bank[which[n + 1]], bank[which[n + 2]], bank[which[n + 3]]
        wa, wb, wc, we = weights[n], weights[n + 1], weights[n + 2], weights[n + 3]
        for d in range(len(total)):
            total[d] += (wa * a[d] + wb * b[d]) + (wc * c[d] + we * e[d])


@njit(**OPTIONS)
def sum_chosen_for_two(totals: Any, own: Any, rows: Any, weights: Any, bank: Any, which: Any) -> None:
    """`sum_chosen` for two totals, reading the bank once. 2 × (D,), (2,), 2 × (D,), (2,n), (·,D), (n,)"""
    total, other = totals
    row, another = rows
    mine, its = own[0], own[1]
    for n in range(0, len(which), 4):
        a, b, c, e = bank[which[n]], bank[which[n + 1]], bank[which[n + 2]], bank[which[n + 3]]
        wa, wb, wc, we = weights[0, n], weights[0, n + 1], weights[0, n + 2], weights[0, n + 3]
        va, vb, vc, ve = weights[1, n], weights[1, n + 1], weights[1, n + 2], weights[1, n + 3]
        for d in range(len(total)):
            x, y, z, w = a[d], b[d], c[d], e[d]
            total[d] = mine * row[d] + (wa * x + wb * y) + (wc * z + we * w)
            other[d] = its * another[d] + (va * x + vb * y) + (vc * z + ve * w)
        row, another, mine, its = total, other, np.float32(1), np.float32(1)


@njit(**OPTIONS)
def scaled(total: Any, weight: Any, row: Any) -> None:
    """total = weight · row"""
    for d in range(len(total)):
        total[d] = weight * row[d]


@njit(**OPTIONS)
def inverse_rms(rows: Any, eps: float) -> Any:
    """1 / √(mean x² + eps) of all rows together. (·,D) -> 1"""
    total = np.float32(0)
    for n in range(len(rows)):
        total += dot(rows[n], rows[n])
    return np.float32(1 / math.sqrt(total / rows.size + eps))


@njit(**OPTIONS)
def normalise(row: Any, weight: Any, eps: float) -> None:
    """The norm of the branch, in place. (D,), (D,)"""
    factor = np.float32(1 / math.sqrt(dot(row, row) / len(row) + eps))
    for d in range(len(row)):
        row[d] *= factor * weight[d]


@njit(**OPTIONS)
def normalise_backward(given: Any, row: Any, weight: Any, eps: float, d_weight: Any) -> None:
    """Turns the gradient of what `normalise` made of the row into the row's; adds to the weight's. 3 × (D,), 1, (D,)"""
    factor = np.float32(1 / math.sqrt(dot(row, row) / len(row) + eps))
    for d in range(len(row)):
        d_weight[d] += given[d] * row[d] * factor
    for d in range(len(row)):
        given[d] *= weight[d]
    shrink = factor * factor * factor * dot(given, row) / len(row)
    for d in range(len(row)):
        given[d] = factor * given[d] - shrink * row[d]
