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
from dualres.train.optimizer import adamw, fresh_state
from dualres.train.process_group import World


class MicroBatch(NamedTuple):
    """A micro-batch and its weight in the gradient; the weights, averaged over data-parallel ranks, sum to 1.

    Zero-weight micro-batches pad a batch that does not divide evenly over the ranks: all ranks must run equally many.
    """

    sequences: Tensor  # (B,T+1)
    weight: float


class Losses(NamedTuple):
    """One rank's losses; averaging over ranks gives the batch loss."""

    language: float
    router: float  # mean over layers, 1 if routing is uniform; 0 without experts


class Engine(ABC):
    def __init__(self, world: World, objective: Objective, wrapped: nn.Module):
        self.world = world
        self.decoder = objective.decoder
        self.wrapped = wrapped  # the objective, wrapped by the engine: (B,T+1), report -> ()
        self.data_rank, self.data_size = world.rank, world.size  # among the data-parallel ranks

    def accumulate(self, micro_batches: Sequence[MicroBatch]) -> Losses:
        """Run forward and backward of this rank's micro-batches of a step."""
        language = router = 0.0
        for number, (sequences, weight) in enumerate(micro_batches, 1):
            report, last = RouterReport(scale=weight), number == len(micro_batches)
            loss = self.forward_backward(sequences.to(self.world.device), weight, report, last)
            language += weight * loss.item()
            router += weight * (report.mean().item() if report.losses else 0.0)
        return Losses(language, router)

    @abstractmethod
    def forward_backward(self, sequences: Tensor, weight: float, report: RouterReport, last: bool) -> Tensor:
        """Add `weight` times the gradient of a micro-batch, which may be the step's `last`. (B,T+1) -> its loss ()"""

    @abstractmethod
    def update(self, learning_rate: float, clip: float) -> float:
        """Clip the gradient by its norm over all ranks and, if that is finite, step. -> the norm before clipping"""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The contents of a checkpoint by name, `model.…` and `optimizer.…`; sharded if the engine shards them."""

    @abstractmethod
    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Load the dict returned by `tensors`, after a checkpoint was loaded into it."""

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        """Each value summed over all processes."""
        if self.world.size == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.world.control)
        return total.tolist()

    @torch.no_grad()
    def evaluate(self, sequences: Tensor) -> float:
        """The language-model loss of a batch, to be averaged over the ranks that share it. (B,T+1) -> nats per token"""
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
        """Clip the gradient to the norm `limit`. -> the norm before clipping"""
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters.values() if p.grad is not None])
        if limit / (norm.item() + 1e-6) < 1:  # otherwise PyTorch would multiply every gradient by 1
            nn.utils.clip_grads_with_norm_(self.parameters.values(), limit, norm)
        return norm.item()

    def tensors(self) -> dict[str, Tensor]:
        """The tensors themselves, not copies."""
        tensors = {f"model.{name}": parameter.detach() for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"optimizer.{key}.{name}"] = value
        return tensors

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Nothing to do: `tensors` returns the model's and the optimizer's own tensors."""
