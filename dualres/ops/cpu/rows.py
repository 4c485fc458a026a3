"""Arithmetic on float32 rows in compiled loops, with as few passes over them as it takes."""
# D width

import math
from typing import Any

import numpy as np
from numba import njit

from dualres.ops.cpu.streams import OPTIONS, number, rounded


@njit(**OPTIONS)
def dot(a: Any, b: Any) -> Any:
    """a · b"""
    total = np.float32(0)
    for d in range(len(a)):
        total += a[d] * b[d]
    return total


@njit(**OPTIONS)
def two_dots(a: Any, b: Any, row: Any) -> Any:
    """a · row and b · row, reading the row once; b and the row may be a stream's."""
    first, second = np.float32(0), np.float32(0)
    for d in range(len(row)):
        x = number(row[d])
        first += a[d] * x
        second += number(b[d]) * x
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
def blend(into: Any, own: Any, row: Any, rest: Any, other: Any) -> Any:
    """into = own · row + rest · other, and its square; `into` and the row may be a stream's. -> 1"""
    square = np.float32(0)
    for d in range(len(into)):
        x = own * number(row[d]) + rest * other[d]
        into[d] = rounded(x, into)
        square += x * x
    return square


@njit(**OPTIONS)
def blend_with_dots(into: Any, own: Any, row: Any, rest: Any, other: Any, four: Any) -> Any:
    """`blend`, its square and its products with four rows, in one pass. -> 5 numbers"""
    a, b, c, e = four
    square, one, two = np.float32(0), np.float32(0), np.float32(0)
    three, last = np.float32(0), np.float32(0)
    for d in range(len(into)):
        x = own * number(row[d]) + rest * other[d]
        into[d] = x
        square += x * x
        one += a[d] * x
        two += b[d] * x
        three += c[d] * x
        last += e[d] * x
    return square, one, two, three, last


@njit(**OPTIONS)
def add(total: Any, weight: Any, row: Any) -> None:
    """total += weight · row, which may be a stream's"""
    for d in range(len(row)):
        total[d] += weight * number(row[d])


@njit(**OPTIONS)
def add_to_two(total: Any, other: Any, weight: Any, another: Any, row: Any) -> None:
    """`add` to two totals, reading the row once."""
    for d in range(len(row)):
        x = number(row[d])
        total[d] += weight * x
        other[d] += another * x


@njit(**OPTIONS)
def add_to_four(four: Any, weights: Any, row: Any) -> None:
    """`add` to four totals, reading the row once."""
    a, b, c, e = four
    wa, wb, wc, we = weights
    for d in range(len(row)):
        x = row[d]
        a[d] += wa * x
        b[d] += wb * x
        c[d] += wc * x
        e[d] += we * x


@njit(**OPTIONS)
def sum_of_six(total: Any, weights: Any, rows: Any) -> None:
    """total = Σ_n weights[n] · rows[n] (D,), 6 × 1, 6 × (D,)"""
    a, b, c, e, f, g = rows
    wa, wb, wc, we, wf, wg = weights
    for d in range(len(total)):
        total[d] = (wa * a[d] + wb * b[d]) + (wc * c[d] + we * e[d]) + (wf * f[d] + wg * g[d])


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
    """total, which may be a stream's, = weight · row"""
    for d in range(len(total)):
        total[d] = rounded(weight * row[d], total)


@njit(**OPTIONS)
def inverse_norm(square: Any, size: int, eps: float) -> Any:
    """1 / √(mean x² + eps) of `size` numbers with that square."""
    return np.float32(1 / math.sqrt(square / size + eps))


@njit(**OPTIONS)
def normalise(row: Any, weight: Any, square: Any, eps: float) -> None:
    """The norm of the branch, in place, of a row whose square is known. (D,), (D,), 1"""
    factor = inverse_norm(square, len(row), eps)
    for d in range(len(row)):
        row[d] *= factor * weight[d]


@njit(**OPTIONS)
def normalise_backward(given: Any, row: Any, weight: Any, square: Any, eps: float, d_weight: Any) -> None:
    """Turns the gradient of what `normalise` made of the row into the row's; adds to the weight's.

    3 × (D,), 1, 1, (D,)
    """
    factor = inverse_norm(square, len(row), eps)
    product = np.float32(0)
    for d in range(len(row)):
        x = given[d] * row[d]
        d_weight[d] += factor * x
        product += weight[d] * x
    shrink = np.float32(factor * factor * factor * product / len(row))
    for d in range(len(row)):
        given[d] = factor * weight[d] * given[d] - shrink * row[d]
