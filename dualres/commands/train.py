"""Train a model, or resume an interrupted run.

Train SCALE with the residual method RESIDUAL and the recipe of the scale. Rerun the command to resume an
interrupted run; SIGTERM and Ctrl-C save a checkpoint first, and exit with 130. Without --data it trains on
Python's standard library. --dry-run trains nothing: it prints the plan and exits with 1 if the run could not
start.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dualres.commands import arguments
from dualres.commands.prepare import prepare_with_progress
from dualres.config.loading import load_config, load_recipe, load_residual, short_name
from dualres.config.schema import Config, ConfigError
from dualres.data.settings import PYTHON, Settings
from dualres.plan.hardware import GIB, Hardware
from dualres.train.launch import launch_command
from dualres.util.errors import INTERRUPTED
from dualres.util.optional_dependencies import available, install, missing
from dualres.util.progress import Progress, short

if TYPE_CHECKING:
    import torch

    from dualres.train.process_group import World

DEFAULT_DATA = Path("data") / PYTHON
EPILOG = f"""\
{arguments.KNOWN}{arguments.OVERRIDES}
examples:
  dualres train nano dar-block
  torchrun --nproc-per-node 8 -m dualres train 1b dar-block --data data/fineweb-100b --out runs/1b-dar
  dualres train 1b dar-block --dry-run --gpus 8
  dualres train 1b dar-block --from models/llama-1b-dar --data data/llama-tokens
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    arguments.add_experiment(parser)
    add("--data", metavar="D", type=Path, default=DEFAULT_DATA, help=f"prepared data (default {DEFAULT_DATA})")
    add("--out", metavar="RUN", type=Path, help="run folder (default runs/SCALE-RESIDUAL)")
    add(
        "--from",
        dest="start",
        metavar="MODEL",
        type=Path,
        help="start from the weights of a converted or exported model, which also defines model and residual",
    )
    add("--device", choices=("cpu", "cuda"), help="default: a GPU if available")
    arguments.add_force(parser)
    add("--wandb", metavar="PROJECT", help=f"also log to Weights & Biases ({install('wandb')} in a clone of dualres)")
    dry = parser.add_argument_group("planning")
    dry.add_argument(
        "--dry-run", action="store_true", help="print the plan: parameters, steps, memory per rank, checks"
    )
    dry.add_argument("--gpus", metavar="N", type=int, help="number of GPUs to plan for (default 1)")
    dry.add_argument("--gpu-memory", metavar="GIB", type=float, help="check that the plan fits in this memory per GPU")
    dry.add_argument("--json", action="store_true", help="print the plan as JSON")


def run(args: argparse.Namespace) -> int:
    if not args.dry_run:
        arguments.check_device(args)
    from dualres.train import run_folder
    from dualres.train.loop import check_batch, train
    from dualres.train.process_group import join_world, world_size

    config = load_config(args.scale, args.residual, args.set) if args.start is None else config_from_model(args)
    out = args.out or Path("runs") / f"{short_name(args.scale)}-{short_name(args.residual)}"
    if args.dry_run:
        return dry_run(config, args, out)
    for option in ("gpus", "gpu_memory", "json"):
        if getattr(args, option):
            name = option.replace("_", "-")
            raise ConfigError(f"--{name} requires --dry-run; to train on several GPUs, use torchrun")
    check_batch(config, world_size())  # checks the mesh too, before any process waits for another
    with join_world(args.device) as world:
        progress = Progress(args.verbosity, muted=not world.is_main)
        world.on_main(lambda: ensure_default_data(args.data, progress))
        introduce(config, args, out, world, progress)
        world.on_main(lambda: check_and_say(config, args, out, world, progress))
        result = train(config, args.data, out, world, progress, args.wandb, args.start)
        if world.is_main and result.finished:
            print(f"validation loss {result.validation_loss:.4f} after {result.step} steps; {out / run_folder.SUMMARY}")
    return 0 if result.finished or world.size > 1 else INTERRUPTED  # torchrun would restart a rank that exits with 130


def config_from_model(args: argparse.Namespace) -> Config:
    """The recipe of SCALE for the model of --from; raises if the data has a different tokenizer."""
    from dualres.hub.open_model import open_start

    start = open_start(args.start, args.data).decoder
    _, named = load_residual(args.residual, start.config)
    if named.method != start.residual_config.method:
        raise ConfigError(
            f"--from {args.start} uses {start.residual_config.method}, not {args.residual}: use the model's method"
        )
    return load_recipe(args.scale, start.config, start.residual_config, args.set)


def dry_run(config: Config, args: argparse.Namespace, out: Path) -> int:
    """Print the plan and everything that would prevent the run from starting."""
    from dualres.parallel.mesh import Mesh
    from dualres.plan.estimate import estimate
    from dualres.plan.plan import Plan, as_data, as_text
    from dualres.plan.search import check_device_memory, check_memory
    from dualres.train.device import pick_device
    from dualres.train.engines.build import engine_mesh
    from dualres.train.preflight import check_plan, collect, engine_or_configured

    arguments.check_positive(args, "gpus", "gpu_memory")
    ranks = args.gpus or 1
    try:
        mesh = engine_mesh(config, ranks)
    except ConfigError:  # a check below reports it
        mesh = Mesh(data=ranks)
    hardware = Hardware() if args.gpu_memory is None else Hardware(memory=args.gpu_memory * GIB)
    own = estimate(config, engine_or_configured(config, ranks), mesh, hardware)
    checks = [*check_plan(config, ranks, args.data, out, **_options(args)), *arguments.warmup_checks(config, args)]
    if args.gpus is None and args.gpu_memory is None and args.device != "cuda":  # the plan is for this machine
        device = pick_device(args.device or "auto")
        memory = collect("memory", lambda: check_device_memory(config, 1, *memory_of(device), own))
        checks.append(memory._replace(details=f"{device.type} of this machine: {memory.details}"))
    else:
        checks.append(check_memory(own, hardware))
    options = {"data": None if args.data == DEFAULT_DATA else args.data, "out": args.out, "from": args.start}
    options |= {"device": args.device, "wandb": args.wandb, "plugin": args.plugin}
    command = launch_command(args.scale, args.residual, args.set, options, processes=ranks)
    plan = Plan(args.residual, {args.residual: own}, hardware, False, checks, command)
    print(json.dumps(as_data(plan), indent=2) if args.json else as_text(plan, f"{args.scale} × {args.residual}"))
    if plan.problems:
        print(f"dualres: cannot start: {', '.join(check.name for check in plan.problems)}", file=sys.stderr)
    return 1 if plan.problems else 0


def memory_of(device: "torch.device", sharing: int = 1) -> tuple[float, float]:
    """Free and total memory of one process on the device; on a CPU, the processes of this machine share it."""
    from dualres.train.device import free_memory, total_memory

    ranks = sharing if device.type == "cpu" else 1
    return free_memory(device) / ranks, total_memory(device) / ranks


def check_and_say(config: Config, args: argparse.Namespace, out: Path, world: "World", progress: Progress) -> None:
    """Make the checks of a dry run before a start: raise for a problem, unless --force, and say what else matters."""
    from dualres.plan.search import check_device_memory
    from dualres.train.preflight import check_start, collect, refuse

    checked = collect if args.force else refuse
    checks = check_start(config, world.size, args.data, out, checked=checked, **_options(args))
    checks += arguments.warmup_checks(config, args)
    memory = memory_of(world.device, int(os.environ.get("LOCAL_WORLD_SIZE", world.size)))  # set by torchrun
    checks.append(checked("memory", lambda: check_device_memory(config, world.size, *memory, show=progress.show)))
    for check in checks:
        if check.state != "ok":
            (progress.warn if check.state == "problem" else progress.say)(f"{check.name}: {check.details}")


def _options(args: argparse.Namespace) -> dict[str, bool]:
    """Options of `check_start`."""
    return {"prepares_data": args.data == DEFAULT_DATA, "wandb": args.wandb is not None}


def ensure_default_data(data: Path, progress: Progress) -> None:
    """Prepare the default dataset if it is used and missing."""
    from dualres.data.shards import INDEX

    if data == DEFAULT_DATA and not (data / INDEX).exists():
        progress.say(f"preparing {PYTHON}, the text of the standard library, into {data} (once)")
        prepare_with_progress(Settings(PYTHON, "bpe:4096"), data, progress)


def introduce(config: Config, args: argparse.Namespace, out: Path, world: "World", progress: Progress) -> None:
    """Print what is trained, where, and which extras would help."""
    from dualres.ops import dispatch
    from dualres.train.metrics import METRICS

    progress.say(
        f"{args.scale} × {args.residual} on {args.data}: {config.steps:,} steps of {short(config.tokens_per_step)} "
        f"tokens, {world.size} × {world.device.type}, into {out}"
    )
    dispatch.announce(world.device, progress.say)
    if not available("tensorboard"):
        needed = missing("tensorboard", "tensorboard", "logging to TensorBoard")
        progress.say(f"{needed}; metrics are written to {out / METRICS} only")
