"""Choose or check a mesh of GPUs: memory, communication, speed.

Plan training SCALE with RESIDUAL on N GPUs, next to standard, attnres-block and dar-block on the same mesh.
Without --set train.parallel.… it chooses the fastest mesh that fits; with it, it checks that mesh.
Nothing is started and no GPU is needed: the plan is an analytical estimate, not validated on GPUs.
Exits with 1 if the mesh does not fit.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dualres.commands import arguments
from dualres.config.loading import load_config, parse_overrides
from dualres.config.schema import Config, ConfigError
from dualres.plan.hardware import GIB, Hardware
from dualres.train.launch import launch_command
from dualres.util.progress import Progress, Show

if TYPE_CHECKING:
    from dualres.plan.plan import Plan

BASELINES = ("standard", "attnres-block", "dar-block")
MAX_GPUS = 1_000_000
PLAUSIBLE_RANGE = 1e-9, 1e30  # of hardware values, in any unit
ASSUMPTIONS = {  # field of Hardware, which is also the option -> its help
    "peak_flops": "peak FLOP/s of one GPU at the matmul precision",
    "utilization": "fraction of peak that matmuls achieve",
    "memory_bandwidth": "memory bandwidth of a GPU, bytes/s",
    "node_bandwidth": "intra-node bandwidth per GPU, bytes/s",
    "network_bandwidth": "inter-node bandwidth per GPU, bytes/s",
}
EPILOG = f"""\
{arguments.KNOWN}{arguments.OVERRIDES}
examples:
  dualres plan moe-7b dar-block --gpus 8 --gpu-memory 80
  dualres plan moe-7b dar-block --gpus 8 --gpu-memory 80 --set train.parallel.tensor=2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    arguments.add_experiment(parser)
    add("--gpus", metavar="N", type=int, required=True, help="number of GPUs")
    add("--gpu-memory", metavar="GIB", type=float, required=True, help="memory per GPU, in GiB")
    add("--node-size", metavar="M", type=int, default=8, help="GPUs that share fast links (default 8)")
    assumptions = parser.add_argument_group("hardware assumptions (defaults from the H100 SXM data sheet)")
    for field, help in ASSUMPTIONS.items():
        option, default = f"--{field.replace('_', '-')}", Hardware._field_defaults[field]
        assumptions.add_argument(option, metavar="X", type=float, default=default, help=f"{help} (default {default:g})")
    add("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    from dualres.plan.plan import as_data, as_text

    progress = Progress(args.verbosity, muted=args.json)
    try:
        plan = make_plan(args, progress.show)
    finally:
        progress.end()
    print(json.dumps(as_data(plan), indent=2) if args.json else as_text(plan, f"{args.scale} × {args.residual}"))
    fits = plan.estimate.fits(plan.hardware)
    if not fits:
        print("dualres: this configuration does not fit in GPU memory", file=sys.stderr)
    return 0 if fits else 1


def make_plan(args: argparse.Namespace, show: Show) -> "Plan":
    from dualres.plan.estimate import MeshEstimate, estimate
    from dualres.plan.plan import Plan
    from dualres.plan.search import check_memory, choose
    from dualres.train.engines.build import engine_mesh, engine_name
    from dualres.train.loop import check_batch
    from dualres.train.preflight import USED_BY_ENGINE

    hardware = hardware_of(args)
    config = load_config(args.scale, args.residual, args.set)
    engine = engine_name(config, args.gpus)
    train_overrides = parse_overrides(args.set).get("train", {})
    searches = engine in ("single", "fsdp2") and not USED_BY_ENGINE["fsdp2"] & set(train_overrides.get("parallel", {}))
    if searches:
        fixed = {"micro_batch", "recompute"} & set(train_overrides)
        config = choose(config, args.gpus, hardware, fixed, show).config
    check_batch(config, args.gpus)
    mesh = engine_mesh(config, args.gpus)
    columns: dict[str, MeshEstimate | str] = {}
    for name in dict.fromkeys((*BASELINES, args.residual)):
        show(f"{mesh.describe()}: {name}")
        is_own = name == args.residual
        # --set residual.… applies only to RESIDUAL.
        overrides = [override for override in args.set if is_own or not override.startswith("residual.")]
        residual = load_config(args.scale, name, overrides).residual
        default = config.residual.default_branches_per_block  # set by the scale, not by the method
        residual = dataclasses.replace(residual, default_branches_per_block=default)
        try:
            other = dataclasses.replace(config, residual=residual)
            columns[name] = estimate(other, engine, engine_mesh(other, args.gpus), hardware)
        except ConfigError as error:
            if is_own:
                raise
            columns[name] = str(error)
    own = columns[args.residual]
    assert isinstance(own, MeshEstimate)  # otherwise the error was raised above
    overrides = [*args.set, *_settings(config, engine, args.set)]
    size = {"processes": args.gpus, "node_size": args.node_size}
    command = launch_command(args.scale, args.residual, overrides, {"plugin": args.plugin}, **size)
    checks = [*arguments.warmup_checks(config, args), check_memory(own, hardware)]
    return Plan(args.residual, columns, hardware, searches, checks, command)


def hardware_of(args: argparse.Namespace) -> Hardware:
    """The hardware that the options describe; raises for impossible values."""
    options = ("gpus", "gpu_memory", "node_size", *ASSUMPTIONS)
    arguments.check_positive(args, *options)
    for option in options:
        if not PLAUSIBLE_RANGE[0] <= (value := getattr(args, option)) <= PLAUSIBLE_RANGE[1]:
            name = option.replace("_", "-")
            raise ConfigError(f"--{name} {value:g} is not a plausible hardware value: use a number from 1e-9 to 1e30")
    if args.utilization > 1:
        raise ConfigError(f"--utilization {args.utilization:g} exceeds 1 (100% of peak): use a fraction such as 0.5")
    if args.gpus > MAX_GPUS:
        raise ConfigError(f"--gpus {args.gpus} exceeds the supported maximum: use at most {MAX_GPUS:,}")
    if args.gpus > args.node_size and args.gpus % args.node_size:
        raise ConfigError(
            f"--gpus {args.gpus} is not a multiple of --node-size {args.node_size}: use "
            f"{args.gpus // args.node_size * args.node_size}, or another --node-size"
        )
    fields = {field: getattr(args, field) for field in ASSUMPTIONS}
    return Hardware(memory=args.gpu_memory * GIB, node_size=args.node_size, **fields)


def _settings(config: Config, engine: str, overrides: Sequence[str]) -> list[str]:
    """Overrides for the settings that the plan chose and the user did not set."""
    train, parallel = config.train, config.train.parallel
    settings = {
        "train.engine": engine,
        "train.micro_batch": train.micro_batch,
        "train.recompute": train.recompute,
        "train.parallel.tensor": parallel.tensor,
        "train.parallel.sequence_parallel": str(parallel.sequence_parallel).lower(),
        "train.parallel.pipeline": parallel.pipeline,
        "train.parallel.virtual_stages": parallel.virtual_stages,
        "train.parallel.expert": parallel.expert,
    }
    overridden = {override.partition("=")[0] for override in overrides}
    return [f"{key}={value}" for key, value in settings.items() if key not in overridden]
