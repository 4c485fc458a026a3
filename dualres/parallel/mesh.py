"""The mesh of a run: how many ranks each parallel dimension has, and whether the model can be sharded that way.

    processes = pipeline · data · tensor,    data = rest · expert

`tensor` varies fastest in a rank's number, then `expert`, `rest`, `pipeline`: the ranks that communicate most are
closest. Every rank of a tensor group has a part of the sequence; whole experts are distributed over `expert` · `tensor`
ranks, so that no rank holds a slice of one.
"""

from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dualres.config.schema import Config, ConfigError
from dualres.config.validation import choices, divides, divisors
from dualres.residual.registry import places


class Mesh(NamedTuple):
    """The number of ranks in every parallel dimension."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1  # divides `data`
    virtual: int = 1  # chunks of blocks on each pipeline rank

    @property
    def processes(self) -> int:
        return self.data * self.tensor * self.pipeline

    @property
    def rest(self) -> int:
        """Data-parallel ranks that hold the same experts."""
        return self.data // self.expert

    @property
    def expert_ranks(self) -> int:
        """Ranks over which the experts of a layer are distributed."""
        return self.expert * self.tensor

    def describe(self) -> str:
        """A short form such as `dp4·tp2/ep4`, or `dp2·pp2×3` with three chunks on each rank."""
        virtual = f"×{self.virtual}" if self.virtual > 1 else ""
        dimensions = [("dp", self.data, ""), ("tp", self.tensor, ""), ("pp", self.pipeline, virtual)]
        text = "·".join(f"{name}{size}{suffix}" for name, size, suffix in dimensions if size > 1) or "dp1"
        return f"{text}/ep{self.expert}" if self.expert > 1 else text


def mesh_of(config: Config, processes: int) -> Mesh:
    """The mesh of `train.parallel` for `processes` processes. Raises if it is impossible."""
    parallel = config.train.parallel
    shared = parallel.tensor * parallel.pipeline
    if processes % shared:
        low = processes // shared * shared
        raise ConfigError(
            f"train.parallel.tensor={parallel.tensor} × pipeline={parallel.pipeline} = {shared} does not divide "
            f"{processes} {'process' if processes == 1 else 'processes'}: start "
            f"{' or '.join(str(n) for n in (low, low + shared) if n)}, or change tensor or pipeline"
        )
    data = processes // shared
    mesh = Mesh(data, parallel.tensor, parallel.pipeline, parallel.expert, parallel.virtual_stages)
    check_mesh(config, mesh)
    return mesh


def check_mesh(config: Config, mesh: Mesh) -> None:
    """Reject a model that cannot be sharded over the mesh, before any process group starts."""
    model, parallel = config.model, config.train.parallel
    if parallel.context > 1:
        raise ConfigError(
            f"train.parallel.context={parallel.context}: context parallelism is not implemented; use 1, and tensor "
            "with sequence_parallel for long sequences"
        )
    if mesh.tensor > 1:
        if not parallel.sequence_parallel:
            raise ConfigError(
                f"train.parallel.tensor={mesh.tensor} with sequence_parallel=false would replicate every residual "
                "stream on every rank: set train.parallel.sequence_parallel=true"
            )
        wholes = {"model.heads": model.heads, "model.kv_heads": model.kv_heads, "model.context": model.context}
        if model.ffn_width is not None:
            wholes["model.ffn_width"] = model.ffn_width
        divides("train.parallel.tensor", mesh.tensor, wholes)
        if -(-model.vocab_size // mesh.tensor) * (mesh.tensor - 1) >= model.vocab_size:
            raise ConfigError(
                f"model.vocab_size={model.vocab_size} is too small to give each of train.parallel.tensor={mesh.tensor} "
                "ranks a range of tokens: use a smaller tensor"
            )
        width = model.embedding_width or model.width
        if model.vocab_size % mesh.tensor and width % mesh.data:
            raise ConfigError(
                f"model.vocab_size={model.vocab_size} is not divisible by train.parallel.tensor={mesh.tensor}, and its "
                f"width {width} not by the {mesh.data} data-parallel ranks: use model.vocab_size="
                f"{-(-model.vocab_size // mesh.tensor) * mesh.tensor} (no token uses the added rows)"
            )
    if model.moe is not None:
        _check_experts(model.moe.experts, mesh)
    if mesh.pipeline == 1 and mesh.virtual > 1:
        raise ConfigError(
            f"train.parallel.virtual_stages={mesh.virtual} needs a pipeline: set train.parallel.pipeline, or use 1"
        )
    blocks = block_count(config)
    if mesh.pipeline * mesh.virtual > blocks:
        raise ConfigError(
            f"train.parallel.pipeline={mesh.pipeline} × virtual_stages={mesh.virtual} = "
            f"{mesh.pipeline * mesh.virtual} chunks exceed the {blocks} blocks of {config.residual.method}, and "
            f"chunks consist of whole blocks: use at most {blocks} chunks, or a smaller residual.branches_per_block"
        )
    if config.analyze.every is not None and mesh.tensor * mesh.pipeline > 1:
        raise ConfigError(
            f"analyze.every={config.analyze.every} needs whole sequences and the whole model, which {mesh.describe()} "
            "shards: remove it, and run dualres analyze on the checkpoints"
        )


def _check_experts(experts: int, mesh: Mesh) -> None:
    fitting = [n for n in divisors(mesh.data) if experts % (n * mesh.tensor) == 0]
    remedy = f"use expert {choices(fitting)}" if fitting else "use a smaller tensor"
    if mesh.data % mesh.expert:
        raise ConfigError(
            f"train.parallel.expert={mesh.expert} does not divide the {mesh.data} data-parallel ranks of "
            f"{mesh.processes} processes / tensor {mesh.tensor} / pipeline {mesh.pipeline}: {remedy}, or "
            f"{mesh.expert * mesh.tensor * mesh.pipeline} processes"
        )
    if experts % mesh.expert_ranks:
        raise ConfigError(
            f"model.moe.experts={experts} is not divisible by train.parallel.expert={mesh.expert} × "
            f"tensor={mesh.tensor} = {mesh.expert_ranks} ranks: {remedy}"
        )


def block_count(config: Config) -> int:
    """N, the number of residual blocks of the model."""
    return len(places(2 * config.model.layers, config.residual))


def chunk_sizes(config: Config, mesh: Mesh) -> list[int]:
    """The number of blocks in each chunk of the pipeline; chunk c is on pipeline rank c mod P."""
    return even_chunks(block_count(config), mesh.pipeline * mesh.virtual)


def even_chunks(blocks: int, chunks: int) -> list[int]:
    """Chunk sizes as even as possible, larger ones first: the last chunk also has the vocabulary's output."""
    size, remainder = divmod(blocks, chunks)
    return [size + (number < remainder) for number in range(chunks)]


class Groups(NamedTuple):
    """This rank's device mesh for each dimension."""

    sizes: Mesh
    data: DeviceMesh
    rest: DeviceMesh
    experts: DeviceMesh  # expert · tensor
    tensor: DeviceMesh
    pipeline: DeviceMesh
    ends: dist.ProcessGroup | None  # the first and the last rank of this rank's pipeline

    @property
    def stage(self) -> int:
        return self.pipeline.get_local_rank()


def make_groups(mesh: Mesh, device: str) -> Groups:
    """Create the process groups. All ranks call it together."""
    assert dist.get_world_size() == mesh.processes
    names = ("pipeline", "rest", "expert", "tensor")
    root = init_device_mesh(device, (mesh.pipeline, mesh.rest, mesh.expert, mesh.tensor), mesh_dim_names=names)
    data = root["rest", "expert"]._flatten("data")
    experts = root["expert", "tensor"]._flatten("experts")
    ends = None
    if mesh.pipeline > 1:
        pairs = root.mesh[[0, -1]].flatten(1).T.tolist()
        ends, _ = dist.new_subgroups_by_enumeration(pairs)
    return Groups(mesh, data, root["rest"], experts, root["tensor"], root["pipeline"], ends)
