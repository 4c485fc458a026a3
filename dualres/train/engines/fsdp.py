"""The native engine on a mesh: FSDP2 over the data-parallel ranks, with what `dualres.parallel` cuts besides."""
# B batch  T tokens

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dualres.config.schema import Config
from dualres.model.context import RouterReport
from dualres.model.loss import Objective
from dualres.parallel import gradients
from dualres.parallel.mesh import Groups, chunk_sizes
from dualres.parallel.pipeline import ForwardPipeline, PipelineChunk, Stage, make_schedule, padded_micro_batches
from dualres.train.engines.base import Losses, MicroBatch, TorchEngine
from dualres.train.process_group import World


class ShardedEngine(TorchEngine):
    """Tensor groups and expert ranks work inside the model; here their gradients are finished and counted."""

    def __init__(self, config: Config, world: World, objective: Objective, groups: Groups, tied: Sequence[str] = ()):
        super().__init__(config.train, world, objective, objective)
        self.groups = groups
        self.data_rank, self.data_size = groups.data_rank, groups.sizes.data
        self.roles = gradients.roles(self.parameters, groups, tied)

    def accumulate(self, micro_batches: Sequence[MicroBatch]) -> Losses:
        """One after the other."""
        losses = super().accumulate(micro_batches)
        gradients.finish(self.roles, self.groups)
        return losses

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The tensors are the engine's own; what was gathered of them before is old."""
        reshard(self.wrapped)

    def clip_gradient(self, limit: float) -> float:
        """Over all ranks of the mesh."""
        norm = math.sqrt(self.world.sum([gradients.squares(self.roles)])[0])
        gradients.clip(self.roles, norm, limit)
        return norm


class PipelineEngine(ShardedEngine):
    """A rank's chunks of the model, and PyTorch's schedule that runs them."""

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
        """All of them on their way at a time; a schedule that needs more gets some that count for nothing."""
        sizes = self.groups.sizes
        count = padded_micro_batches(len(micro_batches), sizes.pipeline, sizes.virtual)
        filling = [MicroBatch(micro_batches[0].sequences, 0.0)] * (count - len(micro_batches))
        given = [*micro_batches, *filling]
        if self.schedule is None:
            self.schedule = make_schedule(self.stages, count, lambda loss, share: loss * share.squeeze())
        reports = {number: RouterReport(scale=micro.share) for number, micro in enumerate(given)}
        losses: list[Tensor] = []
        self.schedule.step(
            target=torch.tensor([micro.share for micro in given], device=self.world.device),
            losses=losses,
            return_outputs=False,
            sequences=torch.cat([micro.sequences for micro in given]).to(self.world.device),
            number=torch.arange(count),
            reports=reports,
        )
        gradients.finish(self.roles, self.groups)
        router = sum(
            micro.share * float(sum(reports[number].losses.values())) / self.layers
            for number, micro in enumerate(given)
        )
        return Losses(float(sum(loss.detach() for loss in losses)) * sizes.pipeline, router * sizes.pipeline)

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """As of one without a pipeline."""
        for stage in self.stages:
            reshard(stage.submod)

    @torch.no_grad()
    def evaluate(self, sequences: Tensor) -> float:
        """The last rank has the loss; the others count as 0, so that the mean over the pipeline is it."""
        loss = self.relay.run(sequences.to(self.world.device), self.world.device)
        for stage in self.stages:
            reshard(stage.submod)
        return 0.0 if loss is None else loss.item() * self.groups.sizes.pipeline


def reshard(module: nn.Module) -> None:
    """Give back the gathered weights."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
