"""What the fused operators of a read are given: schema for PyTorch, names for the kernels."""
# B batch  T tokens  D width  J stored streams  O output streams  K updates

from typing import NamedTuple

from torch import Tensor

READ = (
    "Tensor retrieved, Tensor partition, Tensor[] updates, Tensor? coefficients, Tensor? queries, Tensor[] gates, "
    "Tensor? norm, int[] key, int[] value, float eps, float norm_eps"
)


class ReadInputs(NamedTuple):
    """Of `autograd.read`; without a live state there are no updates, coefficients and queries."""

    retrieved: Tensor  # (O,B,T,D)
    partition: Tensor  # (O,B,T)
    updates: list[Tensor]  # K × (B,T,D)
    coefficients: Tensor | None  # (K,J,B,T)
    queries: Tensor | None  # (O,D)
    gates: list[Tensor]  # weight, scale, bias of α, of β and, with a live state, of ρ; or none
    norm: Tensor | None  # (D,), the weight of the branch's norm
    key: list[int]
    value: list[int]
    eps: float
    norm_eps: float


HYPER_READ = "Tensor[] updates, Tensor coefficients, Tensor[] gates, Tensor? norm, int steps, float eps, float norm_eps"


class HyperInputs(NamedTuple):
    """Of `autograd.hyper_read`."""

    updates: list[Tensor]  # K × (B,T,D)
    coefficients: Tensor  # (K,J,B,T)
    gates: list[Tensor]  # weight, scale, bias of H_pre, of H_post, of H_res
    norm: Tensor | None  # (D,), the weight of the branch's norm
    steps: int
    eps: float
    norm_eps: float
