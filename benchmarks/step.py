"""What a residual pathway costs: time and memory of a training step relative to `standard`, and generation at batch 1.

    python benchmarks/step.py                                # 0.1b, 1 × 1024 tokens, float32, two threads
    python benchmarks/step.py --residuals dar-block --rounds 15 --json
    python benchmarks/step.py --scaling                      # how cost grows with depth and tokens

All methods take turns within a round, in an order that rotates from round to round, and a ratio compares the times of
one round; the spread is from the lowest to the highest. Memory is counted, tensor by tensor, while a step runs: all
except parameters, their gradients and the optimizer's moments, at its peak and at the end of the forward pass.
"""

import argparse
import dataclasses
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dualres.config.loading import load_config
from dualres.config.schema import Config
from dualres.model.generation import generate
from dualres.ops import dispatch
from dualres.plan.activations import LiveBytes
from dualres.train.engines.base import MicroBatch, TorchEngine
from dualres.train.engines.build import build_engine
from dualres.train.process_group import World, join_world
from dualres.util.tables import table

METHODS = "attnres-block,dar-block,attnres-full,dar-full,mhc-4"
FEW_WORDS = 256  # vocabulary for measuring growth
WARMUP = 2  # steps: compiled kernels, the optimizer's moments
PROMPT = 16  # tokens


class Memory(NamedTuple):
    """Bytes of a step besides parameters, gradients and moments."""

    peak: int
    kept: int  # at the end of the forward pass


def main() -> None:
    """Measure, then print tables or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", default="0.1b")
    parser.add_argument("--residuals", default=METHODS, help="methods besides standard, separated by commas")
    parser.add_argument("--vocabulary", type=int, default=32_768)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1024, help="per sequence")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--compile", choices=["off", "default"], default="off")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--new-tokens", type=int, default=32, help="generated in a round, at batch 1")
    parser.add_argument("--scaling", action="store_true", help="instead, fit how time and memory grow")
    parser.add_argument("--figure", type=Path, help="draw the ratios into this file")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    names = ["standard", *(name for name in arguments.residuals.split(",") if name != "standard")]
    with join_world() as world:
        if arguments.scaling:
            results = scaling(names, arguments, world)
        else:
            results = compare({name: config_of(name, arguments) for name in names}, arguments, world)
    where = f"{torch.get_num_threads()} threads" if world.device.type == "cpu" else torch.cuda.get_device_name()
    setting = {
        "scale": arguments.scale,
        "vocabulary": FEW_WORDS if arguments.scaling else arguments.vocabulary,
        "batch": arguments.batch,
        "tokens": arguments.tokens,
        "precision": arguments.precision,
        "compile": arguments.compile,
        "operators": dispatch.FORCED or dispatch.BY_DEVICE[world.device.type],
        "device": where,
        "rounds": arguments.rounds,
        "load": os.getloadavg()[0],
    }
    if arguments.figure:
        draw(results, setting, arguments.figure)
    if arguments.json:
        print(json.dumps(setting | {"found": results}))
        return
    print(", ".join(f"{key} {value}" for key, value in setting.items()))
    print(scaling_table(results) if arguments.scaling else comparison_table(results))


def config_of(residual: str, arguments: argparse.Namespace, **model: int) -> Config:
    """The scale with a residual, at the measured size."""
    config = load_config(arguments.scale, residual)
    tokens = model.pop("tokens", arguments.tokens)
    train = dataclasses.replace(
        config.train,
        micro_batch=arguments.batch,
        global_batch=arguments.batch,
        warmup_steps=1,
        precision=arguments.precision,
        compile=arguments.compile,
        recompute="none",
        engine="single",
    )
    size = {"vocab_size": arguments.vocabulary, "context": tokens, **model}
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **size), train=train)


class Contender:
    """One method: its engine, and a batch of random tokens."""

    def __init__(self, config: Config, world: World):
        self.config, self.world = config, world
        engine = build_engine(config, world, end_of_text=0)
        assert isinstance(engine, TorchEngine)
        self.engine = engine
        shape = config.train.micro_batch, config.model.context + 1
        generator = torch.Generator().manual_seed(0)
        self.sequences = torch.randint(config.model.vocab_size, shape, generator=generator).to(world.device)
        for _ in range(WARMUP):
            self.step()

    def step(self) -> None:
        """Forward, backward, update."""
        self.engine.accumulate([MicroBatch(self.sequences, 1.0)])
        self.engine.update(self.config.train.learning_rate, self.config.train.clip)
        self.finish()

    def finish(self) -> None:
        """Wait for the device."""
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()

    def generate(self, new_tokens: int) -> None:
        """Continue one short prompt, token by token."""
        generate(self.engine.decoder, [self.sequences[0, :PROMPT].tolist()], new_tokens)
        self.finish()

    def memory(self) -> Memory:
        """Count the tensors of one step."""
        objective = self.engine.wrapped
        for parameter in objective.parameters():
            parameter.grad = torch.zeros_like(parameter)
        older = [tensor for parameter in objective.parameters() for tensor in (parameter, parameter.grad)]
        with LiveBytes([tensor for tensor in older if tensor is not None]) as live:
            loss = objective(self.sequences)
            kept = live.now
            loss.backward()
        self.engine.optimizer.zero_grad()
        return Memory(live.peak, kept)


def compare(configs: dict[str, Config], arguments: argparse.Namespace, world: World) -> dict[str, Any]:
    """Seconds and bytes of every method in each round, by name."""
    contenders = {}
    for name, config in configs.items():
        contenders[name] = Contender(config, world)
        say(f"{name} is ready")
    results: dict[str, Any] = {name: {"step": [], "generate": []} for name in contenders}
    names = list(contenders)
    for turn in range(arguments.rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            results[name]["step"].append(seconds(contenders[name].step))
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            spent = seconds(partial(contenders[name].generate, arguments.new_tokens))
            results[name]["generate"].append(spent / max(arguments.new_tokens, 1))
        say(f"round {turn + 1} of {arguments.rounds}")
    for name in names:
        results[name] |= contenders[name].memory()._asdict()
    return results


def scaling(names: Sequence[str], arguments: argparse.Namespace, world: World) -> dict[str, Any]:
    """Seconds, round by round, and bytes as depth doubles at a fixed number of blocks, and as tokens double.

    The vocabulary is small: what it costs does not grow with the depth.
    """
    results: dict[str, Any] = {}
    for name in names:
        contenders: dict[str, dict[int, Contender]] = {"layers": {}, "tokens": {}}
        for factor in (1, 2, 4):
            config = config_of(name, arguments, layers=4 * factor, tokens=arguments.tokens // 2, vocab_size=FEW_WORDS)
            if config.residual.method.endswith("-block"):  # four blocks at any depth
                residual = dataclasses.replace(config.residual, branches_per_block=2 * factor)
                config = dataclasses.replace(config, residual=residual)
            contenders["layers"][4 * factor] = Contender(config, world)
            tokens = arguments.tokens * factor // 4
            short = config_of(name, arguments, layers=4, tokens=tokens, vocab_size=FEW_WORDS)
            contenders["tokens"][tokens] = Contender(short, world)
        sizes = [(by, size) for by, row in contenders.items() for size in row]
        results[name] = {by: {size: {"seconds": []} for size in row} for by, row in contenders.items()}
        for _ in range(arguments.rounds):
            for by, size in sizes:
                results[name][by][size]["seconds"].append(seconds(contenders[by][size].step))
        for by, size in sizes:
            results[name][by][size]["bytes"] = contenders[by][size].memory().peak
        say(f"{name} measured")
    return results


def exponent(costs: dict[int, float]) -> float:
    """The slope of log(cost) over log(size)."""
    points = [(math.log(size), math.log(cost)) for size, cost in costs.items()]
    x, y = (statistics.mean(values) for values in zip(*points, strict=True))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def seconds(work: Callable[[], None]) -> float:
    """Seconds that a call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def ratios(results: dict[str, Any], name: str, what: str) -> list[float]:
    """Ratios to `standard`, by round."""
    return [own / plain for own, plain in zip(results[name][what], results["standard"][what], strict=True)]


def spread(values: list[float], digits: int = 3) -> str:
    """Median (lowest–highest)."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def comparison_table(results: dict[str, Any]) -> str:
    """One row per method."""
    rows = [
        [
            name,
            f"{statistics.median(row['step']):.3f}",
            spread(ratios(results, name, "step")),
            f"{row['peak'] / 2**20:.0f}",
            f"{row['peak'] / results['standard']['peak']:.3f}",
            f"{row['kept'] / results['standard']['kept']:.3f}",
            f"{1e3 * statistics.median(row['generate']):.1f}",
            spread(ratios(results, name, "generate")),
        ]
        for name, row in results.items()
    ]
    heads = ["method", "step, s", "ratio", "peak, MiB", "ratio", "kept, ratio", "token, ms", "ratio"]
    return table(heads, rows)


def scaling_table(results: dict[str, Any]) -> str:
    """One row per method: exponents of cost over size, 1 if proportional; those of time by round."""
    rows = []
    for name, row in results.items():
        rows.append([name])
        for costs in row.values():
            rounds = zip(*(cost["seconds"] for cost in costs.values()), strict=True)
            times = [exponent(dict(zip(costs, spent, strict=True))) for spent in rounds]
            memory = exponent({size: cost["bytes"] for size, cost in costs.items()})
            rows[-1] += [spread(times, digits=2), f"{memory:.2f}"]
    return table(["method", "time by layers", "memory by layers", "time by tokens", "memory by tokens"], rows)


def draw(results: dict[str, Any], setting: dict[str, Any], path: Path) -> None:
    """Ratios to `standard`: every round of step and generation, and memory."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [name for name in results if name != "standard"]
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), sharey=True, layout="constrained")
    titles = {"step": "training step", "peak": "peak memory", "generate": "generated token, batch 1"}
    for axis, (what, title) in zip(axes, titles.items(), strict=True):
        for y, name in enumerate(names):
            peak = what == "peak"
            values = [results[name][what] / results["standard"][what]] if peak else ratios(results, name, what)
            axis.plot(values, [y] * len(values), "o", color="tab:blue", alpha=0.3)
            axis.plot(statistics.median(values), y, "|", color="black", markersize=18)
            axis.annotate(f"{statistics.median(values):.2f}", (statistics.median(values), y - 0.3), ha="center")
        axis.axvline(1, color="gray", linewidth=0.8)
        axis.set_title(title)
        axis.set_xlabel("ratio to standard")
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    figure.suptitle(
        f"{setting['scale']}, {setting['batch']} × {setting['tokens']} tokens, {setting['precision']}, "
        f"{setting['device']}, {setting['operators']} operators",
        fontsize=10,
    )
    figure.savefig(path, dpi=150)


def say(line: str) -> None:
    """Print progress to stderr."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
