"""The memory traffic of each fused operator on a GPU: loads and stores in units of D elements per token.

A meter in tests/ops counts the traffic of the Triton kernels and checks these formulas. Parameters and token-wise
numbers are not counted: a branch's weights move once for many tokens.
"""
# D width  J stored streams  O output streams  R history  U query sets  K updates

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from dualres.ops import dispatch
from dualres.ops.arguments import ReadArguments


class Accesses(NamedTuple):
    """Loads and stores of an operator, in units of D elements per token."""

    loads: int
    stores: int


def prefix(history: Sequence[Tensor], queries: Tensor, *_: Any) -> Accesses:
    """Loads every state once for all queries; stores what each retrieves."""
    return Accesses(len(history) * len(history[0]), queries.shape[0] * queries.shape[1])


def prefix_backward(d_retrieved: Sequence[Tensor], d_partition: Any, history: Sequence[Tensor], *_: Any) -> Accesses:
    """Loads history and gradients twice: for the softmax, and for its values; stores the history's gradient."""
    states, gradients = len(history) * len(history[0]), sum(map(len, d_retrieved))
    return Accesses(2 * states + 2 * gradients, states)


def read(retrieved: Tensor, partition: Tensor, updates: Sequence[Tensor], *_: Any) -> Accesses:
    """Loads the retrieved states and every update once; stores the branch input."""
    return Accesses(len(updates) + len(retrieved), 1)


def read_backward(d_h: Tensor, d_next: Tensor, *arguments: Any) -> Accesses:
    """Loads all rows for the streams' gradients, again for the parameters', and updates again for the coefficients'."""
    saved = ReadArguments(*arguments)
    updates, retrieved, passes = len(saved.updates), len(saved.retrieved), 3 if saved.gates else 2
    return Accesses(passes * updates + 2 * retrieved + 2, retrieved + updates)


def hyper_read(updates: Sequence[Tensor], *_: Any) -> Accesses:
    """Loads every update twice: for the gates, and for the sum that they weight; stores the branch input."""
    return Accesses(2 * len(updates), 1)


def hyper_read_backward(d_h: Tensor, d_next: Tensor, updates: Sequence[Tensor], *_: Any) -> Accesses:
    """Loads the updates six times and the gradient three times; stores the updates' gradients."""
    return Accesses(6 * len(updates) + 3, len(updates))


def write(updates: Sequence[Tensor], coefficients: Tensor, *_: Any) -> Accesses:
    """Loads every update once; stores the streams."""
    return Accesses(len(updates), coefficients.shape[1])


def write_backward(d_live: Tensor, updates: Sequence[Tensor], coefficients: Tensor) -> Accesses:
    """Loads the gradient once, and the updates, if any, for the coefficients' gradient; stores the updates'."""
    return Accesses(len(d_live) + len(updates), len(coefficients))


BY_OPERATOR: dict[str, Callable[..., Accesses]] = {
    f"{dispatch.NAMESPACE}::{count.__name__}": count
    for count in (prefix, prefix_backward, read, read_backward, hyper_read, hyper_read_backward, write, write_backward)
}
