"""One forward and backward pass of every residual method on the same text: loss, parameters, time, memory.

    python examples/every_method.py
    python examples/every_method.py --scale nano-moe --batch 4

Time is the median over rounds in which the methods take turns. Memory is what the forward pass saves for the backward
pass, without parameters. Both use the fused CPU kernels; set DUALRES_OPS=reference for the plain equations.
"""

import argparse
import io
import pydoc_data.topics
import statistics
import sys
import time

import torch
from torch import Tensor, nn

from dualres.config.loading import load_config, names
from dualres.config.schema import ConfigError
from dualres.model.decoder import Decoder, build_decoder
from dualres.util.tables import table


def main() -> None:
    """Time every method in turn and print the table."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # terminals without × show a question mark
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", default="nano", help="default nano")
    parser.add_argument("--batch", type=int, default=4, help="sequences, default 4")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds, default 5")
    arguments = parser.parse_args()
    if arguments.batch < 1 or arguments.rounds < 1:
        parser.error("--batch and --rounds must be 1 or more")
    residuals = sorted(names("residual"), key=lambda name: name != "standard")
    try:
        configs = {name: load_config(arguments.scale, name) for name in residuals}
    except ConfigError as error:
        parser.error(str(error))
    decoders = {name: build_decoder(c.model, c.residual) for name, c in configs.items()}
    model = configs["standard"].model
    tokens = text_tokens(arguments.batch, model.context, model.vocab_size)

    losses, kept, seconds = {}, {}, {name: list[float]() for name in residuals}
    for turn in range(arguments.rounds + 1):
        progress(f"round {turn} of {arguments.rounds}")
        for name, decoder in decoders.items():
            losses[name], kept[name], elapsed = step(decoder, tokens)
            if turn:  # the first round warms up
                seconds[name].append(elapsed)
    progress("")

    base = statistics.median(seconds["standard"])
    rows = [
        [
            name,
            f"{losses[name]:.4f}",
            sum(p.numel() for p in decoders[name].parameters()),
            f"{statistics.median(seconds[name]) * 1e3:.0f}",
            f"{statistics.median(seconds[name]) / base:.2f}",
            f"{kept[name] / 2**20:.1f}",
            f"{kept[name] / kept['standard']:.2f}",
        ]
        for name in residuals
    ]
    header = ["residual", "loss", "parameters", "ms", "× standard", "MiB saved", "× standard"]
    threads = torch.get_num_threads()
    print(f"{arguments.scale}, {arguments.batch} × {model.context} tokens, float32, CPU, {threads} threads")
    print(table(header, rows))
    print(f"\nln(vocabulary) = {torch.log(torch.tensor(float(model.vocab_size))):.4f}: untrained models start near it.")


def text_tokens(batch: int, length: int, vocabulary: int) -> Tensor:
    """Words of the Python documentation, hashed to token IDs. -> (B,T+1)"""
    words = "\n".join(pydoc_data.topics.topics.values()).split()
    ids = [sum(b * 31**i for i, b in enumerate(word.encode())) % vocabulary for word in words]
    positions = torch.arange(batch * (length + 1)) % len(ids)  # wraps around
    return torch.tensor(ids)[positions].view(batch, length + 1)


def step(decoder: Decoder, tokens: Tensor) -> tuple[float, int, float]:
    """One forward and backward pass: loss, bytes saved for the backward pass, seconds."""
    parameters = {p.untyped_storage().data_ptr() for p in decoder.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    decoder.zero_grad()
    began = time.perf_counter()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = decoder(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return loss.item(), sum(kept.values()), time.perf_counter() - began


def progress(text: str) -> None:
    """Overwrite one line on a terminal."""
    if sys.stderr.isatty():
        print(f"\r{text:20}\r" if not text else f"\r{text:20}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
