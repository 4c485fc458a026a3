"""`dualres train`: one run."""

import argparse
import json
import math
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualres.commands import arguments
from dualres.commands.prepare import prepare_with_progress
from dualres.config.loading import load_config, load_recipe, load_residual, short_name
from dualres.config.schema import Config, ConfigError
from dualres.data.prepare import Settings
from dualres.data.shards import INDEX
from dualres.data.source import PYTHON
from dualres.util.optional_dependencies import install
from dualres.util.progress import Progress, short

if TYPE_CHECKING:
    from dualres.train.process_group import World

DEFAULT_DATA = Path("data") / PYTHON
GPUS_OF_A_MACHINE = 8  # in the printed command


def add(commands: Any) -> None:
    """Declare it."""
    sub = arguments.command(
        commands,
        "train",
        "train a model, or go on with an interrupted run",
        "Train SCALE on RESIDUAL by the recipe of the scale. The same command resumes an interrupted run;\n"
        "SIGTERM and Ctrl-C save a checkpoint first. Without --data it trains on Python's standard library.\n"
        "--dry-run starts nothing: it prints the plan and exits with 1 if the run could not start.",
        f"{arguments.known()}{arguments.OVERRIDES}\n"
        "examples:\n"
        "  dualres train nano dar-block\n"
        "  torchrun --nproc-per-node 8 -m dualres train 1b dar-block --data data/fineweb --out runs/1b-dar\n"
        "  dualres train 1b dar-block --dry-run --gpus 8\n"
        "  dualres train 1b dar-block --from models/llama-1b-dar --data data/llama-tokens",
    )
    arguments.experiment(sub)
    sub.add_argument("--data", metavar="D", type=Path, default=DEFAULT_DATA, help=f"prepared data ({DEFAULT_DATA})")
    sub.add_argument("--out", metavar="RUN", type=Path, help="folder of the run (default runs/SCALE-RESIDUAL)")
    sub.add_argument(
        "--from",
        dest="start",
        metavar="MODEL",
        type=Path,
        help="begin with the weights of a converted or exported model, which also says what the model is",
    )
    sub.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU where there is one")
    sub.add_argument("--wandb", metavar="PROJECT", help=f"also log to Weights & Biases ({install('wandb')})")
    dry = sub.add_argument_group("without starting")
    dry.add_argument(
        "--dry-run", action="store_true", help="print the plan: parameters, steps, memory of a rank, checks"
    )
    dry.add_argument("--gpus", metavar="N", type=int, help="plan for so many (default 1)")
    dry.add_argument("--gpu-memory", metavar="GIB", type=float, help="check that the plan fits so much on each")
    dry.add_argument("--json", action="store_true", help="print the plan as JSON")
    sub.set_defaults(command=_train)


def _train(given: argparse.Namespace) -> int:
    config = load_config(given.scale, given.residual, given.set) if given.start is None else started(given)
    out = given.out or Path("runs") / f"{short_name(given.scale)}-{short_name(given.residual)}"
    if given.dry_run:
        return _plan(config, given, out)
    for option in ("gpus", "gpu_memory", "json"):
        if getattr(given, option):
            name = option.replace("_", "-")
            raise ConfigError(f"--{name} belongs to a plan: add --dry-run, or start so many processes with torchrun")
    from dualres.train import run_folder
    from dualres.train.loop import check_batch, train
    from dualres.train.process_group import join_world, world_size

    check_batch(config, world_size())  # and the mesh, before any process waits for another
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
            f"--from {given.start} is on {start.residual_config.method} and RESIDUAL is {given.residual}: name what it "
            "is on"
        )
    return load_recipe(given.scale, start.config, start.residual_config, given.set)


def _plan(config: Config, given: argparse.Namespace, out: Path) -> int:
    for option, value in (("--gpus", given.gpus), ("--gpu-memory", given.gpu_memory)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{option} {value} is not positive and finite: use 1 or more")
    from dualres.plan import run_plan
    from dualres.train.preflight import Places

    ranks = given.gpus or 1
    if given.gpu_memory is not None and run_plan.cut(config, ranks):
        raise ConfigError(
            "--gpu-memory is not compared here where train.parallel cuts the model: use "
            f"dualres plan {given.scale} {given.residual} --gpus {ranks} --gpu-memory {given.gpu_memory:g}, with the "
            "same --set"
        )
    places = Places(given.data, out, made_at_start=given.data == DEFAULT_DATA)
    made = run_plan.make_plan(config, ranks, places, launch(given, ranks), given.gpu_memory, given.wandb is not None)
    if given.json:
        print(json.dumps(run_plan.as_data(made), indent=2))
    else:
        print(run_plan.as_text(made, f"{given.scale} × {given.residual}"))
    if made.problems:
        print(f"dualres: it cannot start so: {', '.join(check.name for check in made.problems)}", file=sys.stderr)
    return 1 if made.problems else 0


def launch(given: argparse.Namespace, ranks: int) -> str:
    """The command that starts what was planned."""
    words = ["dualres", "train", given.scale, given.residual]
    for override in given.set:
        words += ["--set", override]
    words += ["--data", str(given.data)] if given.data != DEFAULT_DATA else []
    for option, name in (("out", "out"), ("start", "from"), ("device", "device"), ("wandb", "wandb")):
        if getattr(given, option) is not None:
            words += [f"--{name}", str(getattr(given, option))]
    if ranks == 1:
        return shlex.join(words)
    machines = ranks // GPUS_OF_A_MACHINE if ranks % GPUS_OF_A_MACHINE == 0 else 1
    several = ["--nnodes", str(machines), "--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:29500"]
    processes = ["--nproc-per-node", str(ranks // machines)]
    return shlex.join(["torchrun", *(several if machines > 1 else []), *processes, "-m", *words])


def ensure_default_data(data: Path) -> None:
    """Prepare the default source where nothing else was asked for and it is not there yet."""
    if data == DEFAULT_DATA and not (data / INDEX).exists():
        Progress().say(f"preparing {PYTHON}, the standard library's text, in {data} (once)")
        prepare_with_progress(Settings(PYTHON, "bpe:4096"), data)


def introduce(config: Config, given: argparse.Namespace, out: Path, world: "World", progress: Progress) -> None:
    """What begins, and what of the config it does not use."""
    from dualres.train.engines.build import engine_name
    from dualres.train.preflight import other_dataset, unused_mesh
    from dualres.train.recipe import steps_of

    steps, tokens = steps_of(config.train, config.model.context), config.train.global_batch * config.model.context
    progress.say(
        f"{given.scale} × {given.residual} on {given.data}: {steps:,} steps of {short(tokens)} tokens, "
        f"{world.size} × {world.device.type}, into {out}"
    )
    if given.data == DEFAULT_DATA and (other := other_dataset(config)):
        progress.say(f"{given.data} is of {PYTHON}{other}")
    unused = unused_mesh(config, engine_name(config, world.size))
    if unused is not None:
        progress.say(unused)
