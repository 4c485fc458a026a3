"""A gate: token-wise logits from all streams of a state, as in mHC and DAR."""
# B batch  T tokens  D width  J streams  G gate values

import torch
from torch import Tensor, nn

from dualres import ops

WEIGHT_STD = 0.02


class Gate(nn.Module):
    """scale · (x̄ W) + bias with x̄ = Norm([x⁰; x¹; …]); the caller applies σ, 2σ or Sinkhorn.

    The weights start random even where the scale starts at 0: with equal streams and equal weights both streams
    would receive the same gradient for ever.
    """

    def __init__(self, streams: int, dim: int, values: int, *, scale: float, bias: float | Tensor, eps: float):
        super().__init__()
        self.start_scale, self.start_bias, self.eps = scale, bias, eps
        self.weight = nn.Parameter(torch.empty(values, streams, dim))
        self.scale = nn.Parameter(torch.empty(1))
        self.bias = nn.Parameter(torch.empty(values))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Weights N(0, 0.02); scale and bias at their configured start."""
        self.weight.normal_(0, WEIGHT_STD, generator=generator)
        self.scale.fill_(self.start_scale)
        self.bias.copy_(torch.as_tensor(self.start_bias, device=self.bias.device))

    def forward(self, streams: Tensor) -> Tensor:
        """(J,B,T,D) -> (G,B,T)"""
        return ops.gate_logits(streams, self, self.eps)
