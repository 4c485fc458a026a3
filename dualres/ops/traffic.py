"""How much of the streams each fused operator moves on a GPU: loads and stores in units of D elements per token.

The Triton kernels are counted by a meter in tests/ops, which holds these formulas to what it counts. Parameters and
token-wise numbers are left out: a branch's weights move once for many tokens.
"""
# D width  J stored streams  O output streams  R history  U query sets  K updates

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from dualres.ops.arguments import ReadArguments


class Moved(NamedTuple):
    """In units of D elements per token."""

    loads: int
    stores: int


def prefix(history: Sequence[Tensor], queries: Tensor, *_: Any) -> Moved:
    """Every state once, for all queries."""
    return Moved(len(history) * len(history[0]), queries.shape[0] * queries.shape[1])


def prefix_backward(d_retrieved: Sequence[Tensor], d_partition: Any, history: Sequence[Tensor], *_: Any) -> Moved:
    """History and gradients twice: for the softmax, and for what it weighs."""
    states, given = len(history) * len(history[0]), sum(map(len, d_retrieved))
    return Moved(2 * states + 2 * given, states)


def read(retrieved: Tensor, partition: Tensor, updates: Sequence[Tensor], *_: Any) -> Moved:
    """What was retrieved and every update once; the branch input."""
    return Moved(len(updates) + len(retrieved), 1)


def read_backward(d_h: Tensor, d_next: Tensor, *arguments: Any) -> Moved:
    """All rows for the streams' gradients, again for the parameters', and updates again for their coefficients'."""
    given = ReadArguments(*arguments)
    updates, retrieved, again = len(given.updates), len(given.retrieved), 3 if given.gates else 2
    return Moved(again * updates + 2 * retrieved + 2, retrieved + updates)


def hyper_read(updates: Sequence[Tensor], *_: Any) -> Moved:
    """Every update twice: for the gates, and for what they weigh."""
    return Moved(2 * len(updates), 1)


def hyper_read_backward(d_h: Tensor, d_next: Tensor, updates: Sequence[Tensor], *_: Any) -> Moved:
    """Six passes over the updates, three over the gradient."""
    return Moved(6 * len(updates) + 3, len(updates))


def write(updates: Sequence[Tensor], coefficients: Tensor, *_: Any) -> Moved:
    """Every update once; the streams."""
    return Moved(len(updates), coefficients.shape[1])


def write_backward(d_live: Tensor, updates: Sequence[Tensor], coefficients: Tensor) -> Moved:
    """The gradient once, and the updates, where they are given, for their coefficients'."""
    return Moved(len(d_live) + len(updates), len(coefficients))


BY_OPERATOR: dict[str, Callable[..., Moved]] = {
    f"dualres::{formula.__name__}": formula
    for formula in (
        prefix,
        prefix_backward,
        read,
        read_backward,
        hyper_read,
        hyper_read_backward,
        write,
        write_backward,
    )
}
