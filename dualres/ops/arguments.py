"""What the operators take: the bundles of the API, and the flat argument lists of the fused operators."""
# B batch  T tokens  D width  J stored streams  O output streams  R history  U query sets  K updates  G gate values

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


class Route(NamedTuple):
    """For each output stream, the stored stream whose states are keys and the one whose states are values."""

    key: Sequence[int]
    value: Sequence[int]


class Prefix(NamedTuple):
    """What the history alone gives one query set: the retrieved states h̃ and the log-partition ζ."""

    retrieved: Tensor  # (O,B,T,D)
    log_partition: Tensor  # (O,B,T)


class Live(NamedTuple):
    """The live streams as a weighted sum of what was written: P^j = Σ_k C_k^j u_k.

    Between a gated read and its write the coefficients are one column ahead of the updates.
    """

    updates: tuple[Tensor, ...]  # K × (B,T,D)
    coefficients: Tensor  # (K,J,B,T) float32


class GateLike(Protocol):
    """scale · (x̄ W) + bias: a module or tuple with these tensors."""

    @property
    def weight(self) -> Tensor: ...  # (G,J,D)
    @property
    def scale(self) -> Tensor: ...  # (1,)
    @property
    def bias(self) -> Tensor: ...  # (G,)


class GateParameters(NamedTuple):
    """The tensors of one gate."""

    weight: Tensor
    scale: Tensor
    bias: Tensor


class Norm(NamedTuple):
    """The RMSNorm of the branch that reads."""

    weight: Tensor  # (D,)
    eps: float


STREAMS = ("history", "retrieved", "updates")  # arguments in the dtype of the streams; all other tensors are float32


class PrefixArguments(NamedTuple):
    """Of the fused prefix."""

    history: list[Tensor]  # R × (J,B,T,D)
    queries: Tensor  # (U,O,D)
    key: list[int]
    value: list[int]
    eps: float


class SavedPrefix(NamedTuple):
    """What the backward pass of the fused prefix needs."""

    history: list[Tensor]  # R × (J,B,T,D)
    queries: Tensor  # (U,O,D)
    log_partition: list[Tensor]  # U × (O,B,T)
    logits: Tensor  # (R,U,O,B,T)
    norms: Tensor  # (R,J,B,T)
    key: list[int]
    value: list[int]


class ReadArguments(NamedTuple):
    """Of the fused read; without a live state there are no updates, coefficients and query."""

    retrieved: Tensor  # (O,B,T,D)
    log_partition: Tensor  # (O,B,T)
    updates: list[Tensor]  # K × (B,T,D)
    coefficients: Tensor | None  # (K,J,B,T)
    query: Tensor | None  # (O,D)
    gates: list[Tensor]  # weight, scale, bias of α, of β and, with a live state, of ρ; or none
    norm: Tensor | None  # (D,), the weight of the branch's norm
    key: list[int]
    value: list[int]
    eps: float
    norm_eps: float


class HyperReadArguments(NamedTuple):
    """Of the fused read of mHC."""

    updates: list[Tensor]  # K × (B,T,D)
    coefficients: Tensor  # (K,J,B,T)
    gates: list[Tensor]  # weight, scale, bias of H_pre, of H_post, of H_res
    norm: Tensor | None  # (D,), the weight of the branch's norm
    steps: int
    eps: float
    norm_eps: float


class WriteArguments(NamedTuple):
    """Of the fused write."""

    updates: list[Tensor]  # K × (B,T,D)
    coefficients: Tensor  # (K,J,B,T)


class Result(NamedTuple):
    """What an operator returns: a new tensor of that shape, with the dtype and device of `like`."""

    name: str
    shape: Sequence[int]
    like: Tensor
