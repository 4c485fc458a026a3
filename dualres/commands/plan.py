"""`dualres plan`: a mesh of GPUs for a model, and what it costs on it."""

import argparse
import dataclasses
import json
import math
import sys
from typing import TYPE_CHECKING, Any, Literal

from dualres.commands import arguments
from dualres.config.loading import load_config, overridden
from dualres.config.schema import Config, ConfigError
from dualres.plan.hardware import GIB, Hardware
from dualres.util.progress import Progress, Show

if TYPE_CHECKING:
    from dualres.plan import mesh_plan

BESIDE = ("standard", "attnres-block", "dar-block")
MOST_GPUS = 1_000_000
CREDIBLE = 1e-9, 1e30  # numbers of hardware, in whatever unit
OPTIONS = {  # field of Hardware -> option and what it is
    "peak_flops": ("--peak-flops", "of a GPU, in the precision of the products"),
    "utilisation": ("--utilisation", "share of them that products reach"),
    "memory_bandwidth": ("--memory-bandwidth", "bytes per second of a GPU's own memory"),
    "node_bandwidth": ("--node-bandwidth", "bytes per second of a GPU to its node"),
    "network_bandwidth": ("--network-bandwidth", "bytes per second of a GPU to other nodes"),
}


def add(commands: Any) -> None:
    """Declare it."""
    sub = arguments.command(
        commands,
        "plan",
        "choose or check a mesh of GPUs: memory, communication, speed",
        "Plan the training of SCALE on RESIDUAL over N GPUs, beside standard, attnres-block and dar-block on the\n"
        "same mesh. Without --set train.parallel.… it chooses the fastest mesh that fits, with it, it checks that.\n"
        "Nothing is started, no GPU is needed, and what it prints is a model that no GPU has confirmed.\n"
        "Exits with 1 if a mesh that was given does not fit.",
        f"{arguments.known()}{arguments.OVERRIDES}\n"
        "examples:\n"
        "  dualres plan moe-7b dar-block --gpus 8 --gpu-memory 80\n"
        "  dualres plan moe-7b dar-block --gpus 8 --gpu-memory 80 --set train.parallel.tensor=2",
    )
    arguments.experiment(sub)
    sub.add_argument("--gpus", metavar="N", type=int, required=True, help="how many there are")
    sub.add_argument("--gpu-memory", metavar="GIB", type=float, required=True, help="of each")
    sub.add_argument("--node-size", metavar="M", type=int, default=8, help="GPUs that share fast links (default 8)")
    assumed = sub.add_argument_group("what is assumed of the hardware (defaults: an H100 SXM's data sheet)")
    for field, (option, what) in OPTIONS.items():
        default = Hardware._field_defaults[field]
        assumed.add_argument(option, metavar="X", type=float, default=default, help=f"{what} (default {default:g})")
    sub.add_argument("--json", action="store_true", help="print JSON instead of text")
    sub.set_defaults(command=_plan)


def _plan(given: argparse.Namespace) -> int:
    from dualres.plan import mesh_plan

    progress = Progress(quiet=given.json)
    try:
        made = made_for(given, progress.show)
    finally:
        progress.end()
    if given.json:
        print(json.dumps(mesh_plan.as_data(made), indent=2))
    else:
        print(mesh_plan.as_text(made, f"{given.scale} × {given.residual}"))
    if not made.fits:
        print("dualres: it does not fit so", file=sys.stderr)
    return 0 if made.fits else 1


def made_for(given: argparse.Namespace, show: Show) -> "mesh_plan.Plan":
    """The plan that the arguments ask for."""
    from dualres.parallel.mesh import mesh_of
    from dualres.plan import mesh_plan
    from dualres.plan.search import Fixed, choose
    from dualres.train.preflight import USED_BY_ENGINE

    hardware = hardware_of(given)
    config = load_config(given.scale, given.residual, given.set)
    engine: Literal["fsdp2", "single"] = "fsdp2" if given.gpus > 1 else "single"
    if config.train.engine not in ("auto", engine):
        raise ConfigError(
            f"train.engine={config.train.engine} is not what a plan for {given.gpus} "
            f"{'GPU' if given.gpus == 1 else 'GPUs'} starts: use --set train.engine={engine}; "
            f"dualres train --dry-run plans the other engines"
        )
    said = overridden(given.set).get("train", {})
    chosen = not USED_BY_ENGINE["fsdp2"] & set(said.get("parallel", {}))
    if chosen:
        fixed = Fixed("micro_batch" in said, "recompute" in said)
        config = choose(config, given.gpus, hardware, fixed, show).config
    else:
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, engine=engine))
    mesh = mesh_of(config, given.gpus)
    if config.train.global_batch < config.train.micro_batch * mesh.data:
        raise ConfigError(
            f"train.global_batch={config.train.global_batch} has fewer micro-batches of "
            f"{config.train.micro_batch} than the {mesh.data} data-parallel ranks of {mesh.describe()}: use "
            f"--set train.global_batch={config.train.micro_batch * mesh.data} or more, or a larger tensor or pipeline"
        )
    names = [*BESIDE, *([given.residual] if given.residual not in BESIDE else [])]
    columns = []
    for name in names:
        show(f"{mesh.describe()}: {name}")
        columns.append(column(config, given, name, hardware))
    line = mesh_plan.launch(given.scale, given.residual, config, given.set, mesh, hardware)
    return mesh_plan.Plan(given.residual, config, mesh, hardware, chosen, columns, line)


def hardware_of(given: argparse.Namespace) -> Hardware:
    """The options, which must be positive numbers."""
    options = {"--gpus": given.gpus, "--gpu-memory": given.gpu_memory, "--node-size": given.node_size}
    options |= {option: getattr(given, field) for field, (option, _) in OPTIONS.items()}
    for option, value in options.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"{option} {value} is not positive and finite: use a number above 0")
        if not CREDIBLE[0] <= value <= CREDIBLE[1]:
            raise ConfigError(f"{option} {value:g} is true of no hardware: use a number between 1e-9 and 1e30")
    if given.utilisation > 1:
        raise ConfigError(f"--utilisation {given.utilisation:g} is above 1, the whole peak: use 0.5, say")
    if given.gpus > MOST_GPUS:
        raise ConfigError(f"--gpus {given.gpus} are more than a plan is made for: use at most {MOST_GPUS:,}")
    if given.gpus > given.node_size and given.gpus % given.node_size:
        raise ConfigError(
            f"--gpus {given.gpus} are no whole nodes of --node-size {given.node_size}: use "
            f"{given.gpus // given.node_size * given.node_size}, or another --node-size"
        )
    fields = {field: getattr(given, field) for field in OPTIONS}
    return Hardware(memory=given.gpu_memory * GIB, node_size=given.node_size, **fields)


def column(config: Config, given: argparse.Namespace, name: str, hardware: Hardware) -> "mesh_plan.Column":
    """A residual on the mesh of `config`. A key of the other one's own, --set residual.…, is not for it."""
    from dualres.parallel.mesh import mesh_of
    from dualres.plan import mesh_plan
    from dualres.plan.estimate import engine_of, estimate

    overrides = given.set if name == given.residual else [key for key in given.set if not key.startswith("residual.")]
    residual = load_config(given.scale, name, overrides).residual
    try:
        other = dataclasses.replace(config, residual=residual)
        mesh = mesh_of(other, given.gpus)
    except ConfigError as error:
        if name == given.residual:
            raise
        return mesh_plan.Column(name, None, str(error))
    assert engine_of(mesh) == config.train.engine
    return mesh_plan.Column(name, estimate(other, mesh, hardware))
