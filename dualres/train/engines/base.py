"""Engines hold a model and its optimizer, in one process or many. The loop uses only this interface:

    engine.accumulate(micro_batches)  engine.update(rate, clip)  …  engine.tensors()

Every engine trains float32 weights with the same AdamW and the same tensor names, so that any engine can load the
checkpoints of any other.
"""
# B batch  T tokens

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dualres.config.schema import TrainConfig
from dualres.model.attention import RouterReport
from dualres.model.loss import Objective
from dualres.train.process_group import World
from dualres.train.recipe import adamw, fresh_state


class MicroBatch(NamedTuple):
    """A micro-batch and its weight in the gradient; the weights, averaged over data-parallel ranks, sum to 1.

    Weight 0 pads a batch that the ranks do not divide: it runs, since all ranks must, and contributes nothing.
    """

    sequences: Tensor  # (B,T+1)
    weight: float


class Losses(NamedTuple):
    """A rank's part of a step's losses: the mean over ranks is the batch's."""

    language: float
    router: float  # mean over layers, 1 if routing is uniform; 0 without experts


class Engine(ABC):
    def __init__(self, world: World, objective: Objective, wrapped: nn.Module):
        self.world = world
        self.decoder = objective.decoder
        self.wrapped = wrapped  # the objective, wrapped by the engine: (B,T+1), report -> ()
        self.data_rank, self.data_size = world.rank, world.size  # among the data-parallel ranks

    def accumulate(self, micro_batches: Sequence[MicroBatch]) -> Losses:
        """Forward and backward of all micro-batches of this rank in a step."""
        language = router = 0.0
        for number, (sequences, weight) in enumerate(micro_batches, 1):
            report, last = RouterReport(scale=weight), number == len(micro_batches)
            loss = self.forward_backward(sequences.to(self.world.device), weight, report, last)
            language += weight * loss.item()
            router += weight * (report.mean().item() if report.losses else 0.0)
        return Losses(language, router)

    @abstractmethod
    def forward_backward(self, sequences: Tensor, weight: float, report: RouterReport, last: bool) -> Tensor:
        """Add `weight` times the gradient of a micro-batch; `last` of the step. (B,T+1) -> its loss ()"""

    @abstractmethod
    def update(self, learning_rate: float, clip: float) -> float:
        """Clip the gradient by its norm over all ranks, and step if that is finite. -> the norm before clipping"""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The contents of a checkpoint, by name, `model.…` and `optimizer.…`; sharded if the engine shards."""

    @abstractmethod
    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take over the result of `tensors` after a checkpoint was loaded into it."""

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        """Each value summed over all processes."""
        if self.world.size == 1:
            return values
        together = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(together, group=self.world.control)
        return together.tolist()

    @torch.no_grad()
    def evaluate(self, sequences: Tensor) -> float:
        """The language-model loss of a batch, a mean over the ranks that share it. (B,T+1) -> nats per token"""
        return self.wrapped(sequences.to(self.world.device)).item()


class TorchEngine(Engine):
    """PyTorch's engines: `wrapped` is the objective itself, in DDP, or sharded by FSDP2."""

    def __init__(self, train: TrainConfig, world: World, objective: Objective, wrapped: nn.Module):
        super().__init__(world, objective, wrapped)
        self.parameters = {name: p for name, p in self.decoder.named_parameters() if not p.is_meta}  # of this rank
        self.optimizer = adamw(self.decoder, train)
        for parameter in self.parameters.values():  # from the start, so that all checkpoints have the same tensors
            self.optimizer.state[parameter] = fresh_state(parameter)

    def forward_backward(self, sequences: Tensor, weight: float, report: RouterReport, last: bool) -> Tensor:
        # DDP all-reduces gradients at the last micro-batch; FSDP2 keeps only its shard, so it reduces at every one.
        ddp = self.wrapped if isinstance(self.wrapped, DistributedDataParallel) else None
        with contextlib.nullcontext() if ddp is None or last else ddp.no_sync():
            loss = self.wrapped(sequences, report)
            (loss * weight).backward()
        return loss

    def update(self, learning_rate: float, clip: float) -> float:
        norm = self.clip_gradient(clip)
        if math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
            self.optimizer.zero_grad()
        return norm

    def clip_gradient(self, limit: float) -> float:
        """-> the norm before clipping"""
        return float(nn.utils.clip_grad_norm_(self.parameters.values(), limit))

    def tensors(self) -> dict[str, Tensor]:
        """The tensors themselves, not copies."""
        found = {f"model.{name}": parameter.detach() for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state[parameter].items():
                found[f"optimizer.{key}.{name}"] = value
        return found

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Nothing to do: they are the model's and the optimizer's own."""
