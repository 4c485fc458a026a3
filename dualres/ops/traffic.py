"""The memory traffic of each fused operator on a GPU: loads and stores in units of D elements per token.

A meter in tests/ops counts the traffic of the Triton kernels and checks these formulas. Parameters and token-wise
numbers are not counted: a branch's weights move once for many tokens.
"""
# D width  J stored streams  O output streams  R history  U query sets  K updates

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from dualres.ops import dispatch
from dualres.ops.arguments import HyperReadArguments, ReadArguments, WriteArguments

ONE_PASS = {True: 2048, False: 4096}  # widest rows whose read, with and without gates, has a backward pass of one pass


class Accesses(NamedTuple):
    """Loads and stores of an operator, in units of D elements per token."""

    loads: int
    stores: int


def prefix(history: Sequence[Tensor], queries: Tensor, *_: Any) -> Accesses:
    """Loads every state once for all queries; stores what each retrieves."""
    return Accesses(len(history) * len(history[0]), queries.shape[0] * queries.shape[1])


def prefix_backward(
    d_retrieved: Sequence[Tensor], d_partition: Any, d_carried: Sequence[Tensor], history: Sequence[Tensor], *_: Any
) -> Accesses:
    """Loads history and gradients for the softmax, if it has several terms, and again for its values, with the
    gradients of later readers; stores the history's gradient."""
    states, gradients, passes = len(history) * len(history[0]), _rows(d_retrieved), 1 if len(history) == 1 else 2
    return Accesses(passes * (states + gradients) + _rows(d_carried), states)


def read(*arguments: Any) -> Accesses:
    """Loads the retrieved states and every update once; stores the branch input."""
    given = ReadArguments(*arguments)
    return Accesses(len(given.updates) + len(given.retrieved), 1)


def read_backward(d_h: Tensor, d_next: Any, d_live: Tensor | None, d_retrieved: Any, *arguments: Any) -> Accesses:
    """Loads all rows once, and the updates that the carrier lacks, if several, again for their coefficients; stores the
    gradients of the retrieved states, of the carrier and of these updates. The weights of wide rows take a second pass.
    """
    saved = ReadArguments(*arguments)
    retrieved, fresh = len(saved.retrieved), len(saved.updates) - saved.carried
    rows, again = 1 + retrieved + len(saved.updates), fresh if saved.gates and fresh > 1 else 0
    passes = 1 if one_pass(d_h.shape[-1], bool(saved.gates)) else 2
    loads = passes * rows + again + _rows([x for x in (d_live, d_retrieved) if x is not None])
    return Accesses(loads, retrieved + fresh + _carrier(saved))


def one_pass(width: int, gated: bool) -> bool:
    """Whether the backward pass of a read has registers for the sums of the weights' gradients."""
    return width <= ONE_PASS[gated]


def hyper_read(*arguments: Any) -> Accesses:
    """Loads every update twice: for the gates, and for the sum that they weight; stores the branch input."""
    return Accesses(2 * len(HyperReadArguments(*arguments).updates), 1)


def hyper_read_backward(d_h: Tensor, d_next: Any, d_live: Tensor | None, *arguments: Any) -> Accesses:
    """Loads the updates for the gates, the products, the rows' gradients, with those that the carrier lacks again, but
    for the last, and the weights; d_h three times and d_live twice. Stores the gradients of the carrier and of updates
    that it lacks."""
    saved = HyperReadArguments(*arguments)
    fresh = len(saved.updates) - saved.carried
    loads = 4 * len(saved.updates) + max(0, fresh - 1) + 3 + 2 * (0 if d_live is None else len(d_live))
    return Accesses(loads, fresh + _carrier(saved))


def write(*arguments: Any) -> Accesses:
    """Loads every update once; stores the streams."""
    given = WriteArguments(*arguments)
    return Accesses(len(given.updates), given.coefficients.shape[1])


def write_backward(d_live: Tensor, *arguments: Any) -> Accesses:
    """Loads the gradient once, and the updates that the carrier lacks, unless the coefficients are constants; stores
    the gradients of these updates."""
    saved = WriteArguments(*arguments)
    return Accesses(len(d_live) + len(saved.updates), len(saved.coefficients) - saved.carried)


def _rows(tensors: Sequence[Tensor]) -> int:
    return sum(map(len, tensors))


def _carrier(saved: ReadArguments | HyperReadArguments) -> int:
    """The rows of a carrier's gradient."""
    return saved.coefficients.shape[1] if saved.carried and saved.coefficients is not None else 0


BY_OPERATOR: dict[str, Callable[..., Accesses]] = {
    f"{dispatch.NAMESPACE}::{count.__name__}": count
    for count in (prefix, prefix_backward, read, read_backward, hyper_read, hyper_read_backward, write, write_backward)
}
