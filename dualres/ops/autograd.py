"""The fused operators as PyTorch operators: schema, shapes, gradient. `dispatch` picks the kernels that run them.

For the backward pass an operator saves its arguments (states, updates, parameters) and token-wise numbers, but no other
tensor of a stream's size; the backward kernels recompute the rest. Parameters arrive in float32, streams in their
storage dtype. Kernels fill in results and gradients that are allocated here, where their shapes are known.
"""
# B batch  T tokens  D width  J stored streams  O output streams  R history  U query sets  K updates

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dualres.ops import checks, dispatch
from dualres.ops.arguments import (
    STREAMS,
    HyperReadArguments,
    PrefixArguments,
    ReadArguments,
    Result,
    SavedPrefix,
    WriteArguments,
)

TYPES = {  # argument types and their names in a schema
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    list[Tensor]: "Tensor[]",
    list[int]: "int[]",
    int: "int",
    float: "float",
}


class Operator(ABC):
    """A fused operator and its backward operator, registered with PyTorch.

    The backward operator takes the gradients of the results, then the saved values. It returns the gradients of the
    argument tensors in order, skipping constants. A kernel takes the arguments and the empty results; a backward kernel
    takes what its operator takes, and the empty gradients, bundled like the arguments, with None for constants.
    """

    name: str
    takes: Any  # the class of its arguments
    saves: Any  # the class of its saved values
    returns: str
    gradients: str  # of the results, as the backward operator takes them

    def __init__(self) -> None:
        self.numbers = [name for name, kind in self.takes.__annotations__.items() if "Tensor" not in TYPES[kind]]
        name, schema = f"{dispatch.NAMESPACE}::{self.name}", f"({_schema(self.takes)}) -> {self.returns}"
        backward_schema = f"({self.gradients}, {_schema(self.saves)}) -> Tensor[]"
        self.recorded: Any = torch.library.custom_op(name, self.run, mutates_args=(), schema=schema)
        self.backward: Any = torch.library.custom_op(
            f"{name}_backward", self.run_backward, mutates_args=(), schema=backward_schema
        )
        self.recorded.register_fake(lambda *values: self._returned(self.empty_results(self.takes(*values))))
        self.backward.register_fake(lambda *values: _flat(self.empty_gradients(*self._split(values))))
        self.recorded.register_autograd(self._gradient, setup_context=self._save)

    def __call__(self, arguments: Any) -> Any:
        """Take any layout and parameter dtype. Without a gradient or a graph to record, run the kernel directly."""
        recorded = torch.is_grad_enabled() or torch.compiler.is_compiling() or type(_first(arguments)) is not Tensor
        return (self.recorded if recorded else self.run)(*_map_tensors(_for_kernel, arguments))

    @abstractmethod
    def results(self, arguments: Any) -> list[Result]:
        """Check the arguments; return what the operator returns for them."""

    def saved(self, arguments: Any, output: Any) -> Any:
        """What the backward operator needs besides gradients: by default, the arguments."""
        return arguments

    def incoming(self, saved: Any, gradients: Any) -> Sequence[Any]:
        """The gradients as the backward operator takes them, from those of all results."""
        return [gradient.contiguous() for gradient in gradients]

    def arguments(self, saved: Any, gradients: Sequence[Any]) -> Any:
        """The operator's arguments that may have a gradient, or tensors like them."""
        return saved

    def constants(self, saved: Any) -> Sequence[str]:
        """The tensors among the arguments that have no gradient."""
        return ()

    def check_backward(self, saved: Any, gradients: Sequence[Any]) -> None:
        """Check what the backward operator takes: valid arguments, and gradients like the results."""
        checks.like_results("d_", gradients, self.results(self.arguments(saved, gradients)))

    def run(self, *values: Any) -> Any:
        """Check the arguments and call the kernel, which records no gradient."""
        arguments = self.takes(*values)
        results = self.empty_results(arguments)
        getattr(dispatch.kernels(_first(arguments)), self.name)(arguments, results)
        return self._returned(results)

    def run_backward(self, *values: Any) -> list[Tensor]:
        """Check the arguments and call the backward kernel."""
        saved, incoming = self._split(values)
        gradients = self.empty_gradients(saved, incoming)
        getattr(dispatch.kernels(_first(incoming)), f"{self.name}_backward")(*incoming, saved, gradients)
        return _flat(gradients)

    def empty_results(self, arguments: Any) -> list[Tensor]:
        """Check the arguments; return tensors for a kernel to fill in."""
        return [result.like.new_empty(result.shape) for result in self.results(arguments)]

    def empty_gradients(self, saved: Any, incoming: Sequence[Any]) -> Any:
        """Check what the backward operator takes; return tensors for a backward kernel to fill in."""
        self.check_backward(saved, incoming)
        return _map_tensors(
            lambda _, like: None if like is None else like.new_empty(like.shape), self._likes(saved, incoming)
        )

    def _split(self, values: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
        """The saved values, and the gradients, which the backward operator takes first."""
        count = len(values) - len(self.saves._fields)
        return self.saves(*values[count:]), values[:count]

    def _returned(self, results: list[Tensor]) -> Any:
        """The results as the schema has them."""
        return results if self.returns == "Tensor[]" else results[0] if self.returns == "Tensor" else tuple(results)

    def _likes(self, saved: Any, incoming: Sequence[Any]) -> Any:
        """For each argument a tensor like its gradient, a list of them, or None without a gradient."""
        arguments, without = self.arguments(saved, incoming), (*self.numbers, *self.constants(saved))
        return self.takes(*(None if name in without else getattr(arguments, name) for name in self.takes._fields))

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors: list[Tensor | None] = []
        ctx.others = _map_tensors(lambda _, tensor: tensors.append(tensor), self.saved(self.takes(*inputs), output))
        ctx.save_for_backward(*tensors)

    def _gradient(self, ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        tensors = iter(ctx.saved_tensors)
        saved = _map_tensors(lambda *_: next(tensors), ctx.others)
        incoming = self.incoming(saved, gradients)
        outgoing = iter(self.backward(*incoming, *saved))
        likes = self._likes(saved, incoming)
        return tuple(_map_tensors(lambda _, like: None if like is None else next(outgoing), likes))


def _schema(arguments: Any) -> str:
    return ", ".join(f"{TYPES[kind]} {name}" for name, kind in arguments.__annotations__.items())


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _first(values: Sequence[Any]) -> Tensor:
    return _listed(values[0])[0]


def _flat(gradients: Any) -> list[Tensor]:
    """The tensors of a bundle, in order."""
    return [tensor for value in gradients for tensor in _listed(value) if tensor is not None]


def _map_tensors(function: Callable[[str, Any], Any], arguments: Any) -> Any:
    """`arguments` with function(name, tensor) in place of each tensor, and of each None for an absent tensor."""
    pairs = zip(arguments._fields, arguments, strict=True)
    return type(arguments)(*(_mapped(function, name, value) for name, value in pairs))


def _mapped(function: Callable[[str, Any], Any], name: str, value: Any) -> Any:
    # A function of its own, not a closure: one that calls itself is a cycle, and keeps its tensors until the next GC.
    if isinstance(value, list):
        return [_mapped(function, name, one) for one in value]
    return function(name, value) if value is None or isinstance(value, Tensor) else value


def _for_kernel(name: str, tensor: Tensor | None) -> Tensor | None:
    """Make streams contiguous, and everything else float32 and contiguous."""
    if tensor is None or name in STREAMS or tensor.dtype is torch.float32:
        return tensor if tensor is None or tensor.is_contiguous() else tensor.contiguous()
    return tensor.to(torch.float32).contiguous()


class PrefixOperator(Operator):
    """`reference.prefix`, and what its backward pass needs.

    -> retrieved U × (O,B,T,D), log-partition U × (O,B,T), logits (R,U,O,B,T), inverse norms (R,J,B,T)
    """

    name, takes, saves = "prefix", PrefixArguments, SavedPrefix
    returns, gradients = "Tensor[]", "Tensor[] d_retrieved, Tensor[] d_log_partition"

    def results(self, arguments: PrefixArguments | SavedPrefix) -> list[Result]:
        history, queries = arguments.history, arguments.queries
        checks.prefix(history, queries, arguments.key, arguments.value)
        checks.kernel_inputs(arguments)
        state, (sets, outputs, width) = history[0], queries.shape
        streams, *tokens, _ = state.shape
        return [
            *[Result("retrieved", (outputs, *tokens, width), state)] * sets,
            *[Result("log_partition", (outputs, *tokens), queries)] * sets,
            Result("logits", (len(history), sets, outputs, *tokens), queries),
            Result("norms", (len(history), streams, *tokens), queries),
        ]

    def saved(self, arguments: PrefixArguments, output: list[Tensor]) -> SavedPrefix:
        history, queries, key, value, _ = arguments
        *_, logits, norms = output
        return SavedPrefix(history, queries, output[len(queries) : -2], logits, norms, key, value)

    def incoming(self, saved: SavedPrefix, gradients: Any) -> Sequence[Any]:
        gradients, sets = super().incoming(saved, gradients[0]), len(saved.queries)
        return gradients[:sets], gradients[sets : 2 * sets]

    def check_backward(self, saved: SavedPrefix, gradients: Sequence[Any]) -> None:
        results, sets = self.results(saved), len(saved.queries)
        checks.like_results("d_", [*gradients[0], *gradients[1]], results[: 2 * sets])
        checks.like_results("", [*saved.log_partition, saved.logits, saved.norms], results[sets:])


class ReadOperator(Operator):
    """`reference.gated_read`, or `reference.read` without gates, which returns no coefficients.

    -> (B,T,D), (K+1,2,B,T) or (0,)
    """

    name, takes, saves = "read", ReadArguments, ReadArguments
    returns, gradients = "(Tensor, Tensor)", "Tensor d_h, Tensor d_next_coefficients"

    def results(self, arguments: ReadArguments) -> list[Result]:
        checks.read(arguments)
        checks.kernel_inputs(arguments)
        shape = (len(arguments.updates) + 1, *arguments.log_partition.shape) if arguments.gates else (0,)
        return [
            Result("h", arguments.retrieved.shape[1:], arguments.retrieved),
            Result("next_coefficients", shape, arguments.log_partition),
        ]

    def constants(self, saved: ReadArguments) -> Sequence[str]:
        return (*(() if saved.updates else ("log_partition",)), *(() if saved.gates else ("coefficients",)))


class HyperReadOperator(Operator):
    """`reference.hyper_read`. -> (B,T,D), (K+1,J,B,T)"""

    name, takes, saves = "hyper_read", HyperReadArguments, HyperReadArguments
    returns, gradients = "(Tensor, Tensor)", "Tensor d_h, Tensor d_next_coefficients"

    def results(self, arguments: HyperReadArguments) -> list[Result]:
        checks.hyper_read(arguments)
        checks.kernel_inputs(arguments)
        update, coefficients = arguments.updates[0], arguments.coefficients
        shape = (len(arguments.updates) + 1, *coefficients.shape[1:])
        return [Result("h", update.shape, update), Result("next_coefficients", shape, coefficients)]


class WriteOperator(Operator):
    """`reference.write`. -> (J,B,T,D)"""

    name, takes, saves = "write", WriteArguments, WriteArguments
    returns, gradients = "Tensor", "Tensor d_live"

    def results(self, arguments: WriteArguments) -> list[Result]:
        checks.write(arguments)
        checks.kernel_inputs(arguments)
        update = arguments.updates[0]
        return [Result("live", (arguments.coefficients.shape[1], *update.shape), update)]

    def saved(self, arguments: WriteArguments, output: Tensor) -> WriteArguments:
        """The updates are saved only for the gradient of the coefficients."""
        return arguments if arguments.coefficients.requires_grad else arguments._replace(updates=[])

    def arguments(self, saved: WriteArguments, gradients: Sequence[Any]) -> WriteArguments:
        if saved.updates:
            return saved
        checks.streams("d_live", gradients, 2)
        return saved._replace(updates=[gradients[0][0]] * saved.coefficients.shape[0])

    def constants(self, saved: WriteArguments) -> Sequence[str]:
        return () if saved.updates else ("coefficients",)


prefix, read, hyper_read, write = PrefixOperator(), ReadOperator(), HyperReadOperator(), WriteOperator()
