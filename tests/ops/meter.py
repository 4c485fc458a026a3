"""What the Triton kernels move, counted in the interpreter: every active lane of every load and store.

Also finds lanes outside of every tensor, and elements that two programs of one launch write, or one writes and another
reads: there is no order between programs.
"""
# B batch  T tokens  D width  J streams  O output streams  R history  S branches  U query sets  K updates
# mypy: disable-error-code="import-untyped"

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from triton import language as tl
from triton.runtime import interpreter

from dualres.ops import autograd
from dualres.ops import triton as kernels
from dualres.ops.arguments import HyperReadArguments, PrefixArguments, ReadArguments, WriteArguments

NOBODY = -1
ROUTES = {1: ([0], [0]), 2: ([1, 0], [0, 1])}  # key and value of AttnRes (one output stream) and of DAR (two)
EPS = 1e-6


class Traffic(NamedTuple):
    """Elements of streams that were moved, in units of D per token."""

    loads: float
    stores: float

    @property
    def total(self) -> float:
        return self.loads + self.stores


class Storage:
    """One allocation: how often each element was loaded and stored, and who touched it last in the current launch."""

    def __init__(self, tensor: Tensor, shape: torch.Size):
        self.tensor = tensor  # kept alive, so that its addresses stay its own
        self.size, self.start = tensor.element_size(), tensor.untyped_storage().data_ptr()
        count = tensor.untyped_storage().nbytes() // self.size
        self.end = self.start + count * self.size
        self.is_stream = tensor.shape[-3:] == shape
        self.loads, self.stores = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self.reader, self.writer = np.full(count, NOBODY), np.full(count, NOBODY)

    def new_launch(self) -> None:
        self.reader[:], self.writer[:] = NOBODY, NOBODY

    def load(self, places: Any, program: int) -> None:
        np.add.at(self.loads, places, 1)
        self.reader[places] = program
        self.check(self.writer[places], program, "one program reads what another writes")

    def store(self, places: Any, program: int) -> None:
        np.add.at(self.stores, places, 1)
        assert len(np.unique(places)) == len(places), "one store writes an element twice"
        self.check(self.writer[places], program, "two programs write one element")
        self.check(self.reader[places], program, "one program writes what another has read")
        self.writer[places] = program

    def check(self, others: Any, program: int, complaint: str) -> None:
        assert ((others == NOBODY) | (others == program)).all(), complaint


class Meter:
    """Counts within a `with`; a stream is a tensor whose last axes are `shape` = (B,T,D)."""

    def __init__(self, shape: tuple[int, int, int]):
        self.shape = torch.Size(shape)
        self.storages: dict[int, Storage] = {}

    def traffic(self) -> Traffic:
        streams = [storage for storage in self.storages.values() if storage.is_stream]
        rows = self.shape.numel()
        return Traffic(sum(s.loads.sum() for s in streams) / rows, sum(s.stores.sum() for s in streams) / rows)

    def loads_of(self, tensor: Tensor) -> Any:
        """How often each element of the tensor's storage was loaded."""
        return self.storages[tensor.untyped_storage().data_ptr()].loads

    def __enter__(self) -> "Meter":
        builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
        self.patched = [(builder, "create_masked_load"), (builder, "create_masked_store"), (executor, "__call__")]
        self.originals = [getattr(owner, name) for owner, name in self.patched]
        load, store, launch = self.originals

        def counted_load(this: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
            self.touch(pointers.data, mask.data, Storage.load)
            return load(this, pointers, mask, *rest)

        def counted_store(this: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self.touch(pointers.data, mask.data, Storage.store)
            return store(this, pointers, value, mask, *rest)

        def counted_launch(this: Any, *arguments: Any, **constants: Any) -> Any:
            self.reachable = [self.storage(tensor) for tensor in tensors(arguments)]
            for storage in self.reachable:
                storage.new_launch()
            return launch(this, *arguments, **constants)

        for (owner, name), counted in zip(self.patched, (counted_load, counted_store, counted_launch), strict=True):
            setattr(owner, name, counted)
        return self

    def __exit__(self, *_: object) -> None:
        for (owner, name), original in zip(self.patched, self.originals, strict=True):
            setattr(owner, name, original)

    def storage(self, tensor: Tensor) -> Storage:
        start = tensor.untyped_storage().data_ptr()
        if start not in self.storages:
            self.storages[start] = Storage(tensor, self.shape)
        return self.storages[start]

    def touch(self, pointers: Any, mask: Any, count: Callable[[Storage, Any, int], None]) -> None:
        x, y, z = interpreter.interpreter_builder.grid_idx
        addresses = pointers[np.broadcast_to(mask, pointers.shape).astype(bool)].astype(np.int64)
        known = 0
        for storage in {storage.start: storage for storage in self.reachable}.values():
            inside = addresses[(addresses >= storage.start) & (addresses < storage.end)]
            known += len(inside)
            if len(inside):
                count(storage, (inside - storage.start) // storage.size, (x * 65536 + y) * 65536 + z)
        assert known == len(addresses), f"{len(addresses) - known} lanes are outside of every tensor"


def tensors(arguments: Sequence[Any]) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor) and argument.numel():
            yield argument
        elif isinstance(argument, tuple):
            yield from tensors(argument)


def round_to_nearest() -> None:
    """Casts to bfloat16 that round, as those of a GPU do: the interpreter's own cut off. Once is for ever."""
    cast = interpreter.InterpreterBuilder.cast_impl

    def rounding_cast(this: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
            return cast(this, source, target)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.uint16)
        return interpreter.TensorHandle(rounded.numpy(), tl.bfloat16)

    if cast.__name__ != rounding_cast.__name__:
        interpreter.InterpreterBuilder.cast_impl = rounding_cast


class Inputs(NamedTuple):
    """Made-up arguments of every operator, by name."""

    shape: tuple[int, int, int]
    dtype: torch.dtype = torch.float32

    def stream(self, *leading: int) -> Tensor:
        return torch.randn(*leading, *self.shape).to(self.dtype)

    def numbers(self, *leading: int) -> Tensor:
        return torch.randn(*leading, *self.shape[:2])

    def gate(self, values: int, streams: int) -> list[Tensor]:
        width = self.shape[-1]
        return [torch.randn(values, streams, width) / width**0.5, torch.rand(1), torch.randn(values)]

    def prefix(self, states: int, sets: int, outputs: int) -> PrefixArguments:
        history = [self.stream(outputs) for _ in range(states)]
        return PrefixArguments(history, torch.randn(sets, outputs, self.shape[-1]), *ROUTES[outputs], EPS)

    def read(self, updates: int, outputs: int, carried: int = 0) -> ReadArguments:
        width = self.shape[-1]
        gates = [*self.gate(2, 2), *self.gate(2, 2), *(self.gate(1, 2) if updates else [])] if outputs == 2 else []
        key, value = ROUTES[outputs]
        return ReadArguments(
            retrieved=self.stream(outputs),
            log_partition=self.numbers(outputs),
            retrieved_carrier=None,
            updates=[self.stream() for _ in range(updates)],
            coefficients=self.numbers(updates, outputs) if updates else None,
            carrier=None,
            query=torch.randn(outputs, width) if updates else None,
            gates=gates,
            norm=torch.randn(width),
            key=key,
            value=value,
            carried=carried,
            eps=EPS,
            norm_eps=EPS,
        )

    def hyper_read(self, updates: int, streams: int, carried: int = 0, steps: int = 20) -> HyperReadArguments:
        gates = [tensor for values in (streams, streams, streams**2) for tensor in self.gate(values, streams)]
        written = [self.stream() for _ in range(updates)]
        weight = torch.randn(self.shape[-1])
        return HyperReadArguments(
            written, self.numbers(updates, streams), None, gates, weight, carried, steps, EPS, EPS
        )

    def write(self, updates: int, streams: int, carried: int = 0) -> WriteArguments:
        return WriteArguments([self.stream() for _ in range(updates)], self.numbers(updates, streams), None, carried)


def prepared(
    op: str, inputs: Inputs, learned: bool = True, later: Sequence[str] = (), **sizes: int
) -> functools.partial[Any]:
    """A call of `prefix`, `read`, `hyper_read`, `write` or of their `_backward`; it fills in its last argument.

    `later` names the carriers that later reads send gradients back through.
    """
    forward = op.removesuffix("_backward")
    operator, arguments = getattr(autograd, forward), getattr(inputs, forward)(**sizes)
    results = [result.empty() for result in operator.results(arguments)]
    if op == forward:
        return functools.partial(getattr(kernels, op), arguments, results)
    getattr(kernels, forward)(arguments, results)
    if forward == "write":
        arguments.coefficients.requires_grad_(learned)
    saved = operator.saved(arguments, results)
    given = [torch.randn_like(result) for result in results]
    sent = [
        torch.randn(carrier.shape, device=carrier.device).to(carrier.dtype) if carrier.name in later else None
        for carrier in operator.carriers(arguments)
    ]
    incoming = operator.incoming(saved, [*given, *sent])
    return functools.partial(getattr(kernels, op), *incoming, saved, operator.checked_gradients(saved, incoming))


@functools.cache
def traffic(op: str, shape: tuple[int, int, int] = (1, 5, 24), **sizes: Any) -> Traffic:
    """Stream elements per token that an operator loads and stores, in units of D: the same for every shape.

    traffic("prefix", states=9, sets=2, outputs=2), traffic("read_backward", updates=3, outputs=2, later=("live",)),
    traffic("hyper_read", updates=4, streams=4), traffic("write", updates=4, streams=2), …
    """
    call = prepared(op, Inputs(shape), **sizes)
    with Meter(shape) as meter:
        call()
    return meter.traffic()
