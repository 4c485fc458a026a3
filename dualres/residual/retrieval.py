"""Depth retrieval, shared by AttnRes and DAR, in two phases: the history once per block, then the live state.

Phase 1 is `open`; phase 2 is `read` of a subclass by `ops.read` or `ops.gated_read` (`ops/reference.py:merge`).
"""
# B batch  T tokens  D width  J stored streams  O output streams  R history  U query sets

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from dualres import ops
from dualres.ops import BlockArguments, GateParameters, Live, Norm, Prefix, Route
from dualres.ops.reference import to_accumulation_dtype
from dualres.residual.live import MAX_WRITES
from dualres.residual.pathway import History, Options, Pathway, Place


@dataclass(frozen=True)
class RetrievalOptions(Options):
    """Options of all methods with depth retrieval."""

    share_parameters: bool = True
    """attention branches of a block share their queries and gates, as do its MLP branches; false: no sharing"""


class RetrievalState(NamedTuple):
    """The retrieval from the history for each query set, and the block's live state."""

    prefixes: tuple[Prefix, ...]  # one per query set
    live: Live | None  # J streams; None before the first write
    queries: tuple[Tensor | None, ...]  # of each query set (O,D); None if it has no query
    carriers: tuple[Tensor, ...] = ()  # of the history, for `ops.passed_on`
    gates: tuple[tuple[GateParameters, ...], ...] = ()  # of each query set; none without gates

    def with_live(self, live: Live) -> "RetrievalState":
        return RetrievalState(self.prefixes, live, self.queries, self.carriers, self.gates)

    def after_read(self, u: int, prefix: Prefix, live: Live | None) -> "RetrievalState":
        """The state after a read by query set u."""
        prefixes = (*self.prefixes[:u], prefix, *self.prefixes[u + 1 :])
        return RetrievalState(prefixes, live, self.queries, self.carriers, self.gates)


class Queries(nn.Module):
    """The learned queries of a block, one per parameter set and output stream; initialized to zero: uniform weights.

    A set whose only candidate is H_0 has no query to learn: its softmax has one term. This can only be the first set
    of a network; zeros take its place.
    """

    matrices = ()  # none: a query is not subject to weight decay

    def __init__(self, dim: int, sets: int, learned: int, route: Route):
        super().__init__()
        self.missing = sets - learned
        self.weight = nn.Parameter(torch.zeros(learned, len(route.key), dim))

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Zero, so that all candidates have equal weight."""
        nn.init.zeros_(self.weight)

    def forward(self) -> Tensor:
        """All queries of the block. -> (U,O,D)"""
        if self.missing:
            return nn.functional.pad(self.weight, (0, 0, 0, 0, self.missing, 0))
        return self.weight.view_as(self.weight)  # where gradients of a block's two phases meet, compiled or not


REPLAYED = {"open", "read", "write", "close", "stored", "gate_tensors"}  # the methods that a replay stands for


@functools.cache
def _is_replayable(kind: type) -> bool:
    """Whether a class reads and writes like one of ours that says `replayable`."""
    ours = next((base for base in kind.__mro__ if "replayable" in vars(base)), None)
    return ours is not None and all(getattr(kind, name, None) is getattr(ours, name, None) for name in REPLAYED)


class RetrievalPathway(Pathway):
    """A pathway whose branches read h^j = Σ_r π_r^j v_r^j over the history and, after the first, the live state."""

    keeps_history = True

    def __init__(self, dim: int, place: Place, *, eps: float, route: Route):
        super().__init__()
        self.route = Route(tuple(route.key), tuple(route.value))
        self.set_of_branch, self.eps, self.history = place.set_of_branch, eps, place.history
        learned = len(place.sets_with_query())
        self.queries = Queries(dim, len(set(place.set_of_branch)), learned, route) if learned else None

    def open(self, history: History) -> RetrievalState:
        """Phase 1: read every history state once, for all queries of the block."""
        if self.queries is None:  # a block of one branch that sees only H_0
            only = torch.stack([history[0][v] for v in self.route.value])
            zeros = to_accumulation_dtype(only.new_zeros(only.shape[:-1]))
            return RetrievalState((Prefix(only, zeros),), live=None, queries=(None,))
        queries = self.queries()
        prefixes, carriers = ops.prefix_with_carriers(history, queries, route=self.route, eps=self.eps)
        return RetrievalState(prefixes, None, queries.unbind(0), carriers, self.gate_tensors())

    def gate_tensors(self) -> tuple[tuple[GateParameters, ...], ...]:
        """The gates of each query set, if the pathway has any, fetched once per block."""
        return ()

    def carriers(self, state: RetrievalState) -> tuple[Tensor, ...]:
        """Of the history: the next block sends its gradient through this block's prefix."""
        return state.carriers

    def without_carriers(self, state: RetrievalState) -> RetrievalState:
        return state._replace(carriers=())

    def replay(self, history: History, norms: Sequence[Norm]) -> Any:
        """If nobody has changed how the pathway reads and writes, by a subclass, a patch or a hook."""
        queries, kind = self.queries, cast(Any, type(self))
        if len(self.set_of_branch) > MAX_WRITES or not _is_replayable(kind) or not REPLAYED.isdisjoint(vars(self)):
            return None
        if type(queries) is not Queries or queries.missing or queries._forward_hooks or queries._forward_pre_hooks:
            return None
        weights, eps = zip(*norms, strict=True)
        sizes = (self.set_of_branch, self.route.key, self.route.value, self.eps, eps)
        return ops.replay(BlockArguments(history, queries.weight, self.gate_tensors(), weights, *sizes))

    def close(self, state: RetrievalState) -> Tensor:
        """H_b (J,B,T,D), the sum of the live streams' updates."""
        assert state.live is not None, "a block must write before it closes"
        return ops.write(state.live)

    def query(self, i: int) -> Tensor | None:
        """The query of branch i, one per output stream. -> (O,D)"""
        return None if self.queries is None else self.queries()[self.set_of_branch[i]]

    def start_divisor(self, i: int) -> float:
        """The number of candidates: their sum is the standard residual's state, and equal weights give their mean."""
        return self.history + (i > 0)

    def depth_weights(self, history: History, state: RetrievalState, i: int) -> Tensor:
        """π of branch i over the history and, after the first write, the live streams. -> (R,O,B,T)"""
        live, query = self.streams(state), self.query(i)
        candidates = [*history, *([] if live is None else [live])]
        if query is None:  # H_0 is the only candidate
            query = candidates[0].new_zeros(len(self.route.key), candidates[0].shape[-1])
        return ops.depth_weights(candidates, query[None], route=self.route, eps=self.eps)[:, 0]


class RetrievalReadout(nn.Module):
    """The readout of a pathway with history: output queries over H_0 … H_N, the output streams summed."""

    def __init__(self, dim: int, *, eps: float, route: Route):
        super().__init__()
        self.route, self.eps = route, eps
        self.queries = Queries(dim, 1, 1, route)

    def forward(self, *history: Tensor) -> Tensor:
        """R × (J,B,T,D) -> (B,T,D)"""
        (prefix,) = ops.prefix(history, self.queries(), route=self.route, eps=self.eps)
        return prefix.retrieved.sum(0)

    def start_divisor(self, streams: int, states: int) -> float:
        """The number of candidates over that of output streams: each is the candidates' mean, and they are summed."""
        return states / len(self.route.value)

    def stream_count(self, stored: int) -> int:
        """The output streams: value projection stores its one stream twice, as key and as value."""
        return len(self.route.value)

    def depth_weights(self, history: History) -> Tensor:
        """π of the output over H_0 … H_N. -> (R,O,B,T)"""
        return ops.depth_weights(history, self.queries(), route=self.route, eps=self.eps)[:, 0]
