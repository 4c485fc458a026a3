"""Does training wait for a checkpoint? Compares saves that block the loop with ours, which run in the background.

    python benchmarks/save.py                          # nano × standard
    python benchmarks/save.py --scale micro --residual dar-block --rounds 5 --json

A round is a step, a blocking save, and a save during the next step. The pause is the time for which `save` blocks the
loop: the copy of model and optimizer. On a CPU, the step also shares its cores with the writer.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from dualres.config.loading import load_config
from dualres.train.checkpoint import Checkpoints
from dualres.train.engines.base import MicroBatch
from dualres.train.engines.build import build_engine
from dualres.train.process_group import World, join_world
from dualres.util.tables import table

WARMUP = 3  # steps
NAMES = "step", "save, waited for", "pause for a save", "step during a save", "cost of a save"


def main() -> None:
    """Measure, then print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", default="nano")
    parser.add_argument("--residual", default="standard")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="where to save (default: the temporary folder)")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with join_world() as world, tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        times = measure(arguments.scale, arguments.residual, arguments.rounds, Path(folder), world)
    if arguments.json:
        print(
            json.dumps({"scale": arguments.scale, "residual": arguments.residual, "load": os.getloadavg()[0]} | times)
        )
        return
    print(f"{arguments.scale} × {arguments.residual}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}")
    rows = [
        [name, *(f"{value:.1f}" for value in (statistics.median(values), min(values), max(values)))]
        for name, values in times.items()
    ]
    print(table([f"milliseconds, {arguments.rounds} rounds", "median", "min", "max"], rows))


def measure(scale: str, residual: str, rounds: int, folder: Path, world: World) -> dict[str, list[float]]:
    """Milliseconds of each kind, by name."""
    config = load_config(scale, residual)
    train, model = config.train, config.model
    engine = build_engine(config, world, end_of_text=0)
    checkpoints = Checkpoints(folder, world, keep=1, say=print)
    sequences = torch.randint(model.vocab_size, (train.micro_batch, model.context + 1))

    def step() -> None:
        engine.accumulate([MicroBatch(sequences, 1.0)])
        engine.update(train.learning_rate, train.clip)
        if world.device.type == "cuda":
            torch.cuda.synchronize()

    def save() -> None:
        checkpoints.save(0, engine.tensors(), {"best_step": 0})

    def save_and_wait() -> None:
        save()
        checkpoints.wait()

    for _ in range(WARMUP):
        step()
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    for _ in range(rounds):
        quiet, waited, pause, during = (milliseconds(work) for work in (step, save_and_wait, save, step))
        checkpoints.wait()
        if checkpoints.failure:
            raise SystemExit(checkpoints.failure)
        for name, value in zip(NAMES, (quiet, waited, pause, during, pause + during - quiet), strict=True):
            times[name].append(value)
    return times


def milliseconds(work: Callable[[], None]) -> float:
    """Milliseconds that a call takes."""
    began = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - began)


if __name__ == "__main__":
    main()
