"""One rank's share of a model: modules with their sizes on that rank, on the meta device and without other ranks.

A tensor group divides attention heads, hidden units and vocabulary; expert parallelism divides the experts.
Data from other ranks is an empty tensor of the right shape, so that a pass can be counted without running it.
"""
# B batch  T tokens  D width  E experts  W ranks that share the experts

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dualres.config.schema import ModelConfig, ResidualConfig
from dualres.model.decoder import Decoder, build_decoder
from dualres.model.loss import ChunkedCrossEntropy, loss_and_gradients
from dualres.model.moe import Experts, LocalExperts, MoE
from dualres.parallel.tensor import LINEARS


class Share(NamedTuple):
    """How many ranks share the parts of a model."""

    tensor: int = 1  # ranks that divide heads, hidden units, vocabulary and sequence
    experts: int = 1  # W


def part_of(size: int, ranks: int) -> int:
    """Bytes that a rank sends in a gather, scatter or all-to-all of `size` bytes: every part except its own."""
    return size * (ranks - 1) // ranks


class Wire:
    """A group of ranks: the parameters that it divides, and the bytes that each rank sends to the others."""

    def __init__(self, ranks: int):
        self.ranks, self.sent = ranks, 0
        self.divided: set[int] = set()  # by id

    def divide(self, *modules: nn.Module | None) -> None:
        self.divided.update(id(p) for module in modules if module is not None for p in module.parameters())

    def carry(self, size: int) -> None:
        """Count a gather, scatter or all-to-all of `size` bytes."""
        self.sent += part_of(size, self.ranks)


class LocalModel(NamedTuple):
    """The decoder of one rank, on the meta device, and the groups it communicates with."""

    decoder: Decoder  # takes whole sequences of tokens and returns T / tensor states
    tensor: Wire
    experts: Wire


def local_model(model: ModelConfig, residual: ResidualConfig, share: Share) -> LocalModel:
    n = share.tensor
    ffn_width = None if model.ffn_width is None else model.ffn_width // n
    divided = dataclasses.replace(
        model,
        heads=model.heads // n,
        kv_heads=model.kv_heads // n,
        head_size=model.head_width,
        ffn_width=ffn_width,
        vocab_size=-(-model.vocab_size // n),
    )
    decoder = build_decoder(divided if n > 1 else model, residual, device="meta")
    tensor, experts = Wire(n), Wire(share.experts)

    def gather(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return Exchange.apply(args[0], 1, args[0].shape[1] * n, tensor), *args[1:]

    def scatter(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return Exchange.apply(out, 1, out.shape[1] // n, tensor)

    for module in decoder.modules():
        if isinstance(module, MoE):
            module.placement = MetaExperts(tensor, experts)
            for name in module.matrices if share.experts > 1 else ():
                whole: Tensor = getattr(module, name)
                local = nn.Parameter(whole[: module.experts // share.experts].detach().clone())
                setattr(module, name, local)
                experts.divided.add(id(local))
        elif n > 1 and type(module) in LINEARS:
            into, out = LINEARS[type(module)]
            tensor.divide(*(module.get_submodule(name) for name in (*into, out)))
            module.register_forward_pre_hook(gather)
            module.register_forward_hook(scatter)
    if n > 1:
        tensor.divide(decoder.vocabulary.table, decoder.vocabulary.output)
        decoder.vocabulary.table.register_forward_hook(scatter)
    return LocalModel(decoder, tensor, experts)


class MetaExperts(LocalExperts):
    """Expert parallelism without other ranks: as many rows arrive as leave, the mean over ranks."""

    def __init__(self, tensor: Wire, experts: Wire):
        self.tensor, self.experts, self.shards = tensor, experts, tensor.ranks

    def total(self, assigned: Tensor) -> Tensor:
        self.tensor.carry(2 * assigned.nbytes)  # an all-reduce is a scatter and a gather
        return assigned.clone() if self.shards > 1 else assigned

    def apply(self, experts: Experts, rows: Tensor, assigned: Tensor) -> Tensor:
        if self.experts.ranks == 1:
            return experts(rows, assigned)
        self.experts.carry(assigned.nbytes)
        arriving = torch.empty_like(assigned).view(self.experts.ranks, -1)
        arrived = Exchange.apply(rows, 0, len(rows), self.experts)
        order = torch.empty(len(rows), dtype=torch.long).argsort(stable=True)
        out = experts(arrived[order], arriving.sum(0))
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        return Exchange.apply(out[back], 0, len(rows), self.experts)


class Exchange(torch.autograd.Function):
    """The output of a collective: a new tensor with `size` entries along `dim`; likewise in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, size: int, wire: Wire) -> Tensor:
        """(B,T,D) -> (B,size,D) where `dim` is 1"""
        ctx.dim, ctx.size, ctx.wire = dim, x.shape[dim], wire
        out = resized(x, dim, size)
        wire.carry(max(x.nbytes, out.nbytes))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        back = resized(grad, ctx.dim, ctx.size)
        ctx.wire.carry(max(grad.nbytes, back.nbytes))
        return back, None, None, None


def resized(x: Tensor, dim: int, size: int) -> Tensor:
    """A new tensor like `x` with `size` entries along `dim`."""
    return x.new_empty(*x.shape[:dim], size, *x.shape[dim + 1 :])


class RangeLoss(ChunkedCrossEntropy):
    """The loss over one rank's range of the vocabulary; temporarily gathers the hidden states of the whole sequence."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
        """hidden (B,T/n,E), weight (V/n,E), targets (B,T) -> ()"""
        whole = resized(hidden, 1, targets.shape[1]).flatten(0, 1)
        loss, _, grad_weight = loss_and_gradients(whole, weight, targets.flatten(), rows, differentiated=True)
        ctx.save_for_backward(torch.empty_like(hidden), grad_weight)
        return loss
