"""Bytes that a rank sends in one training step, by kind: what each collective must move, whatever carries it.

    gather, scatter, exchange:  (n−1)/n of the whole message        sum:  2 (n−1)/n of it

Ranks of a group send alike, but for uneven shards: this is the first of each pipeline rank. Rows to experts are those
of a uniform routing.
"""
# B batch  T tokens  E table width  n ranks of a group

import functools
from typing import NamedTuple

from dualres.config.schema import Config
from dualres.parallel.mesh import Mesh
from dualres.parallel.pipeline import micro_batches
from dualres.plan.local_model import part_of
from dualres.plan.passes import Passes, Talk
from dualres.plan.ranks import Chunk
from dualres.plan.run_memory import FLOAT32, WIDTH
from dualres.plan.schedule import Gathers, actions_of, gathers

FLOAT64 = 8


class Sent(NamedTuple):
    """Bytes of one step."""

    weights: int  # FSDP2 gathers them
    gradients: int  # FSDP2 scatters their sums
    tensor: int  # inputs and outputs of branches, embedding and loss, within a tensor group
    experts: int  # rows to the experts and back
    pipeline: int  # states to the next pipeline rank, and their gradients back
    shared: int  # gradients of weights that several ranks hold whole, once a step
    control: int  # the gradient's norm

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


class Sharded(NamedTuple):
    """Bytes of one step that FSDP2 moves, by the ranks that shard the weights."""

    weights: tuple[int, int]  # gathered, of what all data-parallel ranks shard and of experts
    gradients: tuple[int, int]


def sharded(config: Config, mesh: Mesh, chunks: tuple[Chunk, ...], rank: int) -> Sharded:
    """By the first rank with this place in the pipeline."""
    train = config.train
    width, count = WIDTH[train.precision], micro_batches(train.global_batch, train.micro_batch, mesh)
    weights, gradients = [0, 0], [0, 0]
    for chunk in chunks:
        times = _gathers(mesh, count, rank, chunk.number)
        units = [(unit, times.blocks) for unit in chunk.weights.blocks] + [(chunk.weights.root, times.root)]
        for unit, gathered in units:
            for weight in unit:
                moved = weight.shard(mesh) * (weight.ranks(mesh) - 1)  # by each rank, of what is cut and padded
                weights[weight.expert] += gathered * width * moved
                gradients[weight.expert] += (1 if mesh.pipeline > 1 else count) * FLOAT32 * moved
    return Sharded((weights[0], weights[1]), (gradients[0], gradients[1]))


def sent(config: Config, mesh: Mesh, chunks: tuple[Chunk, ...], passes: Passes, rank: int) -> Sent:
    """By the first rank with this place in the pipeline."""
    count = micro_batches(config.train.global_batch, config.train.micro_batch, mesh)
    talk, shared = Talk(), 0
    for chunk in chunks:
        talk = talk.plus(chunk_talk(config, mesh, chunk, passes), count)
        shared += _shared(config, mesh, chunk)
    moved = sharded(config, mesh, chunks, rank)
    pipeline = count * handed_on(chunks, passes)
    control = part_of(2 * FLOAT64, mesh.processes)
    return Sent(sum(moved.weights), sum(moved.gradients), talk.tensor, talk.experts, pipeline, shared, control)


def handed_on(chunks: tuple[Chunk, ...], passes: Passes) -> int:
    """Between pipeline ranks, of one micro-batch: states to the next, gradients to the one before."""
    return sum(chunk.sent(passes) + chunk.received(passes) for chunk in chunks)


def chunk_talk(config: Config, mesh: Mesh, chunk: Chunk, passes: Passes) -> Talk:
    """Within tensor groups and between experts, of one micro-batch, forward and backward."""
    found = Talk()
    for b in chunk.blocks:
        found = found.plus(passes.forward[b]).plus(passes.backward[b].sent)
    model, train = config.model, config.train
    tokens = train.micro_batch * model.context
    rows = tokens * (model.embedding_width or model.width) * WIDTH[train.precision]
    ends = (chunk.arriving is None) + (chunk.leaving is None)
    found = found.plus(Talk(2 * part_of(rows, mesh.tensor)), ends)
    if chunk.leaving is None:  # the log-partition of its range and the target's logit, to all others
        found = found.plus(Talk(tokens * 2 * FLOAT32 * (mesh.tensor - 1)))
    return found


@functools.cache
def _gathers(mesh: Mesh, count: int, rank: int, chunk: int) -> Gathers:
    if mesh.pipeline == 1:
        return Gathers(2 * count, count)  # forward and backward; the root keeps them between
    return gathers(actions_of(mesh, count, rank), chunk)


def _shared(config: Config, mesh: Mesh, chunk: Chunk) -> int:
    whole = sum(weight.shard(mesh) for weight in chunk.weights.all if weight.whole) * FLOAT32
    found = part_of(2 * whole, mesh.tensor)
    ends = chunk.arriving is None or chunk.leaving is None
    if mesh.pipeline > 1 and ends and config.model.tied_embeddings:
        found += sum(weight.shard(mesh) for weight in chunk.weights.all if weight.vocabulary) * FLOAT32
    return found
