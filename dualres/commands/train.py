"""Train a model, or resume an interrupted run.

Train SCALE with the residual method RESIDUAL by the recipe of the scale. The same command resumes an
interrupted run; SIGTERM and Ctrl-C save a checkpoint first. Without --data it trains on Python's standard
library. --dry-run trains nothing: it prints the plan and exits with 1 if the run could not start.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dualres.commands import arguments
from dualres.commands.prepare import prepare_with_progress
from dualres.config.loading import load_config, load_recipe, load_residual, short_name
from dualres.config.schema import Config, ConfigError
from dualres.data.prepare import Settings
from dualres.data.shards import INDEX
from dualres.data.source import PYTHON
from dualres.plan.hardware import GIB, Hardware
from dualres.train.launch import launch_command
from dualres.util.optional_dependencies import install
from dualres.util.progress import Progress, short

if TYPE_CHECKING:
    from dualres.train.process_group import World

DEFAULT_DATA = Path("data") / PYTHON
EPILOG = f"""\
{arguments.KNOWN}{arguments.OVERRIDES}
examples:
  dualres train nano dar-block
  torchrun --nproc-per-node 8 -m dualres train 1b dar-block --data data/fineweb --out runs/1b-dar
  dualres train 1b dar-block --dry-run --gpus 8
  dualres train 1b dar-block --from models/llama-1b-dar --data data/llama-tokens
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_experiment(parser)
    parser.add_argument("--data", metavar="D", type=Path, default=DEFAULT_DATA, help=f"prepared data ({DEFAULT_DATA})")
    parser.add_argument("--out", metavar="RUN", type=Path, help="run folder (default runs/SCALE-RESIDUAL)")
    parser.add_argument(
        "--from",
        dest="start",
        metavar="MODEL",
        type=Path,
        help="start from the weights of a converted or exported model, which also defines model and residual",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    parser.add_argument(
        "--wandb", metavar="PROJECT", help=f"also log to Weights & Biases ({install('wandb')} in a clone of dualres)"
    )
    dry = parser.add_argument_group("without starting")
    dry.add_argument(
        "--dry-run", action="store_true", help="print the plan: parameters, steps, memory of a rank, checks"
    )
    dry.add_argument("--gpus", metavar="N", type=int, help="plan for this many (default 1)")
    dry.add_argument("--gpu-memory", metavar="GIB", type=float, help="check that the plan fits this much on each")
    dry.add_argument("--json", action="store_true", help="print the plan as JSON")


def run(given: argparse.Namespace) -> int:
    from dualres.train import run_folder
    from dualres.train.loop import check_batch, train
    from dualres.train.process_group import join_world, world_size

    config = load_config(given.scale, given.residual, given.set) if given.start is None else started(given)
    out = given.out or Path("runs") / f"{short_name(given.scale)}-{short_name(given.residual)}"
    if given.dry_run:
        return dry_run(config, given, out)
    for option in ("gpus", "gpu_memory", "json"):
        if getattr(given, option):
            name = option.replace("_", "-")
            raise ConfigError(f"--{name} needs --dry-run; to train on several GPUs, use torchrun")
    check_batch(config, world_size())  # checks the mesh too, before any process waits for another
    with join_world(given.device) as world:
        world.on_main(lambda: ensure_default_data(given.data))
        progress = Progress(quiet=not world.is_main)
        introduce(config, given, out, world, progress)
        done = train(config, given.data, out, world, progress, given.wandb, given.start)
        if world.is_main and done.finished:
            print(f"validation loss {done.validation_loss:.4f} after {done.step} steps; {out / run_folder.SUMMARY}")
    return 0


def started(given: argparse.Namespace) -> Config:
    """The recipe of SCALE for the model that --from names, on data of its tokenizer."""
    from dualres.hub.open_model import open_start

    start = open_start(given.start, given.data).decoder
    _, named = load_residual(given.residual, start.config)
    if named.method != start.residual_config.method:
        raise ConfigError(
            f"--from {given.start} uses {start.residual_config.method}, not {given.residual}: use the model's method"
        )
    return load_recipe(given.scale, start.config, start.residual_config, given.set)


def dry_run(config: Config, given: argparse.Namespace, out: Path) -> int:
    """Print the plan and whatever would prevent a start."""
    from dualres.parallel.mesh import Mesh
    from dualres.plan.estimate import estimate
    from dualres.plan.plan import Plan, as_data, as_text
    from dualres.plan.search import check_memory
    from dualres.train.engines.build import engine_mesh
    from dualres.train.preflight import check_start, engine_or_configured

    arguments.check_positive(given, "gpus", "gpu_memory")
    ranks = given.gpus or 1
    try:
        mesh = engine_mesh(config, ranks)
    except ConfigError:  # a check says so
        mesh = Mesh(data=ranks)
    hardware = Hardware() if given.gpu_memory is None else Hardware(memory=given.gpu_memory * GIB)
    own = estimate(config, engine_or_configured(config, ranks), mesh, hardware)
    is_default, wandb = given.data == DEFAULT_DATA, given.wandb is not None
    checks = check_start(config, ranks, given.data, out, prepares_data=is_default, wandb=wandb)
    options = {"data": None if is_default else given.data, "out": given.out, "from": given.start}
    options |= {"device": given.device, "wandb": given.wandb}
    line = launch_command(given.scale, given.residual, given.set, options, processes=ranks)
    made = Plan(given.residual, {given.residual: own}, hardware, False, [*checks, check_memory(own, hardware)], line)
    print(json.dumps(as_data(made), indent=2) if given.json else as_text(made, f"{given.scale} × {given.residual}"))
    if made.problems:
        print(f"dualres: cannot start: {', '.join(check.name for check in made.problems)}", file=sys.stderr)
    return 1 if made.problems else 0


def ensure_default_data(data: Path) -> None:
    """Prepare the default data set if it is used and missing."""
    if data == DEFAULT_DATA and not (data / INDEX).exists():
        Progress().say(f"preparing {PYTHON}, the text of the standard library, in {data} (once)")
        prepare_with_progress(Settings(PYTHON, "bpe:4096"), data)


def introduce(config: Config, given: argparse.Namespace, out: Path, world: "World", progress: Progress) -> None:
    """Say what is trained, where, and what of the recipe is not used."""
    from dualres.train.engines.build import engine_name
    from dualres.train.preflight import other_dataset, unused_mesh
    from dualres.train.recipe import steps_of

    steps, tokens = steps_of(config.train, config.model.context), config.train.global_batch * config.model.context
    progress.say(
        f"{given.scale} × {given.residual} on {given.data}: {steps:,} steps of {short(tokens)} tokens, "
        f"{world.size} × {world.device.type}, into {out}"
    )
    if given.data == DEFAULT_DATA and (other := other_dataset(config)):
        progress.say(f"{given.data} is {PYTHON}{other}")
    if (unused := unused_mesh(config, engine_name(config, world.size))) is not None:
        progress.say(unused)
