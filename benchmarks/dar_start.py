"""How to initialize DAR? Trains small models from several gate scales and ρ biases, on text that comes with Python.

    python benchmarks/dar_start.py --steps 200 --seeds 2

Prints, per start: validation loss (nats per byte; mean over seeds, and the paired difference from the first row with
its standard error) and how far the two streams have separated, ‖H⁰ − H¹‖ / ‖H⁰‖ over all block states, before and
after.
"""

import argparse
import pathlib
import pydoc_data.topics
import random
import statistics
import sysconfig
import time

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from dualres.config.loading import load_config
from dualres.config.schema import ResidualConfig
from dualres.model.decoder import Decoder, build_decoder
from dualres.residual.registry import METHODS
from dualres.util.tables import table

BATCH, HELD_OUT = 8, 128  # sequences per step, and in the validation set


def main() -> None:
    """Train every start with every seed and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=2)
    methods = [name for name, row in METHODS.items() if hasattr(row.options, "rho_bias")]
    parser.add_argument("--residual", default="dar-block", choices=methods)
    parser.add_argument("--starts", default="1:0,1:2,1:4,0.01:0,0.01:4", help="gate_scale:rho_bias, …")
    arguments = parser.parse_args()
    model = load_config("nano", arguments.residual, ["model.vocab_size=256", "model.context=128"]).model
    text = stdlib_text()
    rows: list[list[object]] = []
    base: list[float] = []
    for start in arguments.starts.split(","):
        gate_scale, rho_bias = map(float, start.split(":"))
        residual = ResidualConfig(arguments.residual, gate_scale=gate_scale, rho_bias=rho_bias)
        losses, before, after = [], [], []
        for seed in range(arguments.seeds):
            decoder = build_decoder(model, residual, seed=seed)
            held_out = sequences(text[-HELD_OUT * model.context :], model.context)
            before.append(separation(decoder, held_out[:8]))
            began = time.perf_counter()
            train(decoder, text[: -HELD_OUT * model.context], arguments.steps, seed)
            losses.append(validation_loss(decoder, held_out))
            after.append(separation(decoder, held_out[:8]))
            print(f"# {start} seed {seed}: loss {losses[-1]:.4f}, {time.perf_counter() - began:.0f} s", flush=True)
        base = base or losses
        differences = [a - b for a, b in zip(losses, base, strict=True)]
        error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("nan")
        mean = statistics.mean
        rows.append(
            [
                gate_scale,
                rho_bias,
                f"{mean(losses):.4f}",
                f"{mean(differences):+.4f} ± {error:.4f}",
                f"{mean(before):.3f}",
                f"{mean(after):.3f}",
            ]
        )
    header = ["gate_scale", "rho_bias", "val loss", "difference ± s.e.", "separation before", "after"]
    print(table(header, rows))


def stdlib_text() -> Tensor:
    """Documentation topics and source of the standard library, whole files in a fixed random order, as bytes."""
    paths = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [path.read_bytes() for path in paths] + [t.encode() for t in pydoc_data.topics.topics.values()]
    random.Random(0).shuffle(texts)
    return torch.frombuffer(bytearray(b"\n".join(texts)), dtype=torch.uint8)


def sequences(text: Tensor, length: int) -> Tensor:
    """Bytes -> (B,T)"""
    return text[: len(text) // length * length].view(-1, length).long()


def train(decoder: Decoder, text: Tensor, steps: int, seed: int) -> None:
    """AdamW, weight decay on everything, linear warmup over a tenth of the steps and cosine decay to a tenth."""
    data = sequences(text, decoder.config.context)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    warmup = max(1, steps // 10)
    for step in range(steps):
        progress = torch.tensor(max(0.0, (step - warmup) / max(1, steps - warmup)))
        rate = min(1.0, (step + 1) / warmup) * (0.55 + 0.45 * float(torch.cos(torch.pi * progress)))
        optimizer.param_groups[0]["lr"] = 3e-3 * rate
        tokens = data[order[torch.arange(step * BATCH, (step + 1) * BATCH) % len(data)]]
        optimizer.zero_grad()
        next_token_loss(decoder, tokens).backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()


def next_token_loss(decoder: Decoder, tokens: Tensor) -> Tensor:
    """(B,T) -> ()"""
    return cross_entropy(decoder(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def validation_loss(decoder: Decoder, held_out: Tensor) -> float:
    """Mean loss of the held-out sequences."""
    return statistics.mean(float(next_token_loss(decoder, tokens)) for tokens in held_out.split(BATCH))


@torch.no_grad()
def separation(decoder: Decoder, tokens: Tensor) -> float:
    """‖H⁰ − H¹‖ / ‖H⁰‖ over all block states."""
    states: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda _, __, found: states.append(found[0])) for block in decoder.stack]
    decoder(tokens)
    for hook in hooks:
        hook.remove()
    together = torch.stack(states)  # (N,2,B,T,D)
    return float((together[:, 0] - together[:, 1]).norm() / together[:, 0].norm())


if __name__ == "__main__":
    main()
