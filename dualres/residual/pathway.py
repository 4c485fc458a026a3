"""The interface of a residual pathway: how one block of branches reads and writes the residual streams.

A network is a recurrence over block states: H_0 is the embedding in J streams, H_b = Block_b(H_0 … H_{b-1}),
and a readout turns H_0 … H_N into the output.
"""
# B batch  T tokens  D width  J streams  S branches

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from dualres.config.validation import convert_fields
from dualres.ops import Norm

History = tuple[Tensor, ...]  # H_0 … H_{b-1}; each (J,B,T,D), contiguous, never changed in place


class Place(NamedTuple):
    """Where a block stands in its network: all that a pathway must know to create its parameters."""

    history: int  # how many states H_0 … H_{b-1} come before it; a pathway without history sees the last alone
    set_of_branch: tuple[int, ...]  # the parameter set of each of its S branches, numbered from 0 in order of first use

    @property
    def branches(self) -> int:
        """S, the number of branches of the block."""
        return len(self.set_of_branch)

    def sets_with_live_state(self) -> set[int]:
        """The parameter sets of branches that read a live state: all branches but the block's first."""
        return set(self.set_of_branch[1:])

    def sets_with_query(self) -> set[int]:
        """The parameter sets of branches that read two or more states, so that a query makes a difference."""
        return set(self.set_of_branch) if self.history > 1 else self.sets_with_live_state()


@dataclass(frozen=True)
class Options:
    """The options of a method, keyword arguments of its pathway.

    A subclass has a field for each option, with a type, a default and its documentation, a line of text under it.
    """

    def __post_init__(self) -> None:
        convert_fields(self, "residual.")


class Pathway(nn.Module):
    """How ONE block of branches reads and writes the residual streams.

        history ──open──▶ state ──read──▶ h ─▶ branch ─▶ u ──write──▶ state … ──close──▶ H_b

    The state is a `NamedTuple`, born in `open` and dead after `close`. Nothing is kept on `self`
    and nothing is changed in place, so a block can be recomputed, compiled, sharded and cut off for a pipeline.
    """

    keeps_history = False  # True: the next block sees H_0 … H_b; False: only H_b

    def open(self, history: History) -> Any:
        """Start the block: what all its branches need of the history, once. R × (J,B,T,D) -> state"""
        raise NotImplementedError

    def read(self, state: Any, i: int, norm: Norm | None = None) -> tuple[Tensor, Any]:
        """The input (B,T,D) of branch i, after the branch's norm if it is given; gates of the write ride in the state.

        `ops.rms_norm` applies the norm for a pathway that does not do both in one pass.
        """
        raise NotImplementedError

    def write(self, state: Any, i: int, update: Tensor) -> Any:
        """Put the output (B,T,D) of branch i into the live streams."""
        raise NotImplementedError

    def close(self, state: Any) -> Tensor:
        """End the block: its state H_b (J,B,T,D)."""
        live: Tensor = state.live
        return live

    def start_divisor(self, i: int) -> float:
        """At the zero start (queries and gate scales 0) branch i reads the standard residual's state over this number.

        The branch's norm removes the factor, exactly so with eps over its square.
        """
        raise NotImplementedError

    def streams(self, state: Any) -> Tensor | None:
        """Lens for analysis: the live streams (J,B,T,D), None before the first write of a block that starts empty.

        For a state that `open` or `write` returned: in one that `read` returned, the gates of a write wait for it.
        """
        live: Tensor | None = state.live
        return live

    def with_streams(self, state: Any, live: Tensor) -> Any:
        """Lens for analysis: the same state, which `open` or `write` returned, with other live streams (J,B,T,D)."""
        return state._replace(live=live)

    def write_weights(self, state: Any) -> Tensor | None:
        """Lens for analysis: how much of the branch's output goes into each stream (J,B,T); None without write gates.

        For a state that `read` returned.
        """
        return None

    def depth_weights(self, history: History, state: Any, i: int) -> Tensor | None:
        """Lens for analysis: the weights π (R,O,B,T) with which branch i reads over depth; None without retrieval.

        For a state that `open` or `write` returned, and the history of its block.
        """
        return None


class LastState(nn.Module):
    """The readout of a pathway without history: the streams of H_N, summed."""

    def __init__(self, dim: int, *, eps: float):
        super().__init__()

    def forward(self, *history: Tensor) -> Tensor:
        """… (J,B,T,D) -> (B,T,D)"""
        return history[-1].sum(0)

    def start_divisor(self, streams: int, states: int) -> float:
        """At the zero start every one of the J streams is the standard residual's state."""
        return 1 / streams

    def stream_count(self, stored: int) -> int:
        """Lens for analysis: how many of the `stored` tensors of a state are streams."""
        return stored

    def depth_weights(self, history: History) -> Tensor | None:
        """Lens for analysis: the output reads the last state alone."""
        return None
