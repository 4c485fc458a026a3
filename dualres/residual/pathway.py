"""The interface of a residual pathway: how one block of branches reads and writes the residual streams.

A network is a recurrence over block states: H_0 is the embedding in J streams, H_b = Block_b(H_0 … H_{b-1}),
and a readout turns H_0 … H_N into the output.
"""
# B batch  T tokens  D width  J streams  S branches

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from dualres.config.validation import convert_fields
from dualres.ops import Norm
from dualres.residual.live import as_tensor, of_streams

History = tuple[Tensor, ...]  # H_0 … H_{b-1}; each (J,B,T,D), contiguous, never changed in place


class Place(NamedTuple):
    """A block's position in its network: all that a pathway needs to create its parameters."""

    history: int  # the number of states H_0 … H_{b-1} before it; a pathway without history sees only the last
    set_of_branch: tuple[int, ...]  # the parameter set of each of its S branches, numbered from 0 in order of first use

    @property
    def branches(self) -> int:
        """S, the number of branches of the block."""
        return len(self.set_of_branch)

    def sets_with_live_state(self) -> set[int]:
        """The parameter sets of branches that read a live state: all branches but the block's first."""
        return set(self.set_of_branch[1:])

    def sets_with_query(self) -> set[int]:
        """The parameter sets of branches that read two or more states; with only one, a query has no effect."""
        return set(self.set_of_branch) if self.history > 1 else self.sets_with_live_state()


@dataclass(frozen=True)
class Options:
    """The options of a method: the keyword arguments of its pathway.

    A subclass has a field for each option, with a type, a default and a one-line docstring under it.
    """

    def __post_init__(self) -> None:
        convert_fields(self, "residual.")


class Pathway(nn.Module):
    """How ONE block of branches reads and writes the residual streams.

        history ──open──▶ state ──read──▶ h ─▶ branch ─▶ u ──write──▶ state … ──close──▶ H_b

    The state is a `NamedTuple` that lives from `open` to `close`; its field `live` has the live streams, as a tensor
    (J,B,T,D) or as a sum (`Live`). Nothing is stored on `self` and nothing is changed in place, so a block can be
    recomputed, compiled, sharded and placed on a pipeline stage.
    """

    matrices: tuple[str, ...] = ()  # its parameters that are subject to weight decay; submodules have their own
    keeps_history = False  # True: the next block sees H_0 … H_b; False: only H_b

    def open(self, history: History) -> Any:
        """Start the block: compute once what all its branches need from the history. R × (J,B,T,D) -> state"""
        raise NotImplementedError

    def read(self, state: Any, i: int, norm: Norm | None = None) -> tuple[Tensor, Any]:
        """The input (B,T,D) of branch i, normalized if `norm` is not None; the state stores the gates of the write.

        A pathway that does not fuse the norm into its read applies it with `ops.rms_norm`.
        """
        raise NotImplementedError

    def write(self, state: Any, i: int, update: Tensor) -> Any:
        """Add the output (B,T,D) of branch i to the live streams."""
        raise NotImplementedError

    def close(self, state: Any) -> Tensor:
        """End the block: its state H_b (J,B,T,D), the live streams."""
        return as_tensor(state.live)

    def carriers(self, state: Any) -> tuple[Tensor, ...]:
        """Carriers of the history states, if the pathway sums their gradients from block to block (`ops.passed_on`)."""
        return ()

    def without_carriers(self, state: Any) -> Any:
        """A state from `open` without these carriers."""
        return state

    def replay(self, history: History, norms: Sequence[Norm]) -> Any:
        """A pass through the block with recorded calls, for few tokens without gradients; None: the regular path.

        `norms` are those of all branches. The result takes the place of the pathway.
        """
        return None

    def start_divisor(self, i: int) -> float:
        """At the zero start (queries and gate scales 0) branch i reads the standard residual's state divided by this.

        The branch's norm removes the factor, exactly if its eps is divided by the factor squared.
        """
        raise NotImplementedError

    def streams(self, state: Any) -> Tensor | None:
        """Inspection method: the live streams (J,B,T,D); None before the first write of a block that starts empty.

        `state` must come from `open` or `write`: after `read`, it already holds the gates of a pending write.
        """
        return None if state.live is None else as_tensor(state.live)

    def with_streams(self, state: Any, live: Tensor) -> Any:
        """Inspection method: a state from `open` or `write` with its live streams (J,B,T,D) replaced."""
        return state._replace(live=live if isinstance(state.live, Tensor) else of_streams(live))

    def write_weights(self, state: Any) -> Tensor | None:
        """Inspection method: the weight of the branch's output in each stream (J,B,T); None without write gates.

        `state` must come from `read`.
        """
        return None

    def depth_weights(self, history: History, state: Any, i: int) -> Tensor | None:
        """Inspection method: the weights π (R,O,B,T) with which branch i reads over depth; None without retrieval.

        `state` must come from `open` or `write`, and `history` from the same block.
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
        """At the zero start each of the J streams is the standard residual's state."""
        return 1 / streams

    def stream_count(self, stored: int) -> int:
        """Inspection method: how many of the `stored` tensors of a state are streams."""
        return stored

    def depth_weights(self, history: History) -> Tensor | None:
        """Inspection method: None, since the output reads only the last state."""
        return None
