"""What does the loader cost? Compares its time for the batch of one step with the step itself, as in `dualres train`.

    python benchmarks/loader.py                        # nano × standard, on Python's standard library
    python benchmarks/loader.py --data data/fineweb --residual dar-block --json

Prints the milliseconds of both and, per step, the loader's share of their sum in percent.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from dualres.config.loading import load_config
from dualres.config.schema import Config
from dualres.data.loader import Loader
from dualres.data.prepare import Settings, prepare
from dualres.data.shards import read_index
from dualres.data.source import PYTHON
from dualres.train.engines.base import MicroBatch
from dualres.train.engines.build import build_engine
from dualres.train.process_group import join_world
from dualres.util.tables import table

WARMUP = 3  # steps


def main() -> None:
    """Measure, then print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="prepared data (default: python, prepared now)")
    parser.add_argument("--scale", default="nano")
    parser.add_argument("--residual", default="standard")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    config = load_config(arguments.scale, arguments.residual)
    with tempfile.TemporaryDirectory() as folder:
        data = arguments.data or Path(folder) / "data"
        if arguments.data is None:
            prepare(Settings(PYTHON, f"bpe:{config.model.vocab_size}"), data)
        loading, training = measure(config, data, arguments.steps)
    shares = [100 * load / (load + train) for load, train in zip(loading, training, strict=True)]
    columns = {"loader, ms": loading, "step, ms": training, "share, %": shares}
    threads, load = torch.get_num_threads(), os.getloadavg()[0]
    if arguments.json:
        print(
            json.dumps(
                {"scale": arguments.scale, "residual": arguments.residual, "threads": threads, "load": load} | columns
            )
        )
        return
    batch = f"{config.train.global_batch} × {config.model.context} tokens"
    print(f"{arguments.scale} × {arguments.residual}, {batch}, {threads} threads, load {load:.1f}")
    rows = [[name, *spread(values)] for name, values in columns.items()]
    print(table([f"{arguments.steps} steps", "median", "min", "max"], rows))


def measure(config: Config, data: Path, steps: int) -> tuple[list[float], list[float]]:
    """Milliseconds of every step: for loading its batches, and for training on them."""
    train = config.train
    index = read_index(data)
    loader = Loader(data, index, "train", config.model.context, train.seed)
    loading, training = [], []
    with join_world() as world:
        engine = build_engine(config, world, index.end_of_text)
        starts = range(0, train.global_batch, train.micro_batch)
        for step in range(steps + WARMUP):
            began = time.perf_counter()
            batches = [loader.batch(step * train.global_batch + start, train.micro_batch) for start in starts]
            loaded = time.perf_counter()
            engine.accumulate([MicroBatch(sequences, 1 / len(batches)) for sequences in batches])
            engine.update(train.learning_rate, train.clip)
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            if step >= WARMUP:
                loading.append(1e3 * (loaded - began))
                training.append(1e3 * (time.perf_counter() - loaded))
    return loading, training


def spread(values: Sequence[float]) -> list[str]:
    """Median, minimum and maximum."""
    return [f"{value:.3f}" for value in (statistics.median(values), min(values), max(values))]


if __name__ == "__main__":
    main()
