"""Choose or check a mesh of GPUs: memory, communication, speed.

Plan the training of SCALE on RESIDUAL over N GPUs, beside standard, attnres-block and dar-block on the
same mesh. Without --set train.parallel.… it chooses the fastest mesh that fits; with it, it checks that one.
Nothing is started and no GPU is needed: it is an analytical estimate, not validated on GPUs.
Exits with 1 if a given mesh does not fit.
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

BESIDE = ("standard", "attnres-block", "dar-block")
MOST_GPUS = 1_000_000
CREDIBLE = 1e-9, 1e30  # numbers of hardware, in whatever unit
ASSUMED = {  # field of Hardware, and option: what it is
    "peak_flops": "of a GPU, in the precision of the products",
    "utilization": "share of them that products reach",
    "memory_bandwidth": "bytes per second of a GPU's own memory",
    "node_bandwidth": "bytes per second of a GPU to its node",
    "network_bandwidth": "bytes per second of a GPU to other nodes",
}
EPILOG = f"""\
{arguments.KNOWN}{arguments.OVERRIDES}
examples:
  dualres plan moe-7b dar-block --gpus 8 --gpu-memory 80
  dualres plan moe-7b dar-block --gpus 8 --gpu-memory 80 --set train.parallel.tensor=2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_experiment(parser)
    parser.add_argument("--gpus", metavar="N", type=int, required=True, help="how many there are")
    parser.add_argument("--gpu-memory", metavar="GIB", type=float, required=True, help="of each")
    parser.add_argument("--node-size", metavar="M", type=int, default=8, help="GPUs that share fast links (default 8)")
    assumed = parser.add_argument_group("what is assumed of the hardware (defaults: an H100 SXM's data sheet)")
    for field, what in ASSUMED.items():
        option, default = f"--{field.replace('_', '-')}", Hardware._field_defaults[field]
        assumed.add_argument(option, metavar="X", type=float, default=default, help=f"{what} (default {default:g})")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(given: argparse.Namespace) -> int:
    from dualres.plan.plan import as_data, as_text

    progress = Progress(quiet=given.json)
    try:
        made = make_plan(given, progress.show)
    finally:
        progress.end()
    print(json.dumps(as_data(made), indent=2) if given.json else as_text(made, f"{given.scale} × {given.residual}"))
    fits = made.estimate.fits(made.hardware)
    if not fits:
        print("dualres: it does not fit", file=sys.stderr)
    return 0 if fits else 1


def make_plan(given: argparse.Namespace, show: Show) -> "Plan":
    """The plan that the arguments ask for."""
    from dualres.plan.estimate import MeshEstimate, estimate
    from dualres.plan.plan import Plan
    from dualres.plan.search import check_memory, choose
    from dualres.train.engines.build import engine_mesh, engine_name
    from dualres.train.preflight import USED_BY_ENGINE

    hardware = hardware_of(given)
    config = load_config(given.scale, given.residual, given.set)
    engine = engine_name(config, given.gpus)
    said = parse_overrides(given.set).get("train", {})
    chosen = engine in ("single", "fsdp2") and not USED_BY_ENGINE["fsdp2"] & set(said.get("parallel", {}))
    if chosen:
        config = choose(config, given.gpus, hardware, {"micro_batch", "recompute"} & set(said), show).config
    mesh = engine_mesh(config, given.gpus)
    if config.train.global_batch < config.train.micro_batch * mesh.data:
        raise ConfigError(
            f"train.global_batch={config.train.global_batch} has fewer micro-batches of "
            f"{config.train.micro_batch} than the {mesh.data} data-parallel ranks of {mesh.describe()}: use "
            f"--set train.global_batch={config.train.micro_batch * mesh.data} or more, or a larger tensor or pipeline"
        )
    columns: dict[str, MeshEstimate | str] = {}
    for name in dict.fromkeys((*BESIDE, given.residual)):
        show(f"{mesh.describe()}: {name}")
        is_own = name == given.residual
        # --set residual.… belongs to the RESIDUAL of the command only.
        overrides = [override for override in given.set if is_own or not override.startswith("residual.")]
        residual = load_config(given.scale, name, overrides).residual
        default = config.residual.default_branches_per_block  # belongs to the scale, not to the method
        residual = dataclasses.replace(residual, default_branches_per_block=default)
        try:
            other = dataclasses.replace(config, residual=residual)
            columns[name] = estimate(other, engine, engine_mesh(other, given.gpus), hardware)
        except ConfigError as error:
            if is_own:
                raise
            columns[name] = str(error)
    own = columns[given.residual]
    assert isinstance(own, MeshEstimate)  # else it was refused
    overrides = [*given.set, *_settings(config, engine, given.set)]
    size = {"processes": given.gpus, "node_size": given.node_size}
    line = launch_command(given.scale, given.residual, overrides, **size)
    return Plan(given.residual, columns, hardware, chosen, [check_memory(own, hardware)], line)


def hardware_of(given: argparse.Namespace) -> Hardware:
    """The options as hardware, if they are possible."""
    options = ("gpus", "gpu_memory", "node_size", *ASSUMED)
    arguments.check_positive(given, *options)
    for option in options:
        if not CREDIBLE[0] <= getattr(given, option) <= CREDIBLE[1]:
            raise ConfigError(
                f"--{option.replace('_', '-')} {getattr(given, option):g} is true of no hardware: use a number between "
                "1e-9 and 1e30"
            )
    if given.utilization > 1:
        raise ConfigError(f"--utilization {given.utilization:g} is above 1, the whole peak: use 0.5, say")
    if given.gpus > MOST_GPUS:
        raise ConfigError(f"--gpus {given.gpus} are more than a plan is made for: use at most {MOST_GPUS:,}")
    if given.gpus > given.node_size and given.gpus % given.node_size:
        raise ConfigError(
            f"--gpus {given.gpus} are no whole nodes of --node-size {given.node_size}: use "
            f"{given.gpus // given.node_size * given.node_size}, or another --node-size"
        )
    fields = {field: getattr(given, field) for field in ASSUMED}
    return Hardware(memory=given.gpu_memory * GIB, node_size=given.node_size, **fields)


def _settings(config: Config, engine: str, given: Sequence[str]) -> list[str]:
    """Overrides for all that the plan has settled and the user has not."""
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
    named = {override.partition("=")[0] for override in given}
    return [f"{key}={value}" for key, value in settings.items() if key not in named]
