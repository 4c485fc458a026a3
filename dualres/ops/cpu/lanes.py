"""Vectors of LANES float32 numbers as values of compiled code: so many elements of a row, or so many tokens.

A kernel that takes a tile of tokens at a time reuses what it has loaded for several of them, and computes what there is
one number of per token for all of them together. Every sum has a fixed order, which does not depend on addresses, and a
token's results do not depend on its place in the tile.

Addresses are integers. Buffers hold float32 numbers in whole vectors; a stream has its own dtype, and its rows may end
within a vector.
"""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import models, overload, register_model

from dualres.ops.cpu.compiler import compiled, intrinsic

LANES = 16  # float32 numbers in the widest vectors of today's CPUs; others split them
WORD = ir.IntType(32)
WORDS, FLOATS, HALVES = (ir.VectorType(kind, LANES) for kind in (WORD, ir.FloatType(), ir.HalfType()))
SHORTS = ir.VectorType(ir.IntType(16), LANES)


def whole_vectors(count: int) -> int:
    """How many numbers whole vectors hold that have room for `count`."""
    return -(-count // LANES) * LANES


class Lanes(types.Type):
    """The type of a vector."""

    def __init__(self) -> None:
        super().__init__("Lanes")


VECTOR, INTEGER = Lanes(), types.int64


@register_model(Lanes)
class _Model(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, FLOATS)


def instruction(result: Any, *takes: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator for functions of compiled code that are written with an LLVM builder."""

    def of(code: Callable[..., Any]) -> Any:
        def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            returned = code(builder, *arguments)
            if isinstance(returned, list):
                return context.make_tuple(builder, result, returned)
            return context.get_dummy_value() if returned is None else returned

        functions: dict[int, Any] = {
            1: lambda context, a: (result(*takes), lower),
            2: lambda context, a, b: (result(*takes), lower),
            3: lambda context, a, b, c: (result(*takes), lower),
            4: lambda context, a, b, c, d: (result(*takes), lower),
            5: lambda context, a, b, c, d, e: (result(*takes), lower),
        }
        return intrinsic(functions[len(takes)])

    return of


def _words(number: int) -> Any:
    return ir.Constant(WORDS, [number] * LANES)


def _spread(builder: Any, number: Any, into: Any = FLOATS) -> Any:
    one = builder.insert_element(ir.Constant(into, ir.Undefined), number, ir.Constant(WORD, 0))
    return builder.shuffle_vector(one, one, _words(0))


def _call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}"), arguments)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return _call(builder, f"fmuladd.v{LANES}f32", FLOATS, a, b, c)


def _place(builder: Any, buffer: Any, index: Any) -> Any:
    return builder.gep(builder.inttoptr(buffer, ir.FloatType().as_pointer()), [index])


def _load(builder: Any, place: Any) -> Any:
    return builder.load(builder.bitcast(place, FLOATS.as_pointer()), align=4)


def _store(builder: Any, place: Any, x: Any) -> None:
    builder.store(x, builder.bitcast(place, FLOATS.as_pointer()), align=4)


def _first(builder: Any, left: Any) -> Any:
    """Whether a lane is one of the first `left`."""
    few = builder.icmp_signed("<", left, left.type(LANES))
    limit = builder.select(few, builder.trunc(left, WORD), ir.Constant(WORD, LANES))
    return builder.icmp_signed("<", ir.Constant(WORDS, list(range(LANES))), _spread(builder, limit, WORDS))


@instruction(VECTOR, types.float32)
def _spread_number(builder: Any, number: Any) -> Any:
    return _spread(builder, number)


def spread(number: Any) -> Any:
    """A number in every lane; a vector is returned as it is."""
    raise NotImplementedError("compiled code only")


@overload(spread, strict=False)
def _overload_spread(number: Any) -> Any:
    if number == VECTOR:
        return lambda number: number
    return lambda number: _spread_number(np.float32(number))


def _overload_operator(symbol: Any, name: str) -> None:
    apply = instruction(VECTOR, VECTOR, VECTOR)(lambda builder, a, b: getattr(builder, name)(a, b))

    def choose(a: Any, b: Any) -> Any:
        return (lambda a, b: apply(spread(a), spread(b))) if VECTOR in (a, b) else None

    overload(symbol, strict=False)(choose)


_overload_operator(operator.add, "fadd")
_overload_operator(operator.sub, "fsub")
_overload_operator(operator.mul, "fmul")
_overload_operator(operator.truediv, "fdiv")


@instruction(VECTOR, VECTOR, VECTOR, VECTOR)
def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a · b + c, rounded once if the CPU can."""
    return _fma(builder, a, b, c)


@instruction(VECTOR, VECTOR)
def root(builder: Any, x: Any) -> Any:
    """√x"""
    return _call(builder, f"sqrt.v{LANES}f32", FLOATS, x)


@instruction(VECTOR, VECTOR, VECTOR, VECTOR, VECTOR)
def where_greater(builder: Any, a: Any, b: Any, x: Any, y: Any) -> Any:
    """x where a > b, otherwise y."""
    return builder.select(builder.fcmp_ordered(">", a, b), x, y)


@instruction(types.float32, VECTOR, INTEGER)
def total(builder: Any, x: Any, left: Any) -> Any:
    """The sum of the first `left` lanes."""
    x = builder.select(_first(builder, left), x, ir.Constant(FLOATS, None))
    step = LANES // 2
    while step:
        turned = ir.Constant(WORDS, [(n + step) % LANES for n in range(LANES)])
        x = builder.fadd(x, builder.shuffle_vector(x, x, turned))
        step //= 2
    return builder.extract_element(x, ir.Constant(WORD, 0))


@instruction(VECTOR, INTEGER, INTEGER)
def get(builder: Any, buffer: Any, index: Any) -> Any:
    """The vector at an index of a buffer."""
    return _load(builder, _place(builder, buffer, index))


@instruction(types.void, INTEGER, INTEGER, VECTOR)
def put(builder: Any, buffer: Any, index: Any, x: Any) -> None:
    """Store a vector at an index of a buffer."""
    _store(builder, _place(builder, buffer, index), x)


@instruction(VECTOR, INTEGER, INTEGER)
def number_at(builder: Any, buffer: Any, index: Any) -> Any:
    """The number at an index of a buffer, in every lane."""
    return _spread(builder, builder.load(_place(builder, buffer, index)))


@instruction(VECTOR, INTEGER, INTEGER)
def sums(builder: Any, buffer: Any, index: Any) -> Any:
    """The totals of LANES vectors that begin at an index of a buffer."""
    place = _place(builder, buffer, index)
    parts = [_load(builder, builder.gep(place, [ir.Constant(WORD, n * LANES)])) for n in range(LANES)]
    size = 1
    while len(parts) > 1:  # the halves of each group of 2 · size lanes are added, for two vectors at once
        low = [n + side + m for n in range(0, LANES, 2 * size) for side in (0, LANES) for m in range(size)]
        orders = ir.Constant(WORDS, low), ir.Constant(WORDS, [n + size for n in low])
        pairs = zip(parts[0::2], parts[1::2], strict=True)
        parts = [builder.fadd(*(builder.shuffle_vector(a, b, order) for order in orders)) for a, b in pairs]
        size *= 2
    return parts[0]


# Four rows by four: sixteen sums, for which eight vectors or numbers are loaded.
FOUR, BLOCK = types.UniTuple(VECTOR, 4), types.UniTuple(VECTOR, 16)


@instruction(FOUR, INTEGER, INTEGER, INTEGER)
def get_four(builder: Any, buffer: Any, index: Any, step: Any) -> Any:
    """Four vectors of a buffer, from an index on in steps."""
    return [_load(builder, _place(builder, buffer, place)) for place in _places(builder, index, step, 4)]


@instruction(FOUR, INTEGER, INTEGER, INTEGER)
def four_numbers_at(builder: Any, buffer: Any, index: Any, step: Any) -> Any:
    """Four numbers of a buffer, from an index on in steps, each in every lane."""
    places = _places(builder, index, step, 4)
    return [_spread(builder, builder.load(_place(builder, buffer, place))) for place in places]


@instruction(BLOCK, INTEGER)
def zero_block(builder: Any, _: Any) -> Any:
    """Sixteen zeros."""
    return [ir.Constant(FLOATS, None)] * 16


@instruction(BLOCK, BLOCK, FOUR, FOUR)
def add_products(builder: Any, block: Any, a: Any, b: Any) -> Any:
    """block[m, n] + a[m] · b[n]"""
    rows, columns, sums = (cgutils.unpack_tuple(builder, each) for each in (a, b, block))
    return [_fma(builder, rows[n // 4], columns[n % 4], sums[n]) for n in range(16)]


@instruction(BLOCK, INTEGER, INTEGER, INTEGER, INTEGER)
def get_block(builder: Any, buffer: Any, index: Any, row_step: Any, step: Any) -> Any:
    """Four by four vectors of a buffer, from an index on."""
    places = [place for row in _places(builder, index, row_step, 4) for place in _places(builder, row, step, 4)]
    return [_load(builder, _place(builder, buffer, place)) for place in places]


@instruction(types.void, INTEGER, INTEGER, INTEGER, INTEGER, BLOCK)
def put_block(builder: Any, buffer: Any, index: Any, row_step: Any, step: Any, block: Any) -> None:
    """Store what `get_block` takes."""
    places = [place for row in _places(builder, index, row_step, 4) for place in _places(builder, row, step, 4)]
    for place, x in zip(places, cgutils.unpack_tuple(builder, block), strict=True):
        _store(builder, _place(builder, buffer, place), x)


def _places(builder: Any, index: Any, step: Any, count: int) -> list[Any]:
    return [builder.add(index, builder.mul(step, step.type(n))) for n in range(count)]


def _memory(kind: Any) -> tuple[Any, int, str]:
    """The vector of a stream's elements in memory, the bytes of one, and the vector's name in LLVM."""
    if kind.dtype == types.float32:
        return FLOATS, 4, f"v{LANES}f32"
    return SHORTS, 2, f"v{LANES}i16"


def _from_bfloat16(builder: Any, bits: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(bits, WORDS), _words(16)), FLOATS)


def _to_bfloat16(builder: Any, x: Any) -> Any:
    """Round to nearest, ties to even; NaN stays NaN."""
    bits = builder.bitcast(x, WORDS)
    odd = builder.and_(builder.lshr(bits, _words(16)), _words(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, _words(0x7FFF))), _words(16))
    return builder.trunc(builder.select(builder.fcmp_unordered("uno", x, x), _words(0x7FC0), rounded), SHORTS)


def _from_float16(builder: Any, bits: Any) -> Any:
    return builder.fpext(builder.bitcast(bits, HALVES), FLOATS)


def _to_float16(builder: Any, x: Any) -> Any:
    return builder.bitcast(builder.fptrunc(x, HALVES), SHORTS)


WIDEN = {types.float32: lambda _, x: x, types.uint16: _from_bfloat16, types.int16: _from_float16}
NARROW = {types.float32: lambda _, x: x, types.uint16: _to_bfloat16, types.int16: _to_float16}


@intrinsic
def read(context: Any, address: Any, kind: Any, left: Any) -> Any:
    """The vector at an address of a stream, whose row has `left` elements left: where it has ended, zero."""
    elements, size, name = _memory(kind)

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, _, left = arguments
        place = builder.inttoptr(address, elements.as_pointer())
        whole = builder.icmp_signed(">=", left, left.type(LANES))
        with builder.if_else(whole, likely=True) as (then, otherwise):
            with then:
                every, then_block = builder.load(place, align=size), builder.block
            with otherwise:
                given = place, ir.Constant(WORD, size), _first(builder, left), ir.Constant(elements, None)
                some, otherwise_block = _call(builder, f"masked.load.{name}.p0", elements, *given), builder.block
        x = builder.phi(elements)
        x.add_incoming(every, then_block)
        x.add_incoming(some, otherwise_block)
        return WIDEN[kind.dtype](builder, x)

    return VECTOR(INTEGER, kind, INTEGER), code


@intrinsic
def write(context: Any, address: Any, kind: Any, left: Any, x: Any) -> Any:
    """Round the first `left` lanes into a stream."""
    elements, size, name = _memory(kind)

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, _, left, x = arguments
        place, x = builder.inttoptr(address, elements.as_pointer()), NARROW[kind.dtype](builder, x)
        whole = builder.icmp_signed(">=", left, left.type(LANES))
        with builder.if_else(whole, likely=True) as (then, otherwise):
            with then:
                builder.store(x, place, align=size)
            with otherwise:
                given = x, place, ir.Constant(WORD, size), _first(builder, left)
                _call(builder, f"masked.store.{name}.p0", ir.VoidType(), *given)
        return context.get_dummy_value()

    return types.void(INTEGER, kind, INTEGER, VECTOR), code


@instruction(VECTOR, VECTOR)
def _power_of_two(builder: Any, shifted: Any) -> Any:
    """2ⁿ from n + 1.5 · 2²³, whose lowest bits are those of the integer n."""
    bits = builder.add(builder.bitcast(shifted, WORDS), _words(127))
    return builder.bitcast(builder.shl(bits, _words(23)), FLOATS)


@instruction(types.UniTuple(VECTOR, 2), VECTOR)
def _exponent_and_fraction(builder: Any, x: Any) -> Any:
    """n and f with x = 2ⁿ f, f from √½ to √2."""
    bits = builder.bitcast(x, WORDS)
    exponent = builder.ashr(builder.sub(bits, _words(0x3F3504F3)), _words(23))
    fraction = builder.bitcast(builder.sub(bits, builder.shl(exponent, _words(23))), FLOATS)
    return [builder.sitofp(exponent, FLOATS), fraction]


@compiled
def exp(x: Any) -> Any:
    """eˣ as in Cephes; where it would under- or overflow, about the least or the largest normal number."""
    low, high, magic = spread(-87.3), spread(88.0), spread(12582912.0)
    x = where_greater(low, x, low, where_greater(x, high, high, x))  # NaN stays NaN
    shifted = fma(x, spread(1.44269504088896341), magic)
    n = shifted - magic
    x = fma(n, spread(2.12194440e-4), fma(n, spread(-0.693359375), x))
    y = spread(1.9875691500e-4)
    y = fma(y, x, spread(1.3981999507e-3))
    y = fma(y, x, spread(8.3334519073e-3))
    y = fma(y, x, spread(4.1665795894e-2))
    y = fma(y, x, spread(1.6666665459e-1))
    y = fma(y, x, spread(5.0000001201e-1))
    return (fma(y * x, x, x) + 1) * _power_of_two(shifted)


@compiled
def log(x: Any) -> Any:
    """The natural logarithm of normal numbers, as in Cephes; of what is not finite, NaN."""
    n, f = _exponent_and_fraction(x)
    f = f - 1
    y = spread(7.0376836292e-2)
    y = fma(y, f, spread(-1.1514610310e-1))
    y = fma(y, f, spread(1.1676998740e-1))
    y = fma(y, f, spread(-1.2420140846e-1))
    y = fma(y, f, spread(1.4249322787e-1))
    y = fma(y, f, spread(-1.6668057665e-1))
    y = fma(y, f, spread(2.0000714765e-1))
    y = fma(y, f, spread(-2.4999993993e-1))
    y = fma(y, f, spread(3.3333331174e-1))
    square = f * f
    y = fma(n, spread(-2.12194440e-4), y * f * square) - square * 0.5
    return fma(n, spread(0.693359375), f + y) + (x - x)


@compiled
def sigmoid(x: Any) -> Any:
    """1 / (1 + e^−x), at least 6e-39"""
    return spread(1.0) / (exp(spread(0.0) - x) + 1)


@compiled
def inverse_rms(square: Any, size: int, eps: float) -> Any:
    """1 / √(mean x² + eps) of `size` numbers whose squares sum to `square`."""
    return spread(1.0) / root(square / size + eps)
