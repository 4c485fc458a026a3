"""Dual Attention Residuals in a Transformer of your own: the same model before and after, five changed lines.

    python examples/add_to_your_model.py

A branch maps (batch, tokens, width) to the same shape and starts with its own norm; your branches stay as they are.
Only the addition, `x = x + branch(x)`, moves into a residual stack.
"""

import torch
from torch import Tensor, nn

from dualres import residual_stack


class SelfAttention(nn.Module):
    """Pre-norm causal self-attention, without the residual."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) -> the same"""
        h, tokens = self.norm(x), x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens, device=x.device)
        return self.attention(h, h, h, attn_mask=mask, is_causal=True, need_weights=False)[0]


class MLP(nn.Module):
    """Pre-norm two-layer perceptron, without the residual."""

    def __init__(self, width: int):
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) -> the same"""
        return self.layers(x)


class Before(nn.Module):
    """A plain Transformer."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.attention = nn.ModuleList(SelfAttention(width, heads) for _ in range(layers))
        self.mlp = nn.ModuleList(MLP(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, tokens) -> (batch, tokens, vocabulary)"""
        x = self.embedding(tokens)
        for attention, mlp in zip(self.attention, self.mlp, strict=True):
            x = x + attention(x)
            x = x + mlp(x)
        return self.head(self.norm(x))


class After(nn.Module):
    """The same model with Dual Attention Residuals; changed lines are marked."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        branches: list[nn.Module] = []  # changed
        for _ in range(layers):  # changed
            branches += [SelfAttention(width, heads), MLP(width)]  # changed
        self.stack = residual_stack(branches, width, "dar-block")  # changed
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, tokens) -> (batch, tokens, vocabulary)"""
        x = self.embedding(tokens)
        x = self.stack(x)  # changed
        return self.head(self.norm(x))


def learn_to_copy(model: nn.Module, steps: int = 200) -> float:
    """Train to repeat the first half of a random sequence; return the loss on the second half."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss = torch.zeros(())
    for _ in range(steps):
        half = torch.randint(0, 32, (16, 12), generator=generator)
        tokens = torch.cat([half, half], 1)
        logits = model(tokens)[:, 11:-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), half.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main() -> None:
    """Build both models, count their parameters and train each for a few seconds."""
    for kind in (Before, After):
        torch.manual_seed(0)
        model = kind(vocabulary=32, width=64, heads=4, layers=4)
        count = sum(p.numel() for p in model.parameters())
        print(f"{kind.__name__.lower():6}  {count:,} parameters  loss after 200 steps {learn_to_copy(model):.3f}")


if __name__ == "__main__":
    main()
