"""A GPT of your own on any residual method: its attention, LayerNorm, dropout, a padding mask, weight decay.

    python examples/gpt.py                                      # 200 steps of dar-block
    python examples/gpt.py --residual attnres-full --steps 100
    python examples/gpt.py --recompute full --compile           # slower here: for large models

It learns to write lines of the Python language reference, character by character. Lines differ in length, so batches
are padded; the mask goes to attention and not to the MLP, which does not take it.
"""

import argparse
import pydoc_data.topics

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import dualres

CONTEXT, WIDTH, HEADS, LAYERS = 64, 64, 4, 4
PADDING = 0  # a token; the others are characters of ASCII


class SelfAttention(nn.Module):
    """Pre-norm self-attention with dropout, without the residual."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.heads, self.dropout = heads, dropout

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """(B,T,D), mask (B,1,T,T), True where a token may attend -> (B,T,D)"""
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = scaled_dot_product_attention(q, k, v, mask, self.dropout if self.training else 0.0)
        return self.output(mixed.transpose(1, 2).flatten(2))


def mlp(width: int, dropout: float) -> nn.Module:
    """Pre-norm MLP with dropout, without the residual."""
    layers = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
    return nn.Sequential(nn.LayerNorm(width), *layers)


class GPT(nn.Module):
    """A decoder-only Transformer with learned positions."""

    def __init__(self, residual: str, dropout: float = 0.1):
        super().__init__()
        self.embedding = nn.Embedding(128, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        branches: list[nn.Module] = []
        for _ in range(LAYERS):
            branches += [SelfAttention(WIDTH, HEADS, dropout), mlp(WIDTH, dropout)]
        self.stack = dualres.residual_stack(branches, WIDTH, residual)
        self.norm = nn.LayerNorm(WIDTH)  # the stack returns a mean over depth: it needs a final norm
        self.head = nn.Linear(WIDTH, 128, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.head.weight = self.embedding.weight  # tied

    def forward(self, tokens: Tensor) -> Tensor:
        """(B,T) -> logits (B,T,128)"""
        length = tokens.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        itself = torch.eye(length, dtype=torch.bool, device=tokens.device)  # so that no row of the softmax is empty
        mask = causal & (tokens != PADDING)[:, None, None, :] | itself
        x = self.embedding(tokens) + self.positions[:length]
        return self.head(self.norm(self.stack(x, mask=mask)))


def batches(steps: int, size: int = 16) -> list[Tensor]:
    """Lines of the reference, padded on the right. -> (B,T)"""
    lines = [line for text in pydoc_data.topics.topics.values() for line in text.splitlines() if len(line) > 20]
    rows = torch.full((len(lines), CONTEXT + 1), PADDING)
    for row, line in zip(rows, lines, strict=True):
        codes = [*line.encode("ascii", "replace")[: CONTEXT - 1], ord("\n")]
        row[: len(codes)] = torch.tensor(codes)
    order = torch.randint(len(rows), (steps, size), generator=torch.Generator().manual_seed(0))
    return [rows[picked] for picked in order]


def train(model: GPT, steps: int) -> None:
    """Minimize the loss of the next character; padding does not count."""
    optimizer = torch.optim.AdamW(dualres.optimizer_groups(model, 0.1), lr=3e-3)  # queries and gates do not decay
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps + 1)
    for step, rows in enumerate(batches(steps), start=1):
        loss = cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten(), ignore_index=PADDING)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step in (1, steps) or step % 50 == 0:
            print(f"step {step:4}  loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def write(model: GPT, prompt: str) -> str:
    """Continue a prompt to the end of its line, always with the most probable character."""
    tokens = torch.tensor([[*prompt.encode("ascii")]])
    while tokens.shape[1] < CONTEXT and tokens[0, -1] != ord("\n"):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    return bytes(tokens[0].tolist()).decode("ascii").rstrip()


def main() -> None:
    """Train, then write a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--residual", default="dar-block", help="a residual method (default dar-block)")
    parser.add_argument("--steps", type=int, default=200, help="training steps (default 200)")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none", help="saves memory")
    parser.add_argument("--compile", action="store_true", help="compile block by block")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = GPT(arguments.residual)
    dualres.recompute_blocks(model.stack, arguments.recompute)  # dropout repeats its masks
    if arguments.compile:
        dualres.compile_blocks(model.stack)
    train(model, arguments.steps)
    print(write(model.eval(), "The "))


if __name__ == "__main__":
    main()
