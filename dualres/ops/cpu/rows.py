"""Row operations of compiled loops: access by address, prefetch, conversion to and from float32, arithmetic."""
# D width

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic, overload

from dualres.ops.cpu.compiler import compiled, compiled_rows

LINE = 64  # bytes of a cache line


@intrinsic
def pointer(context: Any, address: Any, like: Any) -> Any:
    """The address as a pointer to elements of the type of `like`."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(types.int64, like), code


@compiled
def row_of(address: int, token: int, width: int, like: Any) -> Any:
    """Row `token` of the stream at `address`. -> (D,)"""
    return carray(pointer(address + token * width * like.itemsize, like), (width,))  # type: ignore[call-arg]


@intrinsic
def prefetch(context: Any, address: Any) -> Any:
    """Prefetch a cache line."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        numbers = [ir.Constant(word, n) for n in (0, 3, 1)]  # to read, into the nearest cache, data
        builder.call(function, [builder.inttoptr(arguments[0], byte), *numbers])
        return context.get_dummy_value()

    return types.void(types.int64), code


@compiled
def prefetch_row(address: int, token: int, width: int, like: Any, part: int, parts: int) -> None:
    """Prefetch a part of a row that is read soon: a row is too short for the hardware prefetcher to detect.

    If all lines were requested at once, they would queue up and stall the computation in between.
    """
    size = width * like.itemsize
    begin = address + token * size
    for line in range(size * part // parts // LINE * LINE, size * (part + 1) // parts, LINE):
        prefetch(begin + line)  # type: ignore[call-arg]


def conversion(source: Any, result: Any) -> Any:
    """A decorator for conversions between types in compiled code, written with an LLVM builder."""

    def of(code: Callable[[Any, Any], Any]) -> Any:
        @intrinsic
        def convert(context: Any, x: Any) -> Any:
            return result(source), lambda context, builder, signature, arguments: code(builder, arguments[0])

        return convert

    return of


@conversion(types.uint16, types.float32)
def from_bfloat16(builder: Any, bits: Any) -> Any:
    word = builder.shl(builder.zext(bits, ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
    return builder.bitcast(word, ir.FloatType())


@conversion(types.float32, types.uint16)
def to_bfloat16(builder: Any, number: Any) -> Any:
    """Round to nearest, ties to even; NaN stays NaN."""
    bits = builder.bitcast(number, ir.IntType(32))
    word = lambda n: ir.Constant(ir.IntType(32), n)  # noqa: E731
    odd = builder.and_(builder.lshr(bits, word(16)), word(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, word(0x7FFF))), word(16))
    chosen = builder.select(builder.fcmp_unordered("uno", number, number), word(0x7FC0), rounded)
    return builder.trunc(chosen, ir.IntType(16))


@conversion(types.int16, types.float32)
def from_float16(builder: Any, bits: Any) -> Any:
    return builder.fpext(builder.bitcast(bits, ir.HalfType()), ir.FloatType())


@conversion(types.float32, types.int16)
def to_float16(builder: Any, number: Any) -> Any:
    return builder.bitcast(builder.fptrunc(number, ir.HalfType()), ir.IntType(16))


def by_type(choose: Callable[..., Any]) -> Any:
    """A decorator for functions of compiled code: `choose` returns the implementation for its argument types."""

    @functools.wraps(choose)
    def function(*arguments: Any) -> Any:
        raise NotImplementedError("compiled code only")

    overload(function, strict=False)(choose)  # lambdas have no annotations
    return function


@by_type
def number(bits: Any) -> Any:
    """One element of a stream in float32."""
    if bits == types.float32:
        return lambda bits: bits
    convert = {types.uint16: from_bfloat16, types.int16: from_float16}[bits]
    return lambda bits: convert(bits)


@by_type
def rounded(x: Any, stream: Any) -> Any:
    """A float32 number as an element of `stream`."""
    if stream.dtype == types.float32:
        return lambda x, stream: x
    convert = {types.uint16: to_bfloat16, types.int16: to_float16}[stream.dtype]
    return lambda x, stream: convert(x)


@compiled_rows
def load(into: Any, row: Any) -> None:
    """Widen a row of a stream. (D,), (D,)"""
    for d in range(len(into)):
        into[d] = number(row[d])


@compiled_rows
def store(into: Any, row: Any) -> None:
    """Round a float32 row into a stream. (D,), (D,)"""
    for d in range(len(row)):
        into[d] = rounded(row[d], into)


@by_type
def target(row: Any, space: Any) -> Any:
    """Where to compute a result for `row`: in place if it is float32, otherwise in `space`. `finish` stores it."""
    if row.dtype == types.float32:
        return lambda row, space: row
    return lambda row, space: space


@by_type
def finish(row: Any, result: Any) -> Any:
    """Store a result that was computed in `target`."""
    if row.dtype == types.float32:
        return lambda row, result: None
    return lambda row, result: store(row, result)


@compiled_rows
def dot(a: Any, b: Any) -> Any:
    """a · b"""
    total = np.float32(0)
    for d in range(len(a)):
        total += a[d] * b[d]
    return total


@compiled_rows
def two_dots(a: Any, b: Any, row: Any) -> Any:
    """a · row and b · row, reading the row once; b and row may have a stream's dtype."""
    first, second = np.float32(0), np.float32(0)
    for d in range(len(row)):
        x = number(row[d])
        first += a[d] * x
        second += number(b[d]) * x
    return first, second


@compiled_rows
def load_with_dots(into: Any, row: Any, a: Any, b: Any) -> Any:
    """`load`, and row · row, a · row and b · row. (D,), (D,), (D,), (D,) -> 3 numbers"""
    square, first, second = np.float32(0), np.float32(0), np.float32(0)
    for d in range(len(into)):
        x = number(row[d])
        into[d] = x
        square += x * x
        first += a[d] * x
        second += b[d] * x
    return square, first, second


@compiled_rows
def blend(into: Any, own: Any, row: Any, rest: Any, other: Any) -> Any:
    """into = own · row + rest · other; `into` and `row` may have a stream's dtype. -> its squared norm"""
    square = np.float32(0)
    for d in range(len(into)):
        x = own * number(row[d]) + rest * other[d]
        into[d] = rounded(x, into)
        square += x * x
    return square


@compiled_rows
def blend_with_dots(into: Any, own: Any, row: Any, rest: Any, other: Any, four: Any) -> Any:
    """`blend`, and the result's dot products with four rows, in one pass. -> 5 numbers"""
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


@compiled_rows
def add(total: Any, weight: Any, row: Any) -> None:
    """total += weight · row; row may have a stream's dtype"""
    for d in range(len(row)):
        total[d] += weight * number(row[d])


@compiled_rows
def add_to_two(total: Any, other: Any, weight: Any, another: Any, row: Any) -> None:
    """`add` to two totals, reading the row once."""
    for d in range(len(row)):
        x = number(row[d])
        total[d] += weight * x
        other[d] += another * x


@compiled_rows
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


@compiled_rows
def sum_of_six(total: Any, weights: Any, rows: Any) -> None:
    """total = Σ_n weights[n] · rows[n] (D,), 6 × 1, 6 × (D,)"""
    a, b, c, e, f, g = rows
    wa, wb, wc, we, wf, wg = weights
    for d in range(len(total)):
        total[d] = (wa * a[d] + wb * b[d]) + (wc * c[d] + we * e[d]) + (wf * f[d] + wg * g[d])


@compiled_rows
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


@compiled_rows
def add_rows_to_two(total: Any, other: Any, weights: Any, others: Any, rows: Any) -> None:
    """`add_rows` to two totals, each with its own weights, reading the rows once. (D,), (D,), (n,), (n,), (n,D)"""
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


@compiled_rows
def sum_chosen(total: Any, own: Any, row: Any, weights: Any, bank: Any, which: Any) -> None:
    """total = own · row + Σ_n weights[n] · bank[which[n]], n a multiple of four. (D,), 1, (D,), (n,), (·,D), (n,)"""
    scaled(total, own, row)
    for n in range(0, len(which), 4):
        a, b, c, e = bank[which[n]], bank[which[n + 1]], bank[which[n + 2]], bank[which[n + 3]]
        wa, wb, wc, we = weights[n], weights[n + 1], weights[n + 2], weights[n + 3]
        for d in range(len(total)):
            total[d] += (wa * a[d] + wb * b[d]) + (wc * c[d] + we * e[d])


@compiled_rows
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


@compiled_rows
def scaled(total: Any, weight: Any, row: Any) -> None:
    """total = weight · row; total may have a stream's dtype"""
    for d in range(len(total)):
        total[d] = rounded(weight * row[d], total)


@compiled_rows
def inverse_norm(square: Any, size: int, eps: float) -> Any:
    """1 / √(mean x² + eps) of `size` numbers whose squares sum to `square`."""
    return np.float32(1 / math.sqrt(square / size + eps))


@compiled_rows
def normalize(row: Any, weight: Any, square: Any, eps: float) -> None:
    """Apply the branch's norm in place to a row with the squared norm `square`. (D,), (D,), 1"""
    factor = inverse_norm(square, len(row), eps)
    for d in range(len(row)):
        row[d] *= factor * weight[d]


@compiled_rows
def normalize_backward(gradient: Any, row: Any, weight: Any, square: Any, eps: float, d_weight: Any) -> None:
    """Turn the gradient of `normalize`'s result into the row's, in place; add to the weight's gradient.

    3 × (D,), 1, 1, (D,)
    """
    factor = inverse_norm(square, len(row), eps)
    product = np.float32(0)
    for d in range(len(row)):
        x = gradient[d] * row[d]
        d_weight[d] += factor * x
        product += weight[d] * x
    shrink = np.float32(factor * factor * factor * product / len(row))
    for d in range(len(row)):
        gradient[d] = factor * weight[d] * gradient[d] - shrink * row[d]
