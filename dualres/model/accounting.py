"""The cost of a decoder: parameters, flops per token and bytes of residual state, counted on its modules."""
# J streams  R history  D width

import copy
import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from dualres import ops
from dualres.model.attention import Attention
from dualres.model.block import ResidualStack, extended
from dualres.model.decoder import Decoder
from dualres.model.moe import MoE
from dualres.ops import dispatch, traffic
from dualres.residual.pathway import History

TOKENS_OF_TRAFFIC = 7  # differs from every parameter dimension


class Parameters(NamedTuple):
    """Parameter counts; each tensor counts once, including a tied vocabulary."""

    total: int
    vocabulary: int
    active: int  # used by one token: of the experts, only those it is routed to
    residual: int  # of the pathways and the readout


class Flops(NamedTuple):
    """Floating-point operations of one token's forward pass; training takes about three times as many."""

    branches: int  # matrix products of attention and feed-forward weights
    attention: int  # scores and weighted values, averaged over a full context
    vocabulary: int  # the output logits
    residual: int  # pathways and readout, one per element of each operation

    @property
    def total(self) -> int:
        return sum(self)


class Traffic(NamedTuple):
    """How often the residual pathways read or write a row of a stream, D elements, for one token."""

    parts: tuple[int, ...]  # of the forward pass: by the pathway of each block, then by the readout
    backward: int

    @property
    def forward(self) -> int:
        return sum(self.parts)


class StateBytes(NamedTuple):
    """Bytes of residual state per token."""

    history: int  # the states that the readout reads
    live: int  # the streams inside a block


def parameters(decoder: Decoder) -> Parameters:
    """Count the parameters of `decoder`, which may be on the meta device."""
    total, vocabulary = _count(decoder), _count(decoder.vocabulary)
    idle = 0
    for module in decoder.modules():
        if isinstance(module, MoE):
            idle += (module.gate_up.numel() + module.down.numel()) * (module.experts - module.active) // module.experts
    pathways = sum(_count(block.pathway) for block in decoder.stack)
    return Parameters(total, vocabulary, total - idle, pathways + _count(decoder.stack.readout))


def flops_per_token(decoder: Decoder) -> Flops:
    """Count the flops of one token's forward pass in the middle of a full context.

    `decoder` must be on the meta device, where the residual pathways are run on one token to count their operations.
    """
    if not decoder.norm.weight.is_meta:
        raise ValueError(f"the decoder is on {decoder.norm.weight.device}: build it with device='meta' to count flops")
    branches = attention = 0
    for module in (module for block in decoder.stack for branch in block.branches for module in branch.modules()):
        if isinstance(module, nn.Linear):
            branches += 2 * module.weight.numel()
        elif isinstance(module, MoE):
            branches += 2 * (module.gate_up.numel() + module.down.numel()) * module.active // module.experts
        elif isinstance(module, Attention):
            mean_distance = (decoder.config.context + 1) / 2
            attention += round(2 * 2 * mean_distance * module.query.out_features)
    return Flops(branches, attention, _vocabulary_flops(decoder), _residual_flops(decoder))


def state_bytes_per_token(decoder: Decoder, bytes_per_element: int = 2) -> StateBytes:
    """Bytes of residual state of one token in the forward pass, by default in bfloat16."""
    state = decoder.stack.streams * decoder.config.width * bytes_per_element
    states = 1 + len(decoder.stack.blocks) if decoder.stack.keeps_history else 1
    return StateBytes(states * state, state)


def residual_traffic(decoder: Decoder) -> Traffic:
    """Traffic of pathways and readout for one token, forward and backward, by the formulas of the fused operators.

    Other operations on a stream, such as summing gradients from several readers, count what they read and write.
    Branches and their norms, which the fused read applies, count nothing. `decoder` must be on the meta device.
    """
    stack = copy.deepcopy(decoder.stack)
    row = 1, TOKENS_OF_TRAFFIC, decoder.config.width
    shapes_only = FakeTensorMode(allow_non_fake_inputs=True)  # parameters on the meta device are not fake tensors
    with dispatch.for_shapes(), shapes_only:
        stack.to_empty(device="cpu")
        state = torch.empty(stack.streams, *row, requires_grad=True)
        with StreamTraffic(row) as forward:
            counted = [(out, forward.rows) for out in _pathways_alone(stack, state)]
        out, _ = counted[-1]
        with StreamTraffic(row) as backward:
            out.backward(torch.empty_like(out))
    totals = [0, *(rows for _, rows in counted)]
    return Traffic(tuple(end - start for start, end in pairwise(totals)), backward.rows)


def _pathways_alone(stack: ResidualStack, state: Tensor) -> Iterator[Tensor]:
    """The stack with branches that return their input: H_b (J,B,T,D) after each block, then the output (B,T,D)."""
    history: History = (state,)
    for block in stack:
        pathway = block.pathway
        inside = pathway.open(history)
        for i in range(len(block.branches)):
            h, inside = pathway.read(inside, i)
            inside = pathway.write(inside, i, h)
        history = extended(ops.passed_on(history, pathway.carriers(inside)), pathway.close(inside), pathway)
        yield history[-1]
    yield stack.readout(*history)


def _vocabulary_flops(decoder: Decoder) -> int:
    """Flops of the maps into and out of a factorized table, and of the logits; a lookup is free."""
    vocabulary = decoder.vocabulary
    table = 2 * vocabulary.table.weight.numel()
    if vocabulary.widen is None:
        return table
    return table + 2 * 2 * vocabulary.widen.weight.numel()


def _residual_flops(decoder: Decoder) -> int:
    state = torch.empty(decoder.stack.streams, 1, 1, decoder.config.width, device="meta")
    with Arithmetic() as arithmetic, torch.no_grad():
        list(_pathways_alone(decoder.stack, state))
    return arithmetic.flops


class StreamTraffic(TorchDispatchMode):
    """Counts how often operators read or write a stream, a row of B × T × D."""

    def __init__(self, row: tuple[int, int, int]) -> None:
        super().__init__()
        self.row, self.rows = row, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = traffic.BY_OPERATOR.get(func.name())
        if formula is not None:
            self.rows += sum(formula(*args))
        elif isinstance(out, Tensor) and not func.is_view and func._overloadpacket not in _EMPTY:
            streams = [x for x in (*tree_leaves(args), out) if isinstance(x, Tensor) and x.shape[-3:] == self.row]
            self.rows += sum(x.numel() for x in streams) // math.prod(self.row)
        return out


_EMPTY = {torch.ops.aten.empty, torch.ops.aten.new_empty, torch.ops.aten.empty_like, torch.ops.aten.detach}


class Arithmetic(TorchDispatchMode):
    """Counts matrix products by PyTorch's formulas and one flop per element of all other computations."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula: Callable[..., int] | None = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        elif not func.is_view and func._overloadpacket not in _MOVES:
            tensors = [x for x in (*args, out) if isinstance(x, Tensor)]
            self.flops += max((x.numel() for x in tensors), default=0)
        return out


# Operations that only copy or create.
_COPIES = "_to_copy _unsafe_view cat clone constant_pad_nd copy_ empty fill fill_ flip new_zeros stack"
_MOVES = {getattr(torch.ops.aten, name) for name in _COPIES.split()}


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
