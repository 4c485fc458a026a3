"""One pipeline rank of a mesh: its chunks of blocks, their weights as FSDP2 shards them, what it exchanges and when.

FSDP2 gathers one residual block at a time; parameters outside of blocks (vocabulary, readout, norm) are the root's.
Passes run in PyTorch's order: 1F1B if a rank has one chunk, interleaved 1F1B if it has several. C = P·V chunks; chunk c
is on rank c mod P.
"""
# J streams  P pipeline ranks  V chunks of a rank

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import nn
from torch.distributed.pipelining.schedules import (
    FORWARD,
    FULL_BACKWARD,
    RESHARD,
    _Action,
    _add_unshard_reshard,
    _ComputationType,
)

from dualres.config.schema import Config, ModelConfig, ResidualConfig
from dualres.parallel.mesh import Mesh, chunk_sizes
from dualres.parallel.pipeline import Boundary, boundaries, micro_batches
from dualres.plan.activations import Memory, Passes
from dualres.plan.local_model import Share, local_model


class Weight(NamedTuple):
    """One parameter on a rank, before FSDP2 shards it."""

    shape: tuple[int, ...]
    expert: bool  # belongs to experts that are divided over ranks, so it is sharded over fewer
    whole: bool  # replicated on every rank of a tensor group
    vocabulary: bool
    uneven: bool  # a range of a vocabulary whose size the tensor group does not divide

    def ranks(self, mesh: Mesh) -> int:
        """Number of ranks that FSDP2 shards it over."""
        return mesh.rest if self.expert else mesh.data

    def shard(self, mesh: Mesh) -> int:
        """Elements on the first rank, which has the most, with padding."""
        n = self.ranks(mesh)
        along = 1 if self.uneven or (self.expert and self.shape[1] % n == 0) else 0
        return -(-self.shape[along] // n) * (self.elements // self.shape[along])

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


Unit = tuple[Weight, ...]  # gathered together


def elements(*units: Unit) -> int:
    return sum(weight.elements for unit in units for weight in unit)


class ModelUnits(NamedTuple):
    """A rank's share of the weights of a model without a pipeline."""

    blocks: tuple[Unit, ...]
    embedding: Unit
    output: Unit  # the embedding if they are tied
    readout: Unit  # with the final norm


@functools.cache
def model_units(model: ModelConfig, residual: ResidualConfig, share: Share) -> ModelUnits:
    decoder, tensor, experts = local_model(model, residual, share)
    stack, vocabulary, divided = decoder.stack, decoder.vocabulary, tensor.divided | experts.divided
    table = {id(p) for p in vocabulary.parameters()}
    uneven = divided & table if model.vocab_size % share.tensor else set()

    def unit(*parts: nn.Module | None) -> Unit:
        return tuple(
            Weight(tuple(p.shape), id(p) in experts.divided, id(p) not in divided, id(p) in table, id(p) in uneven)
            for part in parts
            if part is not None
            for p in part.parameters()
        )

    tied = vocabulary.output is None
    embedding = unit(vocabulary) if tied else unit(vocabulary.table, vocabulary.widen)
    output = embedding if tied else unit(vocabulary.output, vocabulary.narrow)
    return ModelUnits(tuple(map(unit, stack)), embedding, output, unit(stack.readout, decoder.norm))


class PlannedChunk(NamedTuple):
    """Consecutive blocks on a pipeline rank; without a pipeline, the whole model."""

    number: int
    blocks: range
    first: bool  # has the embedding
    last: bool  # has the readout and the loss
    received: int  # bytes of a micro-batch: states received, and gradients sent back
    sent: int  # bytes of a micro-batch: states sent, and gradients received back
    left: int  # bytes of the gradients of cached states that a micro-batch leaves for an earlier chunk of the rank
    units: tuple[Unit, ...]  # one per block
    root: Unit
    passes: Passes

    @property
    def weights(self) -> list[Weight]:
        return [weight for unit in (*self.units, self.root) for weight in unit]

    @property
    def kept(self) -> Memory:
        """Memory that a micro-batch keeps here for its backward pass, without received states."""
        passes = self.passes
        parts = [Memory(activations=passes.shared), *(passes.blocks[b] for b in self.blocks)]
        parts += [passes.start] if self.first else []
        parts += [passes.end] if self.last else []
        if passes.streams > 1 and passes.keeps_history:
            if not self.first:  # H_0 arrives as one stream
                parts.append(Memory(history=passes.state))
            elif not self.last:  # and leaves as one
                parts.append(Memory(history=passes.stream))
        return functools.reduce(Memory.plus, parts)._replace(work=0)


class PipelineRank(NamedTuple):
    """The first rank at one position of the pipeline, with everything a plan needs to know."""

    config: Config
    engine: str
    mesh: Mesh
    number: int
    chunks: tuple[PlannedChunk, ...]
    passes: Passes

    @property
    def weights(self) -> list[Weight]:
        return [weight for chunk in self.chunks for weight in chunk.weights]

    @property
    def width(self) -> int:
        """Bytes of an element in train.precision."""
        return 2 if self.config.train.precision == "bf16" else 4

    @property
    def micro_batches(self) -> int:
        return micro_batches(self.config.train.global_batch, self.config.train.micro_batch, self.mesh)

    @property
    def between_stages(self) -> int:
        """Bytes of one micro-batch: states to the next pipeline rank, gradients to the one before."""
        return sum(chunk.sent + chunk.received for chunk in self.chunks)


def pipeline_ranks(
    config: Config, engine: str, mesh: Mesh, passes: Passes, *, resend: bool = False
) -> list[PipelineRank]:
    """All positions of the pipeline; `resend`, for comparison: no rank caches states, so all are sent again."""
    sizes = chunk_sizes(config, mesh)
    crossing = boundaries(sizes, mesh.pipeline, keeps_history=passes.keeps_history, resend=resend)
    nothing = Boundary((), ())
    model = model_units(config.model, config.residual, Share(mesh.tensor, mesh.expert_ranks))

    def size(states: tuple[int, ...]) -> int:
        """Bytes of states: H_0 is one stream, the others J."""
        return sum(passes.stream if state == 0 else passes.state for state in states)

    chunks, start = [], 0
    for number, (arriving, leaving) in enumerate(pairwise([nothing, *crossing, nothing])):
        first, last = number == 0, number == len(crossing)
        root = model.embedding if first else ()
        if last:
            root += (() if first and config.model.tied_embeddings else model.output) + model.readout
        blocks = range(start, start + sizes[number])
        moved = size(arriving.sent), size(leaving.sent), size(arriving.cached)
        units = model.blocks[blocks.start : blocks.stop]
        chunks.append(PlannedChunk(number, blocks, first, last, *moved, units, root, passes))
        start = blocks.stop
    return [
        PipelineRank(config, engine, mesh, number, tuple(chunks[number :: mesh.pipeline]), passes)
        for number in range(mesh.pipeline)
    ]


@functools.cache
def actions(mesh: Mesh, count: int, rank: int) -> tuple[_Action, ...]:
    """All passes of a pipeline rank for `count` micro-batches."""
    ranks, virtual, total = mesh.pipeline, mesh.virtual, mesh.virtual * count
    per_round = count // max(1, count // ranks)
    if virtual == 1:
        warmup = min(count, ranks - rank)  # micro-batches in flight when the first runs backward
    else:
        warmup = min((virtual - 1) * per_round + 2 * (ranks - 1 - rank), total)
    order: list[_Action] = []

    def add(kind: _ComputationType, step: int) -> None:
        turn = step // per_round % virtual
        order.append(_Action((turn if kind == FORWARD else virtual - 1 - turn) * ranks + rank, kind))

    for step in range(warmup):
        add(FORWARD, step)
    for step in range(total):  # PyTorch's 1F1B runs backward first, the interleaved schedule forward
        if virtual == 1:
            add(FULL_BACKWARD, step)
        if step + warmup < total:
            add(FORWARD, step + warmup)
        if virtual > 1:
            add(FULL_BACKWARD, step)
    return tuple(order)


class InFlight(NamedTuple):
    """What a rank holds at one moment of a step."""

    kept: Counter[int]  # micro-batches of each chunk between forward and backward
    left: Counter[int]  # after backward, with gradients of states that an earlier chunk of the rank still waits for
    done: Counter[int]  # after backward
    summed: frozenset[int]  # chunks that have run backward and so have gradients of their weights
    gathered: frozenset[int]  # chunks that ran backward last and will run again: their blocks stay gathered
    next_backward: int  # the chunk that runs backward next


class ChunkBytes(NamedTuple):
    """Bytes of one micro-batch in one chunk."""

    kept: int  # between forward and backward
    left: int  # after backward, until the rank's previous chunk has run backward
    done: int  # after backward, until the end of the step


def in_flight(order: Sequence[_Action], ranks: int, size_of: Mapping[int, ChunkBytes]) -> InFlight:
    """The moment at which a rank holds the most bytes."""
    kept, waiting, done = Counter[int](), Counter[int](), Counter[int]()
    peak = kept, waiting, done
    top = size = moment = 0
    for at, (chunk, kind, *_) in enumerate(order, 1):
        if kind == FORWARD:
            kept[chunk] += 1
            size += size_of[chunk].kept
        else:
            kept[chunk] -= 1
            waiting[chunk] += 1
            done[chunk] += 1
            size += size_of[chunk].left + size_of[chunk].done - size_of[chunk].kept
            if chunk + ranks in size_of:
                waiting[chunk + ranks] -= 1
                size -= size_of[chunk + ranks].left
        if size >= top and kept.total():
            top, moment, peak = size, at, (kept.copy(), waiting.copy(), done.copy())
    last, later = dict(action[:2] for action in order[:moment]), {action.stage_index for action in order[moment:]}
    return InFlight(
        *peak,
        frozenset(chunk for chunk, kind, *_ in order[:moment] if kind == FULL_BACKWARD),
        frozenset(chunk for chunk, kind in last.items() if kind == FULL_BACKWARD and chunk in later),
        next(chunk for chunk, kind, *_ in order[moment:] if kind == FULL_BACKWARD),
    )


@functools.cache
def gathers(mesh: Mesh, count: int, chunk: int) -> tuple[int, int]:
    """How often FSDP2 gathers the weights of a chunk's blocks and of its root in a step of `count` micro-batches.

    Blocks reshard after a forward pass; in a pipeline, not after a backward pass, and the root stays gathered. If a
    rank has several chunks, PyTorch also prefetches weights and reshards those of chunks that are not next.
    """
    if mesh.pipeline == 1:  # forward and backward; the root keeps its weights between them
        return 2 * count, count
    order = actions(mesh, count, chunk % mesh.pipeline)
    blocks = root = 0
    whole = whole_root = False
    for action in _add_unshard_reshard([*order]) if mesh.virtual > 1 else order:
        if action.stage_index != chunk:
            continue
        if action.computation_type == RESHARD:
            whole = whole_root = False
            continue
        blocks, root = blocks + (not whole), root + (not whole_root)
        whole, whole_root = action.computation_type != FORWARD, True
    return blocks, root
