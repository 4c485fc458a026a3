"""FSDP2 over the data-parallel ranks of a mesh, with tensor, expert and pipeline parallelism of `dualres.parallel`."""
# B batch  T tokens

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dualres.config.schema import Config
from dualres.model.attention import RouterReport
from dualres.model.loss import Objective
from dualres.parallel import gradients
from dualres.parallel.mesh import Groups, chunk_sizes
from dualres.parallel.pipeline import ForwardPipeline, PipelineChunk, Stage, make_schedule, padded_micro_batches
from dualres.train.engines.base import Losses, MicroBatch, TorchEngine
from dualres.train.process_group import World


class ShardedEngine(TorchEngine):
    """Tensor and expert parallelism work inside the model; here their gradients are completed and clipped."""

    def __init__(self, config: Config, world: World, objective: Objective, groups: Groups, tied: Sequence[str] = ()):
        super().__init__(config.train, world, objective, objective)
        self.groups = groups
        self.data_rank, self.data_size = groups.data_rank, groups.sizes.data
        self.roles = gradients.roles(self.parameters, groups, tied)

    def accumulate(self, micro_batches: Sequence[MicroBatch]) -> Losses:
        losses = super().accumulate(micro_batches)
        gradients.finish(self.roles, self.groups)
        return losses

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Drop weights that were gathered before the tensors were loaded."""
        reshard(self.wrapped)

    def clip_gradient(self, limit: float) -> float:
        """By the norm over all ranks of the mesh."""
        norm = math.sqrt(self.world.sum([gradients.squares(self.roles)])[0])
        gradients.clip(self.roles, norm, limit)
        return norm


class PipelineEngine(ShardedEngine):
    """This rank's chunks of the model, run by PyTorch's schedules."""

    def __init__(
        self,
        config: Config,
        world: World,
        objective: Objective,
        groups: Groups,
        tied: Sequence[str],
        chunks: dict[int, PipelineChunk],
    ):
        super().__init__(config, world, objective, groups, tied)
        sizes, train, model = groups.sizes, config.train, config.model
        shape = train.micro_batch, model.context // sizes.tensor, model.width
        dtype = torch.bfloat16 if train.precision == "bf16" else torch.get_default_dtype()

        def state(number: int) -> Tensor:
            streams = () if number == 0 else (objective.decoder.stack.streams,)
            return torch.empty(*streams, *shape, dtype=dtype, device="meta", requires_grad=True)

        self.layers, self.last = model.layers, len(chunk_sizes(config, sizes)) - 1
        self.arriving = {
            c: [state(s) for s in chunk.arriving.sent] if chunk.arriving else [] for c, chunk in chunks.items()
        }
        loss = torch.empty((), device="meta", requires_grad=True)
        self.stages = [
            Stage(
                chunk,
                c,
                self.last + 1,
                world.device,
                input_args=tuple(self.arriving[c]),
                output_args=tuple(state(s) for s in chunk.leaving.sent) if chunk.leaving else (loss,),
                group=groups.pipeline.get_group(),
            )
            for c, chunk in chunks.items()
        ]
        self.relay = ForwardPipeline(self.stages, self.arriving, groups.pipeline.get_group())
        self.schedule: Any = None

    def accumulate(self, micro_batches: Sequence[MicroBatch]) -> Losses:
        """The schedule runs all micro-batches, padded with zero-weight ones if it needs more."""
        sizes = self.groups.sizes
        count = padded_micro_batches(len(micro_batches), sizes.pipeline, sizes.virtual)
        padding = [MicroBatch(micro_batches[0].sequences, 0.0)] * (count - len(micro_batches))
        given = [*micro_batches, *padding]
        if self.schedule is None:
            self.schedule = make_schedule(self.stages, count, lambda loss, weight: loss * weight.squeeze())
        reports = {number: RouterReport(scale=micro.weight) for number, micro in enumerate(given)}
        losses: list[Tensor] = []
        self.schedule.step(
            target=torch.tensor([micro.weight for micro in given], device=self.world.device),
            losses=losses,
            return_outputs=False,
            sequences=torch.cat([micro.sequences for micro in given]).to(self.world.device),
            number=torch.arange(count),
            reports=reports,
        )
        gradients.finish(self.roles, self.groups)
        router = sum(
            micro.weight * float(sum(reports[number].losses.values())) / self.layers
            for number, micro in enumerate(given)
        )
        return Losses(float(sum(loss.detach() for loss in losses)) * sizes.pipeline, router * sizes.pipeline)

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        for stage in self.stages:
            reshard(stage.submod)

    @torch.no_grad()
    def evaluate(self, sequences: Tensor) -> float:
        """The last stage has the loss and the others return 0: the mean over the pipeline is the loss."""
        loss = self.relay.run(sequences.to(self.world.device), self.world.device)
        for stage in self.stages:
            reshard(stage.submod)
        return 0.0 if loss is None else loss.item() * self.groups.sizes.pipeline


def reshard(module: nn.Module) -> None:
    """Free the gathered weights."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
