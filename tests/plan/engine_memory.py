"""What an engine really holds: state between micro-batches, and the peak that micro-batches add."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dualres.config.schema import Config
from dualres.train.engines.base import MicroBatch, TorchEngine
from dualres.train.engines.build import build_engine
from dualres.train.process_group import World
from tests.peak import Peak


def sequences(config: Config) -> Tensor:
    shape = config.train.micro_batch, config.model.context + 1
    return torch.randint(0, config.model.vocab_size, shape, generator=torch.Generator().manual_seed(0))


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def held_bytes(engine: TorchEngine) -> dict[str, int]:
    """Of weights, gradients and optimizer state, after a micro-batch."""
    moments = [value for name, value in engine.tensors().items() if name.startswith("optimizer.")]
    gradients = [p.grad for p in engine.parameters.values() if p.grad is not None]
    weights: list[Tensor] = list(engine.parameters.values())
    kinds = {"weights": weights, "gradients": gradients, "optimizer": moments}
    return {kind: sum(local(tensor).nbytes for tensor in tensors) for kind, tensors in kinds.items()}


def peak_bytes(engine: TorchEngine, micro_batches: list[MicroBatch]) -> int:
    """The most of tensors that micro-batches add to what the engine holds."""
    gradients = [p.grad for p in engine.parameters.values() if p.grad is not None]
    held = [*engine.parameters.values(), *gradients, *engine.tensors().values()]
    with Peak([local(tensor) for tensor in held]) as peak:
        engine.accumulate(micro_batches)
    return peak.most


def step_memory(config: Config, world: World) -> tuple[dict[str, int], int]:
    """What an engine holds between micro-batches, and the most that a micro-batch adds."""
    engine, batch = build_engine(config, world, 256), sequences(config)
    assert isinstance(engine, TorchEngine)
    engine.accumulate([MicroBatch(batch, 1.0)])
    engine.accumulate([MicroBatch(batch, 1.0)])  # the first may allocate what stays
    return held_bytes(engine), peak_bytes(engine, [MicroBatch(batch, 1.0)])
