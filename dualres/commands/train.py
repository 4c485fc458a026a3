"""`dualres train`: one run."""

import argparse
from pathlib import Path
from typing import Any

from dualres.commands import arguments
from dualres.commands.prepare import prepare_with_progress
from dualres.config import Config
from dualres.data.prepare import Settings
from dualres.data.shards import INDEX
from dualres.data.source import PYTHON
from dualres.experiment import load_config
from dualres.progress import Progress, short
from dualres.train import run
from dualres.train.loop import train
from dualres.train.recipe import steps_of
from dualres.train.world import World, join_world

DEFAULT_DATA = Path("data") / PYTHON


def add(commands: Any) -> None:
    """Declare it."""
    sub = arguments.command(
        commands,
        "train",
        "train a model, or go on with an interrupted run",
        "Train SCALE on RESIDUAL by the recipe of the scale. The same command resumes an interrupted run;\n"
        "SIGTERM and Ctrl-C save a checkpoint first. Without --data it trains on Python's standard library.",
        f"{arguments.known()}{arguments.OVERRIDES}\n"
        "examples:\n"
        "  dualres train nano dar-block\n"
        "  torchrun --nproc-per-node 8 -m dualres train 1b dar-block --data data/fineweb --out runs/1b-dar\n"
        "  dualres train 1b dar-block --dry-run --gpus 8\n"
        "docs/training.md has launches over several machines.",
    )
    arguments.experiment(sub)
    sub.add_argument("--data", metavar="D", type=Path, default=DEFAULT_DATA, help=f"prepared data ({DEFAULT_DATA})")
    sub.add_argument("--out", metavar="RUN", type=Path, help="folder of the run (default runs/SCALE-RESIDUAL)")
    sub.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU where there is one")
    sub.add_argument("--wandb", metavar="PROJECT", help="also log to Weights & Biases (needs dualres[wandb])")
    sub.set_defaults(command=_train)


def _train(given: argparse.Namespace) -> int:
    config = load_config(given.scale, given.residual, given.set)
    out = given.out or Path("runs") / f"{Path(given.scale).stem}-{Path(given.residual).stem}"
    with join_world(given.device) as world:
        if world.leads:
            ensure_default_data(given.data)
        world.from_leader(None)  # the others wait for the data
        progress = Progress(quiet=not world.leads)
        introduce(config, given, out, world, progress)
        done = train(config, given.data, out, world, progress, given.wandb)
        if world.leads and done.finished:
            print(f"validation loss {done.validation_loss:.4f} after {done.step} steps; {out / run.SUMMARY}")
    return 0


def ensure_default_data(data: Path) -> None:
    """Prepare the default source where nothing else was asked for and it is not there yet."""
    if data == DEFAULT_DATA and not (data / INDEX).exists():
        Progress().say(f"preparing {PYTHON}, the standard library's text, in {data} (once)")
        prepare_with_progress(Settings(PYTHON, "bpe:4096", held_out=0.05), data)


def introduce(config: Config, given: argparse.Namespace, out: Path, world: World, progress: Progress) -> None:
    """One line on what begins."""
    steps, tokens = steps_of(config.train, config.model.context), config.train.global_batch * config.model.context
    progress.say(
        f"{given.scale} × {given.residual} on {given.data}: {steps:,} steps of {short(tokens)} tokens, "
        f"{world.size} × {world.device.type}, into {out}"
    )
