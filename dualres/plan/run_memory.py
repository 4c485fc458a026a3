"""Memory of one rank, counted before a GPU is touched: the real model runs on tensors that have sizes and no bytes.

    peak = weights + gradients + moments + the engine's buffers + activations + loss + work

The last three are counted while the objective runs in eager mode, with the fused operators of the pathways and the
CPU's of everything else. `torch.compile` keeps less; what a kernel needs inside and an allocator's fragments are not
seen. So it is an estimate, and no GPU has confirmed it.
"""
# B batch  T tokens

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dualres.config.schema import Config
from dualres.model.block import ResidualBlock, recompute_blocks
from dualres.model.decoder import Decoder, build_decoder
from dualres.model.loss import Objective, chunked_cross_entropy, document_numbers
from dualres.ops import dispatch

ACTIVATIONS = "activations"  # the part that `torch.compile` makes smaller
WIDTH = {"fp32": 4, "bf16": 2}  # bytes
FLOAT32 = 4
# Elements that DeepSpeed sends, and holds gathered, at a time: its defaults.
BUCKET, GATHERED = 500_000_000, 1_000_000_000


History = list[tuple[torch.Size, torch.dtype]]  # of its states


class Part(NamedTuple):
    """One row of a rank's memory."""

    name: str
    bytes: int
    what: str


class Pass(NamedTuple):
    """Bytes of one micro-batch, beside parameters and their kept gradients."""

    activations: int  # that the decoder keeps for the backward pass
    loss: int  # that the loss keeps: the gradients of its inputs
    forward: int  # at most above both for a moment of the forward pass: the logits
    backward: int  # at most above both while the blocks go backward: what one computes again, and gradients


class Call(NamedTuple):
    """How a module was called: the shapes of the history, the context, and the bytes that were alive."""

    history: History
    context: dict[str, Any]
    alive: int


def memory(config: Config, engine: str, ranks: int) -> list[Part]:
    """Of the rank that holds most, at its fullest moment. The sum is the peak."""
    held = HELD[engine](config, build_decoder(config.model, config.residual, device="meta"), ranks)
    counted = count_pass(config, engine)
    busy = "the logits" if counted.forward > counted.backward else "a block's backward pass"
    what = f"{config.train.micro_batch} × {config.model.context} tokens, recompute {config.train.recompute}"
    return [
        *held,
        Part(ACTIVATIONS, counted.activations, what),
        Part("loss", counted.loss, "gradients of hidden states and output weights"),
        Part("work", max(counted.forward, counted.backward), f"at most at a time, for {busy}"),
    ]


def total(parts: list[Part]) -> int:
    """The peak in bytes."""
    return sum(part.bytes for part in parts)


@functools.cache  # for the same model in the hands of more ranks
def count_pass(config: Config, engine: str) -> Pass:
    """Run a micro-batch on tensors without memory."""
    train = config.train
    decoder = build_decoder(config.model, config.residual, device="meta")
    if train.precision == "bf16" and engine in CASTING:
        decoder.to(torch.bfloat16)
    shapes_only = FakeTensorMode(allow_non_fake_inputs=True)  # the parameters on the meta device are no fake ones
    with dispatch.for_shapes(), shapes_only:
        decoder.to_empty(device="cpu")
        recompute_blocks(decoder.stack, train.recompute)
        objective = Objective(decoder, train.loss_rows, 0 if train.documents == "isolate" else None)
        autocast = train.precision == "bf16" and engine not in CASTING
        sequences = train.micro_batch, config.model.context + 1
        return measure(objective, sequences, autocast=autocast, keep_gradients=engine in KEEPING)


def measure(objective: Objective, shape: tuple[int, int], *, autocast: bool, keep_gradients: bool) -> Pass:
    """Count a forward pass of sequences (B,T+1), then the backward pass of the block that takes most."""
    decoder = objective.decoder
    blocks, readout = list(decoder.stack), decoder.stack.readout
    seen: dict[nn.Module, Call] = {}

    def note(module: nn.Module, history: tuple[Tensor, ...], context: dict[str, Any]) -> None:
        seen[module] = Call([(state.shape, state.dtype) for state in history], context, live.now)

    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in (*blocks, readout)]
    precision = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    with Live(decoder.parameters()) as live:
        with precision:  # what the objective does, in two halves
            sequences = torch.zeros(shape, dtype=torch.long)
            tokens, targets = sequences[:, :-1], sequences[:, 1:]
            ends = objective.end_of_text
            hidden = decoder.hidden(tokens, documents=None if ends is None else document_numbers(tokens, ends))
            before = live.now - hidden.nbytes
            rows, weight = decoder.vocabulary.output_product(hidden)
            loss = chunked_cross_entropy(rows.flatten(0, 1), weight, targets.flatten(), objective.loss_rows)
            del hidden, rows, weight
            by_loss = live.now - before
        kept, peak = live.now, live.peak  # autocast has dropped the casts of weights that no one else keeps
    for hook in hooks:
        hook.remove()
    del loss
    most = max(len(block.branches) for block in blocks)
    # The last sees the longest history; where it is a short one, the last of full length may take more.
    candidates = {blocks[-1], [block for block in blocks if len(block.branches) == most][-1]}
    backward = max(
        backward_work(block, seen[block].history, seen[block].context, precision, keep_gradients=keep_gradients)
        for block in candidates
    )
    by_readout = before - seen[readout].alive  # gone when the blocks' turn comes
    return Pass(kept - by_loss, by_loss, peak - kept, max(0, backward - by_readout))


def backward_work(
    block: ResidualBlock,
    history: History,
    context: dict[str, Any],
    precision: contextlib.AbstractContextManager[Any],
    *,
    keep_gradients: bool,
) -> int:
    """The most that a block's backward pass holds above what its forward pass has left, which is run too."""
    states = [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape, dtype in history]
    older = [*block.parameters(), *states, *shared_tensors(context)]
    if keep_gradients:
        for parameter in block.parameters():
            parameter.grad = torch.zeros_like(parameter)
            older.append(parameter.grad)
    with Live(older) as live:
        with precision:
            out = block(*states, **context)
        left = live.now - out.nbytes
        for state in states:  # what later blocks and the readout have sent back
            state.grad = torch.zeros_like(state)
        out.backward(torch.zeros_like(out))
        return live.peak - left


def shared_tensors(context: dict[str, Any]) -> list[Tensor]:
    """What all blocks are called with: rotary tables and a mask."""
    return [value for value in vars(context["context"]).values() if isinstance(value, Tensor)]


class Live(TorchDispatchMode):
    """Bytes of the tensors that were made inside and are alive: `now`, and at most. `older` ones do not count."""

    def __init__(self, older: Iterable[Tensor]):
        super().__init__()
        self.now = self.peak = 0
        self.older = [tensor.untyped_storage() for tensor in older]
        self.known = {storage._cdata for storage in self.older}
        self.alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._see(tensor.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address in self.known:  # a view, or changed in place
            return

        def gone(_: object) -> None:
            self.known.discard(address)
            del self.alive[address]
            self.now -= size

        self.known.add(address)
        self.alive[address] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


def _whole(config: Config, decoder: Decoder, ranks: int) -> list[Part]:
    """Everything on every rank."""
    return _state([p.numel() for p in decoder.parameters()])


def _ddp(config: Config, decoder: Decoder, ranks: int) -> list[Part]:
    weights, gradients, moments = _whole(config, decoder, ranks)
    return [weights, gradients, moments, Part("buckets", gradients.bytes, "DDP's copy of the gradients")]


def _fsdp2(config: Config, decoder: Decoder, ranks: int) -> list[Part]:
    """Every parameter is cut along its first axis; the first rank has no less than any other."""
    cut = [-(-p.shape[0] // ranks) * (p.numel() // p.shape[0]) for p in decoder.parameters()]
    blocks = sorted(sum(p.numel() for p in block.parameters()) for block in decoder.stack)
    root = sum(p.numel() for p in decoder.parameters()) - sum(blocks)
    precision = config.train.precision
    gathered = (root + sum(blocks[-2:])) * WIDTH[precision]
    return [
        *_state(cut),
        Part("gathered", gathered, f"{precision} weights of a block, of the next, and of what is in none"),
        Part("reducing", blocks[-1] * FLOAT32, "float32 gradients of a block, before each rank takes its share"),
    ]


def _deepspeed(config: Config, decoder: Decoder, ranks: int) -> list[Part]:
    """By the arithmetic of ZeRO, with the buffers that are DeepSpeed's defaults."""
    stage, precision = config.train.parallel.zero_stage, config.train.precision
    count, width = sum(p.numel() for p in decoder.parameters()), WIDTH[precision]
    share = -(-count // ranks)
    gradients = share if stage >= 2 else 2 * count  # of this micro-batch and of those before
    parts = [
        Part("weights", (share if stage == 3 else count) * width, f"{precision}, ZeRO {stage}"),
        Part("gradients", gradients * width, f"{precision}, ZeRO {stage}"),
        Part("moments", 3 * share * FLOAT32, "two of AdamW and float32 weights, sharded"),
        Part("bucket", BUCKET * width, "gradients on their way between ranks"),
    ]
    return [*parts, Part("gathered", min(count, GATHERED) * width, "weights in use")] if stage == 3 else parts


def _state(sizes: list[int]) -> list[Part]:
    weights = sum(sizes) * FLOAT32
    return [
        Part("weights", weights, "float32"),
        Part("gradients", weights, "float32"),
        Part("moments", 2 * weights + len(sizes) * FLOAT32, "two of AdamW, float32"),  # and a step count per tensor
    ]


HELD: dict[str, Callable[[Config, Decoder, int], list[Part]]] = {
    "single": _whole,
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "deepspeed": _deepspeed,
}
CASTING = {"fsdp2", "deepspeed"}  # weights are bfloat16 in forward passes; with the others autocast makes copies
KEEPING = {"single", "ddp"}  # gradients of all parameters stay until the step
