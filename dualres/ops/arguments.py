"""The arguments of the operators: the bundles of the API, and the flat argument lists of the fused operators."""
# B batch  T tokens  D width  J stored streams  O output streams  R history  U query sets  K updates  G gate values

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Route(NamedTuple):
    """For each output stream, which stored stream provides its keys and which its values."""

    key: Sequence[int]
    value: Sequence[int]


class Prefix(NamedTuple):
    """What one query set retrieves from the history alone: the states h̃ and the log-partition ζ."""

    retrieved: Tensor  # (O,B,T,D)
    log_partition: Tensor  # (O,B,T)
    carrier: Tensor | None = None  # like `retrieved`, without storage: the last reader's, which passes its gradient on


class Live(NamedTuple):
    """The live streams as a weighted sum of updates: P^j = Σ_k C_k^j u_k.

    Between a gated read and its write the coefficients are one column ahead of the updates.

    Gradients form a chain instead of a fan. A fused read returns, beside its output, a carrier: a tensor with the shape
    of the live streams and no storage, which stands for the sum of the terms known so far. The next read sends their
    gradient back through it, in one tensor, instead of to every update and coefficient. Terms that follow, and all
    terms without a carrier, get gradients of their own.
    """

    updates: tuple[Tensor, ...]  # K × (B,T,D)
    coefficients: Tensor  # (K,J,B,T), in the accumulation dtype
    carrier: Tensor | None = None  # (J,B,T,D), takes the gradient of the first `carried` terms
    carried: int = 0


class GateLike(Protocol):
    """scale · (x̄ W) + bias: any module or tuple with these tensors."""

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
    """The input RMSNorm of the reading branch."""

    weight: Tensor  # (D,)
    eps: float


STREAMS = ("history", "retrieved", "updates")  # arguments in the dtype of the streams; all other tensors are float32
CARRIERS = ("carrier", "retrieved_carrier")  # arguments in the dtype of the streams, of which kernels read nothing


class PrefixArguments(NamedTuple):
    """Arguments of the fused prefix."""

    history: list[Tensor]  # R × (J,B,T,D)
    queries: Tensor  # (U,O,D)
    key: list[int]
    value: list[int]
    eps: float


class SavedPrefix(NamedTuple):
    """What the fused prefix saves for its backward pass."""

    history: list[Tensor]  # R × (J,B,T,D)
    queries: Tensor  # (U,O,D)
    log_partition: list[Tensor]  # U × (O,B,T)
    logits: Tensor  # (R,U,O,B,T)
    norms: Tensor  # (R,J,B,T)
    key: list[int]
    value: list[int]


class ReadArguments(NamedTuple):
    """Arguments of the fused read; without a live state there are no updates, coefficients or query."""

    retrieved: Tensor  # (O,B,T,D)
    log_partition: Tensor  # (O,B,T)
    retrieved_carrier: Tensor | None  # (O,B,T,D), takes the gradient of `retrieved` in its place
    updates: list[Tensor]  # K × (B,T,D)
    coefficients: Tensor | None  # (K,J,B,T)
    carrier: Tensor | None  # (J,B,T,D), takes the gradient of the first `carried` terms of the live streams
    query: Tensor | None  # (O,D)
    gates: list[Tensor]  # weight, scale and bias of α, β and, with a live state, ρ; empty without gates
    norm: Tensor | None  # (D,), the weight of the branch's norm
    key: list[int]
    value: list[int]
    carried: int
    eps: float
    norm_eps: float


class HyperReadArguments(NamedTuple):
    """Arguments of the fused read of mHC."""

    updates: list[Tensor]  # K × (B,T,D)
    coefficients: Tensor  # (K,J,B,T)
    carrier: Tensor | None  # (J,B,T,D), takes the gradient of the first `carried` terms of the live streams
    gates: list[Tensor]  # weight, scale and bias of H_pre, H_post and H_res
    norm: Tensor | None  # (D,), the weight of the branch's norm
    carried: int
    steps: int
    eps: float
    norm_eps: float


class WriteArguments(NamedTuple):
    """Arguments of the fused write."""

    updates: list[Tensor]  # K × (B,T,D)
    coefficients: Tensor  # (K,J,B,T)
    carrier: Tensor | None  # (J,B,T,D), takes the gradient of the first `carried` terms of the live streams
    carried: int


class BlockArguments(NamedTuple):
    """Everything that the reads of a block depend on besides its branches."""

    history: Sequence[Tensor]  # R × (J,B,T,D)
    queries: Tensor  # (U,O,D)
    gates: tuple[tuple[GateParameters, ...], ...]  # of each query set; none without gates
    norms: tuple[Tensor, ...]  # of each branch, the weight (D,) of its norm
    sets: tuple[int, ...]  # of each branch, its query set
    key: Sequence[int]
    value: Sequence[int]
    eps: float
    norm_eps: tuple[float, ...]

    def parameters(self) -> list[Tensor]:
        flat = [self.queries, *self.norms]
        for gates in self.gates:
            for gate in gates:
                flat += gate
        return flat


class Result(NamedTuple):
    """A tensor that an operator returns."""

    name: str
    shape: Sequence[int]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        """A tensor for a kernel to fill in."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def allocator(self) -> Callable[[], Tensor]:
        """`empty` for many calls: with tuples of integers and strides, PyTorch takes half the time."""
        strides = [math.prod(self.shape[n + 1 :]) for n in range(len(self.shape))]
        shape = tuple(self.shape)
        return partial(torch.empty_strided, shape, tuple(strides), dtype=self.dtype, device=self.device)

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)

    def carrier(self) -> Tensor:
        """A tensor of one element with this shape; not a view, about whose use FSDP2 would warn."""
        return torch.zeros(1, dtype=self.dtype, device=self.device).as_strided_(self.shape, (0,) * len(self.shape))


def result(name: str, shape: Sequence[int], like: Tensor) -> Result:
    """A result in the dtype and on the device of a tensor."""
    return Result(name, shape, like.dtype, like.device)
