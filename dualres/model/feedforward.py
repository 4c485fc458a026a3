"""The SwiGLU feed-forward of a dense layer."""
# B batch  T tokens  D width

from torch import Tensor, nn
from torch.nn.functional import silu

from dualres.model.attention import Context


class FeedForward(nn.Module):
    """W_down (silu(W_gate x) ⊙ W_up x); no biases."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """(B,T,D) -> (B,T,D)"""
        return self.down(silu(self.gate(x)) * self.up(x))
