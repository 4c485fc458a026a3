"""Loops over the elements of rows, written as their body.

    @loop
    def blend(into, own, row, rest, other):
        x = into.set(own * row + rest * other)
        return x * x

    square = blend(width, into, own, row, rest, other)  # in compiled code

Rows are pointers, to float32 or to a stream's dtype; other arguments are numbers, or tuples of either. The body runs
when the loop is compiled, on vectors of LANES elements in float32. What it returns is summed over the row.

LLVM would vectorize a plain loop itself, but for long rows: it takes 64 elements at a time and leaves the rest, a third
of a row of 96, to a scalar loop. Where rows may overlap, it also compares their addresses and chooses between loops
that sum in different orders. Here the order is fixed.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils

from dualres.ops.cpu.compiler import intrinsic

types: Any = numba.types  # for mypy: their hints do not say that a type of tuples has those of its elements
LANES = 16  # float32 numbers in the widest vectors of today's CPUs; others split them
SUMS = 4  # at least, if possible: each waits for its last addition, so loops with fewer take two vectors at a time
FUSE = ("contract",)  # a product and a sum may become one instruction
WORD, FLOAT = ir.IntType(32), ir.FloatType()
FLOATS = ir.VectorType(FLOAT, LANES)


class Vector:
    """LANES float32 numbers in the code of a loop."""

    def __init__(self, builder: Any, value: Any):
        self.builder, self._value = builder, value

    @property
    def value(self) -> Any:
        return self._value

    def __add__(self, other: "Vector") -> "Vector":
        return Vector(self.builder, self.builder.fadd(self.value, other.value, flags=FUSE))

    def __sub__(self, other: "Vector") -> "Vector":
        return Vector(self.builder, self.builder.fsub(self.value, other.value, flags=FUSE))

    def __mul__(self, other: "Vector") -> "Vector":
        return Vector(self.builder, self.builder.fmul(self.value, other.value, flags=FUSE))


class Number(Vector):
    """A number, LANES times."""

    def __init__(self, builder: Any, make: Callable[[], Any]):
        super().__init__(builder, None)
        self.make = make

    @property
    def value(self) -> Any:
        if self._value is None:
            single = self.builder.insert_element(ir.Constant(FLOATS, ir.Undefined), self.make(), _number(0))
            self._value = self.builder.shuffle_vector(single, single, _words(0))
        return self._value


class Block:
    """The elements of the rows that one run of a body takes: LANES from `first` on, except where the mask is 0."""

    def __init__(self, builder: Any, first: Any, mask: Any):
        self.builder, self.first, self.mask = builder, first, mask
        self.added: dict[int, Row] = {}


class Row(Vector):
    """LANES elements of a row, read where they are used first."""

    def __init__(self, block: "Block", row: Any, kind: Any):
        super().__init__(block.builder, None)
        self.block, self.row, self.kind = block, row, kind

    @property
    def value(self) -> Any:
        if self._value is None:
            self._value = WIDEN[self.kind](self.builder, self._read())
        return self._value

    def set(self, vector: Vector) -> Vector:
        """Store a vector, in the row's dtype. -> the vector before rounding"""
        self.write(NARROW[self.kind](self.builder, vector.value))
        return vector

    def add(self, vector: Vector) -> None:
        """Add a vector to a float32 row, which is stored after the body: it may add several."""
        self._value = (self + vector).value
        self.block.added[id(self)] = self

    def _place(self, element: Any) -> tuple[Any, int]:
        """Where the elements are, as a pointer to a vector, and the alignment of one."""
        place = self.builder.gep(self.row, [self.block.first])
        return self.builder.bitcast(place, ir.VectorType(element, LANES).as_pointer()), self.kind.bitwidth // 8

    def _read(self) -> Any:
        element = FLOAT if self.kind == types.float32 else ir.IntType(self.kind.bitwidth)
        place, align = self._place(element)
        if self.block.mask is None:
            return self.builder.load(place, align=align)
        kind = ir.VectorType(element, LANES)
        return _call(self.builder, "load", kind, [place, _number(align), self.block.mask, ir.Constant(kind, None)])

    def write(self, value: Any) -> None:
        place, align = self._place(value.type.element)
        if self.block.mask is None:
            self.builder.store(value, place, align=align)
        else:
            _call(self.builder, "store", ir.VoidType(), [value, place, _number(align), self.block.mask])


def _call(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """Call LLVM's masked load or store."""
    elements = result if name == "load" else arguments[0].type
    letter = "f32" if isinstance(elements.element, ir.FloatType) else f"i{elements.element.width}"
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.{name}.v{LANES}{letter}.p0")
    return builder.call(function, arguments)


def _number(n: int) -> Any:
    return ir.Constant(WORD, n)


def _words(n: int) -> Any:
    return ir.Constant(ir.VectorType(WORD, LANES), [n] * LANES)


def _from_bfloat16(builder: Any, bits: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(bits, ir.VectorType(WORD, LANES)), _words(16)), FLOATS)


def _to_bfloat16(builder: Any, value: Any) -> Any:
    """Round to nearest, ties to even; NaN stays NaN."""
    bits = builder.bitcast(value, ir.VectorType(WORD, LANES))
    odd = builder.and_(builder.lshr(bits, _words(16)), _words(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, _words(0x7FFF))), _words(16))
    chosen = builder.select(builder.fcmp_unordered("uno", value, value), _words(0x7FC0), rounded)
    return builder.trunc(chosen, ir.VectorType(ir.IntType(16), LANES))


def _from_float16(builder: Any, bits: Any) -> Any:
    return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), FLOATS)


def _to_float16(builder: Any, value: Any) -> Any:
    halves = builder.fptrunc(value, ir.VectorType(ir.HalfType(), LANES))
    return builder.bitcast(halves, ir.VectorType(ir.IntType(16), LANES))


WIDEN = {types.float32: lambda _, value: value, types.uint16: _from_bfloat16, types.int16: _from_float16}
NARROW = {types.float32: lambda _, value: value, types.uint16: _to_bfloat16, types.int16: _to_float16}


class _Blank:
    """In place of a vector, to count what a body returns."""

    def __add__(self, other: "_Blank") -> "_Blank":
        return self

    __sub__ = __mul__ = __add__

    def set(self, vector: "_Blank") -> "_Blank":
        return vector

    add = set


def _argument(context: Any, block: Block, kind: Any, value: Any) -> Any:
    """An argument of a loop as its body takes it."""
    builder = block.builder
    if isinstance(kind, types.BaseTuple):
        pairs = zip(kind, cgutils.unpack_tuple(builder, value), strict=True)
        return _bundle(kind, [_argument(context, block, *pair) for pair in pairs])
    if isinstance(kind, types.CPointer):
        return Row(block, value, kind.dtype)
    return Number(builder, lambda: context.cast(builder, value, kind, types.float32))


def _blank(kind: Any) -> Any:
    """An argument of a body that is only to return as many sums as it will."""
    return _bundle(kind, list(map(_blank, kind))) if isinstance(kind, types.BaseTuple) else _Blank()


def _bundle(kind: Any, parts: list[Any]) -> Any:
    """A tuple of this numba type, named if the type is."""
    return kind.instance_class(*parts) if isinstance(kind, types.BaseNamedTuple) else tuple(parts)


def _flat(returned: Any) -> list[Any]:
    """The vectors that a body returned."""
    if returned is None or isinstance(returned, tuple):
        return [term for part in returned or () for term in _flat(part)]
    return [returned]


def _kind(returned: Any) -> Any:
    """The numba type of the sums of what a body returned."""
    if returned is None or returned == ():
        return types.void
    return types.Tuple(list(map(_kind, returned))) if isinstance(returned, tuple) else types.float32


def _nested(context: Any, builder: Any, kind: Any, totals: Iterator[Any]) -> Any:
    """The sums as a value of that type."""
    if not isinstance(kind, types.BaseTuple):
        return next(totals) if kind == types.float32 else context.get_dummy_value()
    return context.make_tuple(builder, kind, [_nested(context, builder, part, totals) for part in kind])


def _total(builder: Any, vector: Any) -> Any:
    """The sum of the elements of a vector: halves are added until one is left."""
    size = LANES
    while size > 1:
        size //= 2
        kind = ir.VectorType(WORD, size)
        low, high = (ir.Constant(kind, list(range(begin, begin + size))) for begin in (0, size))
        vector = builder.fadd(builder.shuffle_vector(vector, vector, low), builder.shuffle_vector(vector, vector, high))
    return builder.extract_element(vector, _number(0))


def _code(builder: Any, body: Callable[[Block], Any], count: int, width: Any) -> list[Any]:
    """The code of a loop. -> its `count` sums"""
    word, zeros = width.type, ir.Constant(FLOATS, None)
    unroll = 1 if count >= SUMS else 2
    sums = [[cgutils.alloca_once(builder, FLOATS) for _ in range(count)] for _ in range(unroll)]
    for total in (total for each in sums for total in each):
        builder.store(zeros, total)

    def add(first: Any, mask: Any, totals: Sequence[Any]) -> None:
        """The body at one vector of the rows."""
        block = Block(builder, first, mask)
        terms = _flat(body(block))
        for row in block.added.values():
            row.write(row.value)
        for total, term in zip(totals, terms, strict=True):
            value = term.value if mask is None else builder.select(mask, term.value, zeros)
            builder.store(builder.fadd(builder.load(total), value, flags=FUSE), total)

    step = ir.Constant(word, LANES * unroll)
    whole = builder.mul(builder.sdiv(width, step), step)
    with cgutils.for_range_slice(builder, ir.Constant(word, 0), whole, step, inc=True) as (d, _):
        for n in range(unroll):
            add(builder.add(d, ir.Constant(word, n * LANES)), None, sums[n])
    lanes = ir.Constant(ir.VectorType(WORD, LANES), list(range(LANES)))
    with cgutils.for_range_slice(builder, whole, width, ir.Constant(word, LANES), inc=True) as (d, _):
        left = builder.trunc(builder.sub(width, d), WORD)
        single = builder.insert_element(ir.Constant(lanes.type, ir.Undefined), left, _number(0))
        add(d, builder.icmp_signed("<", lanes, builder.shuffle_vector(single, single, _words(0))), sums[0])
    totals = []
    for each in zip(*sums, strict=True):
        vectors = [builder.load(total) for total in each]
        totals.append(_total(builder, functools.reduce(builder.fadd, vectors)))
    return totals


def loop(body: Callable[..., Any]) -> Any:
    """A decorator for the bodies of loops: the loop takes the width, then what the body takes."""

    @intrinsic
    def function(context: Any, width: Any, *kinds: Any) -> Any:
        returned = body(*map(_blank, kinds))

        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            width, values = arguments[0], cgutils.unpack_tuple(builder, arguments[1])

            def at(block: Block) -> Any:
                return body(*(_argument(context, block, *pair) for pair in zip(kinds, values, strict=True)))

            totals = iter(_code(builder, at, len(_flat(returned)), width))
            return _nested(context, builder, signature.return_type, totals)

        return _kind(returned)(types.int64, types.StarArgTuple(kinds)), code

    return function
