"""A gate: token-wise logits from all streams of a state. DAR's α, β, ρ: `dar.py`; mHC's: `hyper_connections.py`."""
# B batch  T tokens  D width  J streams  G gate values

from typing import Any

import torch
from torch import Tensor, nn

from dualres import ops
from dualres.ops import GateLike, GateParameters

WEIGHT_STD = 0.02


class Gate(nn.Module):
    """scale · (x̄ W) + bias with x̄ = Norm([x⁰; x¹; …]); the caller applies σ, 2σ or Sinkhorn.

    The weights are random even if the scale starts at 0: with equal streams and equal weights, all streams would
    always receive the same gradient.
    """

    matrices = ()  # none: a gate is not subject to weight decay

    def __init__(self, streams: int, dim: int, values: int, *, scale: float, bias: float | Tensor, eps: float):
        super().__init__()
        self.initial_scale, self.initial_bias, self.eps = scale, bias, eps
        self.weight = nn.Parameter(torch.empty(values, streams, dim))
        self.scale = nn.Parameter(torch.empty(1))
        self.bias = nn.Parameter(torch.empty(values))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Weights N(0, 0.02); scale and bias at their configured initial values."""
        self.weight.normal_(0, WEIGHT_STD, generator=generator)
        self.scale.fill_(self.initial_scale)
        self.bias.copy_(torch.as_tensor(self.initial_bias, device=self.bias.device))

    def forward(self, streams: Tensor) -> Tensor:
        """(J,B,T,D) -> (G,B,T)"""
        return ops.gate_logits(streams, self, self.eps)


def gate_parameters(gate: GateLike) -> GateParameters:
    """The tensors of a gate, without the cost of `nn.Module.__getattr__` where they are plain parameters."""
    own: Any = getattr(gate, "_parameters", {})
    if "weight" in own and "scale" in own and "bias" in own:
        return GateParameters(own["weight"], own["scale"], own["bias"])
    return GateParameters(gate.weight, gate.scale, gate.bias)
