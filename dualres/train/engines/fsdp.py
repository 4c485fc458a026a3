"""FSDP2 over the data-parallel ranks of a mesh, with tensor, expert and pipeline parallelism of `dualres.parallel`."""
# B batch  T tokens  D width  J streams

import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dualres.config.schema import Config
from dualres.model.attention import RouterReport
from dualres.model.loss import Objective
from dualres.parallel.mesh import Groups, chunk_sizes
from dualres.parallel.pipeline import Boundary, PipelineChunk, Stage, make_schedule, padded_micro_batches
from dualres.train.engines.base import Losses, MicroBatch, TorchEngine
from dualres.train.process_group import World


class ShardedEngine(TorchEngine):
    """Completes the gradients that FSDP2 has averaged over its own ranks, and clips by their norm over the whole mesh.

    A weight replicated over a tensor group has a gradient from each rank's part of the sequences: they are summed over
    the group. Experts have the summed gradient of the tokens of all `expert` ranks: it is divided by their number. A
    tied vocabulary is on the first and last stage of a pipeline: its gradients are summed.
    """

    def __init__(self, config: Config, world: World, objective: Objective, groups: Groups, tied: Sequence[str] = ()):
        super().__init__(config.train, world, objective, objective)
        self.groups = groups
        self.data_rank, self.data_size = groups.data.get_local_rank(), groups.sizes.data
        dims = {name: dimensions(parameter) for name, parameter in self.parameters.items()}
        partial = [p for name, p in self.parameters.items() if not {"tensor", "experts"} & dims[name]]
        self.partial = partial if groups.sizes.tensor > 1 else []  # summed over the tensor group
        self.experts = [p for name, p in self.parameters.items() if "experts" in dims[name]]  # divided by expert ranks
        self.tied = [self.parameters[name] for name in tied]  # summed over the first and the last stage
        # The number of ranks that hold the same shard.
        self.copies = {p: copies(p, groups) * (2 if name in tied else 1) for name, p in self.parameters.items()}

    def accumulate(self, micro_batches: Sequence[MicroBatch]) -> Losses:
        losses = super().accumulate(micro_batches)
        self.finish_gradients()
        return losses

    def finish_gradients(self) -> None:
        """Complete the gradients, after the last micro-batch of a step."""
        if self.partial:
            all_reduce_together(gradients(self.partial), self.groups.tensor.get_group())
        if self.groups.sizes.expert > 1:
            for gradient in gradients(self.experts):
                gradient.div_(self.groups.sizes.expert)
        if self.tied and self.groups.ends is not None:
            all_reduce_together(gradients(self.tied), self.groups.ends)

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Drop weights that were gathered before loading."""
        reshard(self.wrapped)

    def clip_gradient(self, limit: float) -> float:
        """Clip, as `clip_grad_norm_` does, by the norm over all ranks: a shard that several ranks hold counts once."""
        held, squares = [p for p in self.copies if p.grad is not None], 0.0
        if held:
            norms = torch.stack(torch._foreach_norm(gradients(held))).double().cpu()
            squares = (norms.square() / torch.tensor([self.copies[p] for p in held])).sum().item()
        norm = math.sqrt(self.sum_over_ranks([squares])[0])
        factor = limit / (norm + 1e-6)
        if factor < 1:
            torch._foreach_mul_(gradients(self.copies), factor)
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
        self.finish_gradients()
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


def copies(parameter: Tensor, groups: Groups) -> int:
    """The number of ranks of a stage that hold the same shard."""
    if not isinstance(parameter, DTensor):
        return groups.sizes.data * groups.sizes.tensor
    placements = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    replicas = math.prod(size for placement, size in placements if placement.is_replicate())
    return replicas * (1 if {"tensor", "experts"} & dimensions(parameter) else groups.sizes.tensor)


def dimensions(parameter: Tensor) -> set[str]:
    """The mesh dimensions that a parameter is sharded over."""
    return set(parameter.device_mesh.mesh_dim_names or ()) if isinstance(parameter, DTensor) else set()


def gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's shards of the gradients that exist."""
    grads = (p.grad for p in parameters if p.grad is not None)
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]


def all_reduce_together(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """All-reduce tensors in place, in one collective."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
