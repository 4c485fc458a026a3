"""Bytes that one micro-batch keeps for its backward pass and sends, block by block. A rank's share of the real model
runs eagerly on fake tensors, with the pathways' fused operators and CPU operators for everything else.

Kept bytes are attributed to what created them. Branches create activations, which include their inputs. States of a
method with history are history. Everything else that a pathway keeps counts as live streams, as do branch outputs,
which it sums, and the state of a method without history.
"""
# B batch  T tokens  D width  J streams

import contextlib
import dataclasses
import functools
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dualres.config.schema import Config
from dualres.model.block import NormedBranch, ResidualBlock, recompute_blocks
from dualres.model.decoder import Decoder
from dualres.model.loss import chunked_cross_entropy, document_numbers
from dualres.ops import dispatch
from dualres.plan.local_model import LocalModel, RangeLoss, Share, local_model
from dualres.residual.registry import places

CASTING = {"fsdp2", "deepspeed"}  # engines that run forward on bfloat16 weights; with the others, autocast makes copies
KEEPING = {"single", "ddp"}  # engines that hold the gradients of all parameters until the step
COUNTED = 3  # full blocks run of a deep model; the last two show what a longer history adds


class Memory(NamedTuple):
    """Bytes of one rank, for a part of the model or at the peak of a step; a plan prints the annotations."""

    weights: Annotated[int, "stored by this rank"] = 0
    gathered_weights: Annotated[int, "unsharded for use"] = 0
    gradients: Annotated[int, "stored by this rank"] = 0
    reduced_gradients: Annotated[int, "being summed over ranks"] = 0
    optimizer: Annotated[int, "AdamW state, float32"] = 0
    activations: Annotated[int, "saved by branches for backward"] = 0
    history: Annotated[int, "states H_0 … H_b computed on this rank"] = 0
    live_streams: Annotated[int, "streams and branch outputs"] = 0
    pipeline: Annotated[int, "states and gradients sent and received"] = 0
    loss: Annotated[int, "gradients of its inputs"] = 0
    work: Annotated[int, "temporary: logits or a block's backward pass"] = 0

    def plus(self, other: "Memory", times: int = 1) -> "Memory":
        return Memory(*(a + times * b for a, b in zip(self, other, strict=True)))

    @property
    def kept(self) -> int:
        """Bytes that branches and pathways keep for the backward pass."""
        return self.activations + self.history + self.live_streams

    @property
    def total(self) -> int:
        return sum(self)


class Passes(NamedTuple):
    """Bytes of the forward and backward pass of one micro-batch on one rank."""

    shared: int  # tokens, rotary tables and mask; each chunk of a pipeline has its own
    start: Memory  # embedding, with H_0
    blocks: tuple[Memory, ...]  # each with its state H_b and the temporary memory of its backward pass
    sent: tuple[tuple[int, int], ...]  # by each block, forward and backward: within the tensor group, to other experts
    end: Memory  # readout, final norm and loss; `work` is the peak of the loss above kept memory
    stream: int  # one stream (B,T,D) for the rank's share of the sequence
    streams: int  # J
    keeps_history: bool

    @property
    def state(self) -> int:
        """H_b: J streams."""
        return self.stream * self.streams


@functools.cache
def passes_of(config: Config, share: Share, engine: str) -> Passes:
    """Like `count_passes`, but runs only the first three blocks of a deep model, and the last if it is shorter.

    Later blocks are extrapolated: each adds as much as the one before it.
    """
    lengths = [place.branches for place in places(2 * config.model.layers, config.residual)]
    short = [n for n in lengths[-1:] if n < lengths[0]]
    branches = COUNTED * lengths[0] + sum(short)
    missing = len(lengths) - COUNTED - len(short)
    # Autocast drops the casts of the whole model at once.
    autocast = config.train.precision == "bf16" and engine not in CASTING
    if missing <= 0 or branches % 2 or config.model.read_eps is not None or autocast:
        return count_passes(config, share, engine)
    shallow = dataclasses.replace(config.model, layers=branches // 2)
    counted = count_passes(dataclasses.replace(config, model=shallow), share, engine)
    full, rest = counted.blocks[:COUNTED], counted.blocks[COUNTED:]
    sent = (*counted.sent[:COUNTED], *counted.sent[COUNTED - 1 : COUNTED] * missing, *counted.sent[COUNTED:])
    longer = full[-1].plus(full[-2], -1)  # what a history of one more state adds
    added = (full[-1].plus(longer, times) for times in range(1, missing + 1))
    return counted._replace(blocks=(*full, *added, *(block.plus(longer, missing) for block in rest)), sent=sent)


@functools.cache
def count_passes(config: Config, share: Share, engine: str) -> Passes:
    """Run a micro-batch of `config` forward, and each block backward."""
    train = config.train
    local = local_model(config.model, config.residual, share)
    bf16 = train.precision == "bf16"
    if bf16 and engine in CASTING:
        local.decoder.to(torch.bfloat16)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=bf16 and engine not in CASTING)
    with dispatch.for_shapes(), FakeTensorMode(allow_non_fake_inputs=True):  # the meta parameters are not fake
        local.decoder.to_empty(device="cpu")
        recompute_blocks(local.decoder.stack, train.recompute)
        return _count(local, config, autocast, keep_gradients=engine in KEEPING)


class LiveBytes(TorchDispatchMode):
    """Bytes of live tensors created inside the context, `now` and at their `peak`; `older` tensors do not count.

    Fake tensors count like others: they have sizes but no memory. A new tensor gets the current `tag`.
    """

    passive = True  # for `dispatch.traced`: operators run as they do without it

    def __init__(self, older: Iterable[Tensor], tag: str = ""):
        super().__init__()
        self.now = self.peak = 0
        self.tag = tag
        self.older = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in older}
        self.sizes: dict[int, int] = {}  # bytes of live storages, by address
        self.tags: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address in self.older or address in self.sizes:  # a view, or changed in place
            return
        self.sizes[address], self.tags[address] = storage.nbytes(), self.tag
        weakref.finalize(storage, self._freed, address)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)

    def _freed(self, address: int) -> None:
        self.now -= self.sizes.pop(address)

    def retag(self, tensor: Tensor, tag: str) -> None:
        self.tags[tensor.untyped_storage()._cdata] = tag

    def by_tag(self) -> Counter[str]:
        totals: Counter[str] = Counter()
        for address, size in self.sizes.items():
            totals[self.tags[address]] += size
        return totals


class BlockCall(NamedTuple):
    """Arguments of a call of a block or the readout, and the memory kept before it."""

    history: list[tuple[torch.Size, torch.dtype]]  # shape and dtype of each state
    context: dict[str, Any]
    before: Memory


def _count(local: LocalModel, config: Config, autocast: torch.autocast, *, keep_gradients: bool) -> Passes:
    decoder, train, blocks = local.decoder, config.train, list(local.decoder.stack)
    live = LiveBytes(decoder.parameters(), tag="activations")
    with live, _watched(decoder, live) as calls:
        with autocast:  # the training objective, in two halves
            sequences = torch.zeros((train.micro_batch, config.model.context + 1), dtype=torch.long)
            tokens, targets = sequences[:, :-1], sequences[:, 1:]
            documents = document_numbers(tokens, 0) if train.documents == "isolate" else None
            hidden = decoder.hidden(tokens, documents=documents)
            at_end = Memory(**live.by_tag()).plus(Memory(activations=hidden.nbytes), -1)
            rows, weight = decoder.vocabulary.output_product(hidden)
            if local.tensor.ranks > 1:
                loss = RangeLoss.apply(rows, weight, targets, train.loss_rows)
            else:
                loss = chunked_cross_entropy(rows, weight, targets, train.loss_rows)
            del hidden, rows, weight
            with_loss = live.now
        kept, peak = live.now, live.peak  # autocast has freed casts of weights that nothing else references
    del loss
    (shape, dtype), *_ = calls[blocks[0]].history
    stream = shape[1:].numel() * dtype.itemsize
    embedding = Memory(activations=stream if shape[0] > 1 else 0)  # H_0 is a copy of it, and nothing references it
    shared = sequences.nbytes + sum(tensor.nbytes for tensor in _shared_tensors(calls[blocks[0]].context))
    edges = [calls[module].before for module in (*blocks, decoder.stack.readout)]
    counted, sent = [], []
    for block, (before, after) in zip(blocks, pairwise(edges), strict=True):
        tensor, experts = local.tensor.sent, local.experts.sent
        work = _backward_work(block, calls[block], autocast, keep_gradients=keep_gradients)
        counted.append(after.plus(before, -1)._replace(work=work))
        sent.append((local.tensor.sent - tensor, local.experts.sent - experts))
    return Passes(
        shared=shared,
        start=edges[0].plus(embedding, -1).plus(Memory(activations=shared + with_loss - kept), -1),
        blocks=tuple(counted),
        sent=tuple(sent),
        end=at_end.plus(edges[-1], -1).plus(embedding)._replace(loss=with_loss - at_end.kept, work=peak - kept),
        stream=stream,
        streams=shape[0],
        keeps_history=blocks[0].pathway.keeps_history,
    )


@contextlib.contextmanager
def _watched(decoder: Decoder, live: LiveBytes) -> Iterator[dict[nn.Module, BlockCall]]:
    """Tag live bytes by what creates them, and record every call of a block and of the readout."""
    calls: dict[nn.Module, BlockCall] = {}
    blocks, readout = list(decoder.stack), decoder.stack.readout
    states = "history" if blocks[0].pathway.keeps_history else "live_streams"

    def on_block_start(module: nn.Module, history: tuple[Tensor, ...], context: dict[str, Any]) -> None:
        if not calls:  # H_0, which no block creates
            live.retag(history[0], states)
        shapes = [(state.shape, state.dtype) for state in history]
        calls[module] = BlockCall(shapes, context, Memory(**live.by_tag()))
        live.tag = "live_streams"

    def on_block_end(module: nn.Module, history: Any, out: Any) -> None:
        live.tag = "activations"
        if module is not readout:
            live.retag(out[0], states)

    def on_branch_start(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        live.tag = "activations"
        live.retag(args[0], "activations")

    def on_branch_end(module: nn.Module, args: Any, update: Tensor) -> None:
        live.tag = "live_streams"
        live.retag(update, "live_streams")

    hooks = []
    for module in (*blocks, readout):
        hooks.append(module.register_forward_pre_hook(on_block_start, with_kwargs=True))
        hooks.append(module.register_forward_hook(on_block_end))
    for branch in (branch for block in blocks for branch in block.branches):
        module = branch.module if isinstance(branch, NormedBranch) else branch
        hooks.append(module.register_forward_pre_hook(on_branch_start, prepend=True))
        hooks.append(module.register_forward_hook(on_branch_end))
    yield calls
    for hook in hooks:
        hook.remove()


def _backward_work(block: ResidualBlock, call: BlockCall, autocast: torch.autocast, *, keep_gradients: bool) -> int:
    """The peak of a block's backward pass above what its forward pass, which runs first, keeps."""
    states = [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape, dtype in call.history]
    older = [*block.parameters(), *states, *_shared_tensors(call.context)]
    if keep_gradients:
        for parameter in block.parameters():
            parameter.grad = torch.zeros_like(parameter)
            older.append(parameter.grad)
    with LiveBytes(older) as live:
        with autocast:
            out, *_ = block(*states, **call.context)
        kept = live.now - out.nbytes
        for state in states:  # gradients from later blocks and the readout
            state.grad = torch.zeros_like(state)
        out.backward(torch.zeros_like(out))
        return live.peak - kept


def _shared_tensors(context: dict[str, Any]) -> list[Tensor]:
    """Rotary tables and mask, which all blocks receive."""
    return [value for value in vars(context["context"]).values() if isinstance(value, Tensor)]
