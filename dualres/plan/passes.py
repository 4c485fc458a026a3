"""What a micro-batch leaves on a rank for its backward pass, block by block, on tensors that have sizes and no bytes.

Kept bytes are told apart by who made them: branches make activations, and count their input as theirs; the states of a
method with history are its history; the rest of what pathways keep, and branch outputs, of which live streams are sums,
are live streams. The state of a method without history is a live stream.
"""
# B batch  T tokens  D width  J streams

import contextlib
import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dualres.config.schema import Config
from dualres.model.block import NormedBranch, recompute_blocks
from dualres.model.loss import chunked_cross_entropy, document_numbers
from dualres.ops import dispatch
from dualres.plan.local_model import Local, RangeLoss, Share, local_decoder
from dualres.plan.run_memory import CASTING, KEEPING, History, Live, backward_work, shared_tensors

ACTIVATIONS, HISTORY, STREAMS = "activations", "history", "live streams"


class Kept(NamedTuple):
    """Bytes for the backward pass."""

    activations: int = 0
    history: int = 0
    live: int = 0

    def plus(self, other: "Kept", times: int = 1) -> "Kept":
        """The sum, with the other so many times."""
        return Kept(*(a + times * b for a, b in zip(self, other, strict=True)))

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


class Talk(NamedTuple):
    """Bytes that a rank sends while a part of the model runs."""

    tensor: int = 0
    experts: int = 0

    def plus(self, other: "Talk", times: int = 1) -> "Talk":
        """The sum, with the other so many times."""
        return Talk(self.tensor + times * other.tensor, self.experts + times * other.experts)


class Back(NamedTuple):
    """A block's backward pass, with what it computes again."""

    work: int  # bytes, at most above what its forward pass has left
    sent: Talk

    def plus(self, other: "Back", times: int = 1) -> "Back":
        """The sum, with the other so many times."""
        return Back(self.work + times * other.work, self.sent.plus(other.sent, times))


class Passes(NamedTuple):
    """One micro-batch on one rank, in bytes."""

    shared: int  # tokens, rotary tables and mask, that every chunk of a pipeline makes for itself
    start: Kept  # what is kept of the embedding, with H_0
    blocks: tuple[Kept, ...]  # of each block, with its state H_b
    end: Kept  # readout and final norm
    loss: int  # the gradients of hidden states and output weights
    logits: int  # at most above all that is kept, while the loss is made
    forward: tuple[Talk, ...]  # of each block
    backward: tuple[Back, ...]
    stream: int  # one stream (B,T,D) of the rank's share of the sequence
    streams: int  # J
    keeps_history: bool

    @property
    def state(self) -> int:
        """H_b: J streams."""
        return self.stream * self.streams


class Tagged(Live):
    """Live bytes by who made them."""

    def __init__(self, older: Iterable[Tensor]):
        super().__init__(older)
        self.maker = ACTIVATIONS
        self.tags: dict[int, str] = {}

    def _see(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self.known:
            self.tags[storage._cdata] = self.maker
        super()._see(storage)

    def mark(self, tensor: Tensor, tag: str) -> None:
        """Whoever made it."""
        self.tags[tensor.untyped_storage()._cdata] = tag

    def kept(self) -> Kept:
        """What is alive."""
        sizes: Counter[str] = Counter()
        for address, storage in self.alive.items():
            sizes[self.tags[address]] += storage().nbytes()  # type: ignore[union-attr]
        return Kept(sizes[ACTIVATIONS], sizes[HISTORY], sizes[STREAMS])


@functools.cache
def count_passes(config: Config, share: Share, engine: str) -> Passes:
    """Run a micro-batch of `config` forward, and each block backward."""
    train = config.train
    local = local_decoder(config.model, config.residual, share)
    decoder = local.decoder
    cast = train.precision == "bf16" and engine in CASTING
    if cast:
        decoder.to(torch.bfloat16)
    with dispatch.for_shapes(), FakeTensorMode(allow_non_fake_inputs=True):
        decoder.to_empty(device="cpu")
        recompute_blocks(decoder.stack, train.recompute)
        autocast = train.precision == "bf16" and not cast
        return _measure(local, config, share, autocast=autocast, keep_gradients=engine in KEEPING)


def _measure(local: Local, config: Config, share: Share, *, autocast: bool, keep_gradients: bool) -> Passes:
    decoder = local.decoder
    train, blocks, readout = config.train, list(decoder.stack), decoder.stack.readout
    precision = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    with Tagged(decoder.parameters()) as live, watched(local, live) as calls:
        with precision:  # what the objective does, in two halves
            sequences = torch.zeros((train.micro_batch, config.model.context + 1), dtype=torch.long)
            tokens, targets = sequences[:, :-1], sequences[:, 1:]
            documents = document_numbers(tokens, 0) if train.documents == "isolate" else None
            hidden = decoder.hidden(tokens, documents=documents)
            ended = live.kept().plus(Kept(hidden.nbytes), -1)
            rows, weight = decoder.vocabulary.output_product(hidden)
            if share.tensor > 1:
                loss = RangeLoss.apply(rows, weight, targets, train.loss_rows)
            else:
                loss = chunked_cross_entropy(rows, weight, targets, train.loss_rows)
            del hidden, rows, weight
            lost = live.now
        kept, peak = live.now, live.peak  # autocast has dropped the casts of weights that no one else keeps
    del loss
    context = calls[blocks[0]].context
    shared = sequences.nbytes + sum(tensor.nbytes for tensor in shared_tensors(context))
    edges = [calls[module].kept for module in (*blocks, readout)]
    sent = [calls[module].sent for module in (*blocks, readout)]
    forward = tuple(after.plus(before, -1) for before, after in pairwise(sent))
    backward = []
    for block, talk in zip(blocks, forward, strict=True):
        call, before = calls[block], talked(local).plus(talk)  # its forward pass is run and sends again
        work = backward_work(block, call.history, call.context, precision, keep_gradients=keep_gradients)
        backward.append(Back(work, talked(local).plus(before, -1)))
    shape, dtype = calls[blocks[0]].history[0]
    stream = shape[1:].numel() * dtype.itemsize
    embedding = stream if shape[0] > 1 else 0  # H_0 is a copy of it, and no one keeps it
    return Passes(
        shared=shared,
        start=edges[0].plus(Kept(shared + embedding + lost - kept), -1),
        blocks=tuple(after.plus(before, -1) for before, after in pairwise(edges)),
        end=ended.plus(edges[-1], -1).plus(Kept(embedding)),
        loss=lost - ended.total,
        logits=peak - kept,
        forward=forward,
        backward=tuple(backward),
        stream=stream,
        streams=shape[0],
        keeps_history=blocks[0].pathway.keeps_history,
    )


class Call(NamedTuple):
    """How a block or the readout was called: the shapes of the history, the context, and what was alive."""

    history: History
    context: dict[str, Any]
    kept: Kept
    sent: Talk


def talked(local: Local) -> Talk:
    """All that has been sent so far."""
    return Talk(local.tensor.sent, local.experts.sent)


@contextlib.contextmanager
def watched(local: Local, live: Tagged) -> Iterator[dict[nn.Module, Call]]:
    """Tell `live` who makes what, and note every call of a block and of the readout."""
    calls: dict[nn.Module, Call] = {}
    decoder = local.decoder

    def called(module: nn.Module, history: tuple[Tensor, ...], context: dict[str, Any]) -> None:
        if not calls:  # H_0, which no block has made
            live.mark(history[0], kind)
        calls[module] = Call([(state.shape, state.dtype) for state in history], context, live.kept(), talked(local))
        live.maker = STREAMS

    def closed(module: nn.Module, history: Any, state: Tensor) -> None:
        live.maker = ACTIVATIONS
        live.mark(state, kind)

    def read(module: nn.Module, history: Any, out: Tensor) -> None:
        live.maker = ACTIVATIONS

    def entered(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        live.maker = ACTIVATIONS
        live.mark(given[0], ACTIVATIONS)

    def left(module: nn.Module, given: Any, update: Tensor) -> None:
        live.maker = STREAMS
        live.mark(update, STREAMS)

    blocks = list(decoder.stack)
    kind = HISTORY if blocks[0].pathway.keeps_history else STREAMS
    hooks = [m.register_forward_pre_hook(called, with_kwargs=True) for m in (*blocks, decoder.stack.readout)]
    hooks += [block.register_forward_hook(closed) for block in blocks]
    hooks.append(decoder.stack.readout.register_forward_hook(read))
    for branch in (branch for block in blocks for branch in block.branches):
        module = branch.module if isinstance(branch, NormedBranch) else branch
        hooks += [module.register_forward_pre_hook(entered, prepend=True), module.register_forward_hook(left)]
    yield calls
    for hook in hooks:
        hook.remove()
