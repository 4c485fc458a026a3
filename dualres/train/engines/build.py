"""Builds the engine that a config selects."""

import functools
from collections.abc import Sequence
from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from dualres.config.schema import Config, TrainConfig
from dualres.model.block import compile_blocks, recompute_blocks
from dualres.model.decoder import Decoder, Vocabulary, build_decoder, reset_part
from dualres.model.loss import CrossEntropy, Objective
from dualres.parallel.experts import distribute_experts
from dualres.parallel.mesh import Groups, Mesh, chunk_sizes, make_groups, mesh_of
from dualres.parallel.pipeline import PipelineChunk, drop_unused, make_chunks
from dualres.parallel.tensor import shard_branches, shard_vocabulary, vocabulary_loss
from dualres.train.engines.base import Engine, TorchEngine
from dualres.train.engines.deepspeed import DeepSpeedEngine
from dualres.train.engines.fsdp import PipelineEngine, ShardedEngine, dimensions
from dualres.train.process_group import World
from dualres.util.errors import TrainError


def engine_name(config: Config, processes: int) -> str:
    """The engine that `train.engine` selects for this many processes."""
    name = config.train.engine
    if name == "auto":
        return "single" if processes == 1 else "fsdp2"
    if name == "single" and processes > 1:
        raise TrainError(f"train.engine=single cannot run {processes} processes: use ddp, fsdp2 or deepspeed")
    if name != "single" and processes == 1:
        raise TrainError(
            f"train.engine={name} needs several processes: use torchrun --nproc-per-node 2 -m dualres train …, "
            "or use train.engine=single"
        )
    if name == "deepspeed" and config.train.parallel.zero_stage == 0:
        raise TrainError("train.engine=deepspeed with train.parallel.zero_stage=0 shards nothing: use 1, 2 or 3")
    return name


def engine_mesh(config: Config, processes: int) -> Mesh:
    """The mesh of `processes` processes. Raises if the model cannot be sharded over it."""
    fsdp2 = processes > 1 and config.train.engine in ("auto", "fsdp2")
    return mesh_of(config, processes) if fsdp2 else Mesh(data=processes)


def build_engine(config: Config, world: World, end_of_text: int) -> Engine:
    """The engine of `config`, with a newly initialized model."""
    name = engine_name(config, world.size)
    if name == "fsdp2":
        return _fsdp2(config, world, end_of_text)
    decoder = build_decoder(config.model, config.residual, device=world.device, seed=config.train.seed)
    objective = _objective(config, decoder, end_of_text, Mesh(data=world.size))
    if name == "deepspeed":
        return DeepSpeedEngine(config, world, objective)
    if config.train.precision == "bf16":  # FSDP2 and DeepSpeed cast by their own settings
        objective.forward = torch.autocast(world.device.type, torch.bfloat16)(objective.forward)  # type: ignore[method-assign]
    if name == "single":
        return TorchEngine(config.train, world, objective, objective)
    devices = [world.device] if world.device.type == "cuda" else None
    return TorchEngine(config.train, world, objective, DistributedDataParallel(objective, devices))


def compile_mode(train: TrainConfig, mesh: Mesh) -> str:
    """PyTorch's mode for `train.compile`: a pipeline has several micro-batches in flight, and CUDA graphs would
    overwrite the outputs of one with those of the next.
    """
    return "max-autotune-no-cudagraphs" if train.compile == "max-autotune" and mesh.pipeline > 1 else train.compile


def _objective(
    config: Config, decoder: Decoder, end_of_text: int, mesh: Mesh, cross_entropy: CrossEntropy | None = None
) -> Objective:
    train = config.train
    recompute_blocks(decoder.stack, train.recompute)
    if train.compile != "off":
        compile_blocks(decoder.stack, mode=compile_mode(train, mesh))
    return Objective(decoder, train.loss_rows, end_of_text if train.documents == "isolate" else None, cross_entropy)


def _fsdp2(config: Config, world: World, end_of_text: int) -> Engine:
    """Blocks are the units; each is initialized and sharded in turn, so that no rank ever holds the full model."""
    mesh = mesh_of(config, world.size)
    groups = make_groups(mesh, world.device.type)
    decoder = build_decoder(config.model, config.residual, device="meta")
    cross_entropy = functools.partial(vocabulary_loss, groups.tensor) if mesh.tensor > 1 else None
    objective = _objective(config, decoder, end_of_text, mesh, cross_entropy)
    if mesh.pipeline == 1:
        _shard_units(config, world, groups, decoder, [*decoder.stack, objective])
        return ShardedEngine(config, world, objective, groups)
    chunks = make_chunks(objective, chunk_sizes(config, mesh), mesh.pipeline, groups.stage)
    for chunk in chunks.values():
        _shard_units(config, world, groups, decoder, [*cast(Sequence[nn.Module], chunk.blocks), chunk])
    return PipelineEngine(config, world, objective, groups, chunks)


def _shard_units(config: Config, world: World, groups: Groups, decoder: Decoder, units: Sequence[nn.Module]) -> None:
    """Initialize and shard `units`; nested units come before the units that contain them."""
    bf16 = config.train.precision == "bf16"
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    names = {id(part): name for part, name in decoder.parts()}
    sizes = groups.sizes
    rest = FSDPMeshInfo(groups.rest, shard_mesh_dim=0)

    def placement(parameter: nn.Parameter) -> Shard | ShardPlacementResult | None:
        """Experts are sharded over the ranks that hold the same experts, along their rows if divisible.

        A vocabulary in unequal ranges is sharded along its width: PyTorch's checkpoints would mix up its rows.
        """
        if "experts" in dimensions(parameter):
            return ShardPlacementResult(Shard(1 if parameter.shape[1] % sizes.rest == 0 else 0), rest)
        rows = isinstance(parameter, DTensor) and parameter.placements == (Shard(0),)
        return Shard(1) if rows and parameter.shape[0] % sizes.tensor else None

    for unit in units:
        for part in unit.modules():
            if id(part) in names and any(p.is_meta for p in part.parameters()):
                part.to_empty(device=world.device)
                reset_part(part, names[id(part)], config.model.init_std, config.train.seed)
                if isinstance(unit, PipelineChunk) and isinstance(part, Vocabulary):
                    drop_unused(part, unit)
                if sizes.tensor > 1:
                    shard_branches(part, groups.tensor)
                    if isinstance(part, Vocabulary):
                        shard_vocabulary(part, groups.tensor)
                if sizes.expert_ranks > 1:
                    distribute_experts(part, groups)
        elsewhere = {p for p in unit.parameters() if p.is_meta}
        fully_shard(
            unit, mesh=groups.data, mp_policy=policy, shard_placement_fn=placement, ignored_params=elsewhere or None
        )
