"""FSDP2 over the data-parallel ranks of a mesh, with tensor, expert and pipeline parallelism of `dualres.parallel`."""
# B batch  T tokens  D width  J streams

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dualres.config.schema import Config
from dualres.model.attention import RouterReport
from dualres.model.loss import Objective
from dualres.parallel.gradients import MeshGradients
from dualres.parallel.mesh import Groups, chunk_sizes
from dualres.parallel.pipeline import Boundary, PipelineChunk, Stage, make_schedule, padded_micro_batches
from dualres.train.engines.base import Losses, MicroBatch, TorchEngine
from dualres.train.process_group import World


class ShardedEngine(TorchEngine):
    """Completes and clips the gradients of tensor and expert parallelism, which work inside the model."""

    def __init__(self, config: Config, world: World, objective: Objective, groups: Groups, tied: Sequence[str] = ()):
        super().__init__(config.train, world, objective, objective)
        self.groups = groups
        self.data_rank, self.data_size = groups.data.get_local_rank(), groups.sizes.data
        self.gradients = MeshGradients(self.parameters, groups, tied)

    def accumulate(self, micro_batches: Sequence[MicroBatch]) -> Losses:
        losses = super().accumulate(micro_batches)
        self.gradients.finish()
        return losses

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Drop weights that were gathered before loading."""
        reshard(self.wrapped)

    def clip_gradient(self, limit: float) -> float:
        """Clip by the norm over all ranks of the mesh."""
        norm = math.sqrt(self.sum_over_ranks([self.gradients.squares()])[0])
        self.gradients.clip(norm, limit)
        return norm


class PipelineEngine(ShardedEngine):
    """Runs this rank's chunks of the model by PyTorch's schedules."""

    def __init__(
        self, config: Config, world: World, objective: Objective, groups: Groups, chunks: dict[int, PipelineChunk]
    ):
        at_an_end = any(chunk.arriving is None or chunk.leaving is None for chunk in chunks.values())
        vocabulary = [f"vocabulary.{name}" for name, _ in objective.decoder.vocabulary.named_parameters()]
        tied = vocabulary if config.model.tied_embeddings and at_an_end else ()
        super().__init__(config, world, objective, groups, tied)
        self.layers = config.model.layers
        self.group = groups.pipeline.get_group()
        self.shape = config.model.context // groups.sizes.tensor, config.model.width
        self.dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.get_default_dtype()

        def states(between: Boundary | None) -> tuple[Tensor, ...]:
            numbers = between.sent if between is not None else ()
            return tuple(self._state(s, config.train.micro_batch, "meta").requires_grad_() for s in numbers)

        loss, count = torch.empty((), device="meta", requires_grad=True), len(chunk_sizes(config, groups.sizes))
        self.stages = [
            Stage(
                chunk,
                c,
                count,
                world.device,
                input_args=states(chunk.arriving),
                output_args=states(chunk.leaving) or (loss,),
                group=self.group,
            )
            for c, chunk in chunks.items()
        ]
        self.schedule: Any = None

    def _state(self, number: int, rows: int, device: torch.device | str) -> Tensor:
        """Uninitialized memory for a state, (J,B,T,D), or (B,T,D) for H_0."""
        streams = () if number == 0 else (self.decoder.stack.streams,)
        return torch.empty(*streams, rows, *self.shape, dtype=self.dtype, device=device)

    def accumulate(self, micro_batches: Sequence[MicroBatch]) -> Losses:
        """The schedule runs all micro-batches, padded with zero-weight ones if it needs more."""
        sizes = self.groups.sizes
        count = padded_micro_batches(len(micro_batches), sizes.pipeline, sizes.virtual)
        padding = [MicroBatch(micro_batches[0].sequences, 0.0)] * (count - len(micro_batches))
        batches = [*micro_batches, *padding]
        if self.schedule is None:
            self.schedule = make_schedule(self.stages, count, lambda loss, weight: loss * weight.squeeze())
        reports = {number: RouterReport(scale=micro.weight) for number, micro in enumerate(batches)}
        losses: list[Tensor] = []
        self.schedule.step(
            target=torch.tensor([micro.weight for micro in batches], device=self.world.device),
            losses=losses,
            return_outputs=False,
            sequences=torch.cat([micro.sequences for micro in batches]).to(self.world.device),
            number=torch.arange(count),
            reports=reports,
        )
        self.gradients.finish()
        router = sum(
            micro.weight * float(sum(reports[number].losses.values())) / self.layers
            for number, micro in enumerate(batches)
        )
        return Losses(float(sum(loss.detach() for loss in losses)) * sizes.pipeline, router * sizes.pipeline)

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        for stage in self.stages:
            reshard(stage.submod)

    @torch.no_grad()
    def evaluate(self, sequences: Tensor) -> float:
        """The last stage has the loss and the others return 0: the mean over the pipeline is the loss."""
        loss, device, ranks, here = 0.0, self.world.device, self.groups.sizes.pipeline, self.groups.stage
        sequences = sequences.to(device)
        for stage in self.stages:
            chunk, received = cast(PipelineChunk, stage.submod), []
            for number in chunk.arriving.sent if chunk.arriving is not None else ():
                received.append(self._state(number, len(sequences), device))
                dist.recv(received[-1], group=self.group, group_src=(here - 1) % ranks)
            out = chunk(*received, sequences=sequences, number=torch.tensor(-1), reports={})
            if chunk.leaving is None:
                loss = out.item() * ranks
            else:
                for state in out:
                    dist.send(state.contiguous(), group=self.group, group_dst=(here + 1) % ranks)
            reshard(chunk)
        return loss


def reshard(module: nn.Module) -> None:
    """Free the gathered weights."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
