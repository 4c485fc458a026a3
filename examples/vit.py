"""A vision Transformer of your own on any residual method: image patches as tokens, no causal mask.

    python examples/vit.py                                      # 100 steps of dar-block
    python examples/vit.py --residual mhc --steps 200

It learns to tell the direction of noisy stripes, one of eight, on images that it draws itself; guessing is right in
12.5% of the cases. Tokens keep their place in the image, (B,H,W,D): a residual stack takes any axes before the width.
"""

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import dualres

SIZE, PATCH, CLASSES = 16, 4, 8
WIDTH, HEADS, LAYERS = 64, 4, 4


class SelfAttention(nn.Module):
    """Pre-norm self-attention over all patches of an image, without the residual."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """(B,H,W,D) -> (B,H,W,D)"""
        h = self.norm(x).flatten(1, 2)
        return self.attention(h, h, h, need_weights=False)[0].view_as(x)


def mlp(width: int) -> nn.Module:
    """Pre-norm MLP, without the residual."""
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class VisionTransformer(nn.Module):
    """Patches, a residual stack, the mean over patches, and a linear classifier."""

    def __init__(self, residual: str):
        super().__init__()
        side = SIZE // PATCH
        self.patches = nn.Conv2d(1, WIDTH, PATCH, PATCH)
        self.positions = nn.Parameter(0.02 * torch.randn(side, side, WIDTH))
        branches: list[nn.Module] = []
        for _ in range(LAYERS):
            branches += [SelfAttention(WIDTH, HEADS), mlp(WIDTH)]
        self.stack = dualres.residual_stack(branches, WIDTH, residual)
        self.norm = nn.LayerNorm(WIDTH)  # the stack returns a mean over depth: it needs a final norm
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """(B,1,16,16) -> logits (B,8)"""
        x = self.patches(images).permute(0, 2, 3, 1) + self.positions  # (B,H,W,D)
        return self.head(self.norm(self.stack(x)).mean((1, 2)))


def stripes(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noisy stripes of random direction, width and phase, and the number of the direction. -> (B,1,16,16), (B,)"""

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, 1, 1, generator=generator)

    labels = torch.randint(CLASSES, (count,), generator=generator)
    angle = labels.view(-1, 1, 1) * math.pi / CLASSES
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    along = rows * angle.sin() + columns * angle.cos()
    waves = torch.sin(along * uniform(0.8, 1.6) + uniform(0, 2 * math.pi))
    return (waves + 0.5 * torch.randn(waves.shape, generator=generator))[:, None], labels


def train(model: VisionTransformer, steps: int, generator: torch.Generator) -> None:
    """Minimize the cross-entropy on new images at every step."""
    # Decays the patch filters and the matrices of attention and MLP; not norms, positions, queries and gates.
    optimizer = torch.optim.AdamW(dualres.optimizer_groups(model, 0.05), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps + 1)
    for step in range(1, steps + 1):
        images, labels = stripes(64, generator)
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step in (1, steps) or step % 50 == 0:
            print(f"step {step:4}  loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def accuracy(model: VisionTransformer, generator: torch.Generator) -> float:
    """The share of new images whose direction the model names."""
    images, labels = stripes(1000, generator)
    return (model(images).argmax(-1) == labels).double().mean().item()


def main() -> None:
    """Train, then measure the accuracy on images that the model has not seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--residual", default="dar-block", help="a residual method (default dar-block)")
    parser.add_argument("--steps", type=int, default=100, help="training steps (default 100)")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = VisionTransformer(arguments.residual)
    train(model, arguments.steps, generator)
    print(f"accuracy {accuracy(model.eval(), generator):.1%} on new images, 12.5% is guessing")


if __name__ == "__main__":
    main()
