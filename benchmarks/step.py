"""What a residual pathway costs: time and memory of a training step and time of a generated token, by `standard`'s.

    python benchmarks/step.py --scale nano                   # 8 × 256 tokens, vocabulary 4,096, float32, two threads
    python benchmarks/step.py                                # 0.1b, 1 × 1024 tokens, vocabulary 32,768
    python benchmarks/step.py --residuals dar-block --alternatives llama --json
    python benchmarks/step.py --scaling                      # how cost grows with depth and tokens

Alternatives (`contenders.py`) are what a user would pick instead: an eager Llama of `transformers` with the same
weights, loss and AdamW; AttnRes-Block as its pseudocode; mHC-4 by the package hyper-connections.

All contenders take turns within a round, in an order that rotates from round to round, and a ratio compares the times
of one round; the spread is from the lowest to the highest. Contenders train the same weights, in one place in memory:
where weights lie changes how long a matrix product takes. Memory is counted, tensor by tensor, while a step runs: all
except parameters, their gradients and the optimizer's moments, at its peak and at the end of the forward pass. With
`--compile`, the first step shows the time of a compilation with empty caches, Llama stays eager, and no tokens are
generated.
"""

import argparse
import contextlib
import dataclasses
import itertools
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
from contenders import ALTERNATIVES, Contender, contender, residual_of
from torch._inductor.utils import fresh_cache

from dualres.config.loading import load_config
from dualres.config.schema import Config
from dualres.ops import dispatch
from dualres.train.process_group import World, join_world
from dualres.util.tables import table

METHODS = "attnres-block,dar-block,attnres-full,dar-full,mhc-4"
FEW_WORDS = 256  # vocabulary for measuring growth
WARMUP = 2  # steps: compiled kernels, the optimizer's moments
PROMPT = 16  # tokens
BATCHES = (1, 16)  # prompts continued at a time


class Size(NamedTuple):
    """What a scale is measured at unless an option says otherwise."""

    batch: int
    tokens: int
    vocabulary: int


SIZES = dict.fromkeys(["nano", "nano-moe", "micro"], Size(8, 256, 4096))
LARGE = Size(1, 1024, 32_768)


def main() -> None:
    """Measure, then print tables or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", default="0.1b")
    parser.add_argument("--residuals", default=METHODS, help="methods besides standard, separated by commas")
    parser.add_argument(
        "--alternatives", default=",".join(ALTERNATIVES), help="contenders that are not ours, by commas; '': none"
    )
    parser.add_argument("--batch", type=int, help="sequences; 8 for nano and micro, otherwise 1")
    parser.add_argument("--tokens", type=int, help="per sequence; 256 for nano and micro, otherwise 1024")
    parser.add_argument("--vocabulary", type=int, help="4,096 for nano and micro, otherwise 32,768")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--compile", choices=["off", "default"], default="off")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--new-tokens", type=int, default=32, help="per prompt, generated in a round")
    parser.add_argument("--scaling", action="store_true", help="instead, fit how time and memory of ours grow")
    parser.add_argument("--figure", type=Path, help="draw the ratios into this file")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    for name, value in SIZES.get(arguments.scale, LARGE)._asdict().items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    torch.set_num_threads(arguments.threads)
    others = "" if arguments.scaling else arguments.alternatives
    names = [name for name in dict.fromkeys(f"standard,{arguments.residuals},{others}".split(",")) if name]
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
    print(scaling_table(results) if arguments.scaling else comparison_table(results, arguments.compile != "off"))


def config_of(name: str, arguments: argparse.Namespace, **model: int) -> Config:
    """The scale with the residual of a contender, at the measured size."""
    config = load_config(arguments.scale, residual_of(name))
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


def ready(name: str, config: Config, world: World, other: Contender | None = None) -> tuple[Contender, float]:
    """A contender after its first steps, with the weights of another, and the seconds that the first step took."""
    model = contender(name, config, world)
    if other is not None:
        model.share_weights(other)
    with contextlib.nullcontext() if config.train.compile == "off" else fresh_cache():
        first = seconds(model.step)
    for _ in range(WARMUP - 1):
        model.step()
    return model, first


def compare(configs: dict[str, Config], arguments: argparse.Namespace, world: World) -> dict[str, Any]:
    """Seconds and bytes of every contender in each round, by name."""
    compiled = arguments.compile != "off"
    if compiled:
        with fresh_cache():  # what a process loads once is not part of the first contender's time
            torch.compile(torch.sin)(torch.ones(64, requires_grad=True)).sum().backward()
    contenders: dict[str, Contender] = {}
    results: dict[str, Any] = {}
    for name, config in configs.items():
        contenders[name], first = ready(name, config, world, contenders.get("standard"))
        results[name] = {"first": first, "step": []}
        say(f"{name} is ready")
    names = list(contenders)
    prompts = {batch: contenders["standard"].random_tokens(batch, PROMPT) for batch in BATCHES if not compiled}
    for batch, name in itertools.product(prompts, names):
        contenders[name].generate(prompts[batch], 2)
        results[name][f"token_{batch}"] = []
    for turn in range(arguments.rounds):
        order = names[turn % len(names) :] + names[: turn % len(names)]
        for name in order:
            results[name]["step"].append(seconds(contenders[name].step))
        for batch, name in itertools.product(prompts, order):
            spent = seconds(partial(contenders[name].generate, prompts[batch], arguments.new_tokens))
            results[name][f"token_{batch}"].append(spent / arguments.new_tokens)
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
            contenders["layers"][4 * factor], _ = ready(name, config, world)
            tokens = arguments.tokens * factor // 4
            short = config_of(name, arguments, layers=4, tokens=tokens, vocab_size=FEW_WORDS)
            contenders["tokens"][tokens], _ = ready(name, short, world)
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


def seconds(work: Callable[[], object]) -> float:
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


def comparison_table(results: dict[str, Any], compiled: bool) -> str:
    """One row per contender: its first step if that compiles, otherwise its generated tokens."""
    standard, batches = results["standard"], () if compiled else BATCHES
    heads = ["contender", "step, s", "ratio", "peak, MiB", "ratio", "kept, ratio"]
    heads += ["first step, s", "ratio"] if compiled else []
    for batch in batches:
        heads += [f"token at batch {batch}, ms", "ratio"]
    rows = []
    for name, row in results.items():
        cells = [name, f"{statistics.median(row['step']):.3f}", spread(ratios(results, name, "step"))]
        cells += [f"{row['peak'] / 2**20:.0f}", f"{row['peak'] / standard['peak']:.3f}"]
        cells += [f"{row['kept'] / standard['kept']:.3f}"]
        cells += [f"{row['first']:.1f}", f"{row['first'] / standard['first']:.2f}"] if compiled else []
        for batch in batches:
            milliseconds = 1e3 * statistics.median(row[f"token_{batch}"])
            cells += [f"{milliseconds:.1f}", spread(ratios(results, name, f"token_{batch}"))]
        rows.append(cells)
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
    titles = {"step": "training step", "peak": "peak memory"}
    titles |= {f"token_{batch}": f"generated token, batch {batch}" for batch in BATCHES if setting["compile"] == "off"}
    size = (13, 1.2 + 0.4 * len(names))
    figure, axes = plt.subplots(1, len(titles), figsize=size, sharey=True, layout="constrained")
    for axis, (what, title) in zip(axes, titles.items(), strict=True):
        for y, name in enumerate(names):
            peak = what == "peak"
            values = [results[name][what] / results["standard"][what]] if peak else ratios(results, name, what)
            axis.plot(values, [y] * len(values), "o", color="tab:blue", alpha=0.3)
            axis.plot(statistics.median(values), y, "|", color="black", markersize=18)
            axis.annotate(f"{statistics.median(values):.2f}", (statistics.median(values), y - 0.3), ha="center")
        axis.axvline(1, color="gray", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.margins(0.15)
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
