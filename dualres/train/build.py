"""From a config to an engine: the one place that knows them all."""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from dualres.config import Config
from dualres.model.block import compile_blocks, recompute_blocks
from dualres.model.decoder import Decoder, build_decoder, reset_part
from dualres.train.engine import Engine, TorchEngine
from dualres.train.errors import TrainError
from dualres.train.objective import Objective
from dualres.train.world import World
from dualres.train.zero import DeepSpeedEngine


def engine_name(config: Config, processes: int) -> str:
    """The engine that `train.engine` means for this many processes."""
    name = config.train.engine
    if name == "auto":
        return "single" if processes == 1 else "fsdp2"
    if name == "single" and processes > 1:
        raise TrainError(f"train.engine=single was started as {processes} processes: use ddp, fsdp2 or deepspeed")
    if name != "single" and processes == 1:
        raise TrainError(
            f"train.engine={name} needs processes: start it with torchrun --nproc-per-node 2 -m dualres train …, "
            "or use train.engine=single"
        )
    return name


def build_engine(config: Config, world: World, end_of_text: int) -> Engine:
    """The model of `config` with fresh weights, in the hands of its engine."""
    return ENGINES[engine_name(config, world.size)](config, world, end_of_text)


def _objective(config: Config, decoder: Decoder, end_of_text: int) -> Objective:
    train = config.train
    recompute_blocks(decoder.stack, train.recompute)
    if train.compile != "off":
        compile_blocks(decoder.stack, mode=None if train.compile == "default" else train.compile)
    return Objective(decoder, train.loss_rows, end_of_text if train.documents == "isolate" else None)


def _whole(config: Config, world: World, end_of_text: int) -> Objective:
    """The whole model on every rank."""
    decoder = build_decoder(config.model, config.residual, device=world.device, seed=config.train.seed)
    return _objective(config, decoder, end_of_text)


def _single(config: Config, world: World, end_of_text: int) -> Engine:
    objective = _whole(config, world, end_of_text)
    return TorchEngine(config.train, world, objective, objective)


def _ddp(config: Config, world: World, end_of_text: int) -> Engine:
    objective = _whole(config, world, end_of_text)
    devices = [world.device] if world.device.type == "cuda" else None
    return TorchEngine(config.train, world, objective, DistributedDataParallel(objective, devices))


def _fsdp2(config: Config, world: World, end_of_text: int) -> Engine:
    """Blocks are the units; each is drawn whole, by itself, and cut, so that no rank ever holds the whole model."""
    decoder = build_decoder(config.model, config.residual, device="meta")
    objective = _objective(config, decoder, end_of_text)
    mesh = init_device_mesh(world.device.type, (world.size,))
    bf16 = config.train.precision == "bf16"
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    drawn = {id(part): name for part, name in decoder.parts()}

    def shard(unit: nn.Module) -> None:
        for part in unit.modules():
            if id(part) in drawn and any(p.is_meta for p in part.parameters()):
                part.to_empty(device=world.device)
                reset_part(part, drawn[id(part)], config.model.init_std, config.train.seed)
        fully_shard(unit, mesh=mesh, mp_policy=policy)

    for block in decoder.stack:
        shard(block)
    shard(objective)
    return TorchEngine(config.train, world, objective, objective)


def _deepspeed(config: Config, world: World, end_of_text: int) -> Engine:
    return DeepSpeedEngine(config, world, _whole(config, world, end_of_text))


ENGINES: dict[str, Callable[[Config, World, int], Engine]] = {
    "single": _single,
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "deepspeed": _deepspeed,
}
