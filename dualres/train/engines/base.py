"""Engines: how a model and its optimizer are held, by one process or by many. The loop sees only this interface.

    engine.accumulate(micro_batches)  engine.update(rate, clip)  …  engine.tensors()

Every engine trains float32 weights with the same AdamW and names its tensors alike: a checkpoint of one is a
checkpoint of all.
"""
# B batch  T tokens

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from dualres.config.schema import TrainConfig
from dualres.model.context import RouterReport
from dualres.model.loss import Objective
from dualres.train.process_group import World
from dualres.train.recipe import adamw, fresh_state


class MicroBatch(NamedTuple):
    """A micro-batch, and how much of the step's gradient is its: on average over data-parallel ranks they add up to 1.

    A share of 0 fills up a batch that does not divide: it runs, since all ranks must, and counts for nothing.
    """

    sequences: Tensor  # (B,T+1)
    share: float


class Losses(NamedTuple):
    """A rank's part of a step's losses, so that the mean over all ranks is the batch's."""

    language: float
    router: float  # mean over layers, 1 where routing is uniform; 0 without experts


class Engine(ABC):
    """A model in training."""

    def __init__(self, world: World, objective: Objective, wrapped: nn.Module):
        self.world = world
        self.decoder = objective.decoder
        self.wrapped = wrapped  # the objective in the engine's hands: (B,T+1), report -> ()
        self.data_rank, self.data_size = world.rank, world.size  # which share of the data is this rank's, of how many

    @abstractmethod
    def accumulate(self, micro_batches: Sequence[MicroBatch]) -> Losses:
        """The gradient of a step: forward and backward of all micro-batches of this rank."""

    @abstractmethod
    def update(self, learning_rate: float, clip: float) -> float:
        """Clip the gradient of all ranks together, and step unless it is not finite. -> its norm before clipping"""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds, by name, `model.…` and `optimizer.…`; sharded where the engine shards."""

    @abstractmethod
    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take over the values of a checkpoint that were loaded into the result of `tensors`."""

    @torch.no_grad()
    def evaluate(self, sequences: Tensor) -> float:
        """The language-model loss of a batch: the mean over the ranks that share it. (B,T+1) -> nats per token"""
        with self.autocast():
            return self.wrapped(sequences.to(self.world.device)).item()

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """The precision of forward passes, where the wrapper does not see to it."""
        return contextlib.nullcontext()


class TorchEngine(Engine):
    """PyTorch's own: `wrapped` is the objective itself, or in DDP's hands, or sharded by FSDP2."""

    def __init__(self, train: TrainConfig, world: World, objective: Objective, wrapped: nn.Module):
        super().__init__(world, objective, wrapped)
        self.bf16 = train.precision == "bf16"
        self.parameters = {name: p for name, p in self.decoder.named_parameters() if not p.is_meta}  # of this rank
        self.optimizer = adamw(self.decoder, train)
        for parameter in self.parameters.values():  # from the start, so that a checkpoint always has the same tensors
            self.optimizer.state[parameter] = fresh_state(parameter)

    def accumulate(self, micro_batches: Sequence[MicroBatch]) -> Losses:
        """One after the other."""
        language = router = 0.0
        for number, (sequences, share) in enumerate(micro_batches, 1):
            report = RouterReport(scale=share)
            with self.gradient_sync(number == len(micro_batches)):
                with self.autocast():
                    loss = self.wrapped(sequences.to(self.world.device), report)
                (loss * share).backward()
            language += share * loss.item()
            router += share * (report.mean().item() if report.losses else 0.0)
        return Losses(language, router)

    def update(self, learning_rate: float, clip: float) -> float:
        """Clip, and step unless the gradient is not finite."""
        size = self.clip_gradient(clip)
        if math.isfinite(size):
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
            self.optimizer.zero_grad()
        return size

    def clip_gradient(self, limit: float) -> float:
        """Clip the gradient. -> its norm before"""
        return float(nn.utils.clip_grad_norm_(self.parameters.values(), limit))

    def tensors(self) -> dict[str, Tensor]:
        """The live tensors, not copies."""
        found = {f"model.{name}": parameter.detach() for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state[parameter].items():
                found[f"optimizer.{key}.{name}"] = value
        return found

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Nothing to do: the tensors are the model's and the optimizer's own."""

    def gradient_sync(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """DDP adds gradients over ranks once, at the last micro-batch; FSDP2 keeps only its shard, so at every one."""
        if isinstance(self.wrapped, DistributedDataParallel) and not last:
            return self.wrapped.no_sync()
        return contextlib.nullcontext()

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """FSDP2 casts by its own policy."""
        if not self.bf16 or isinstance(self.wrapped, FSDPModule):
            return contextlib.nullcontext()
        return torch.autocast(self.world.device.type, torch.bfloat16)
