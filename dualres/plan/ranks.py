"""One pipeline rank of a mesh: its chunks, their weights, what arrives and leaves, what a micro-batch keeps there."""
# J streams  P pipeline ranks  V chunks of a rank

import dataclasses
from typing import NamedTuple

from dualres.config.schema import Config, ParallelConfig
from dualres.parallel.mesh import Mesh, chunk_sizes
from dualres.parallel.pipeline import Boundary, boundaries
from dualres.plan.local_model import Share
from dualres.plan.passes import Kept, Passes
from dualres.plan.weights import Weights, units_of


class Chunk(NamedTuple):
    """Some blocks that follow each other."""

    number: int
    blocks: range
    arriving: Boundary | None  # None: it embeds
    leaving: Boundary | None  # None: it reads out and has the loss
    weights: Weights

    def received(self, passes: Passes) -> int:
        """Bytes of the states that a micro-batch brings, and of the gradients that it sends back."""
        return 0 if self.arriving is None else state_bytes(self.arriving.sent, passes)

    def sent(self, passes: Passes) -> int:
        """Bytes of the states that leave, and of the gradients that come back."""
        return 0 if self.leaving is None else state_bytes(self.leaving.sent, passes)

    def left(self, passes: Passes) -> int:
        """Bytes of the gradients that a micro-batch leaves for an earlier chunk of the rank, of states that it kept."""
        return 0 if self.arriving is None else state_bytes(self.arriving.cached, passes)

    def kept(self, passes: Passes) -> Kept:
        """What a micro-batch keeps here for its backward pass, without what it has received."""
        found = Kept(passes.shared)
        for b in self.blocks:
            found = found.plus(passes.blocks[b])
        if self.arriving is None:
            found = found.plus(passes.start)
        if self.leaving is None:
            found = found.plus(passes.end).plus(Kept(passes.loss))
        several = passes.streams > 1 and passes.keeps_history
        if several and self.arriving is not None:  # H_0 came as one stream
            found = found.plus(Kept(history=passes.state))
        if several and self.arriving is None and self.leaving is not None:  # and leaves so
            found = found.plus(Kept(history=passes.stream))
        return found


def state_bytes(states: tuple[int, ...], passes: Passes) -> int:
    """H_0 as one stream, others as J."""
    return sum(passes.stream if state == 0 else passes.state for state in states)


def chunks_of(config: Config, mesh: Mesh, *, keeps_history: bool, resend: bool = False) -> list[tuple[Chunk, ...]]:
    """The chunks of every pipeline rank; `resend` is a pipeline in which no rank keeps anything, for comparison."""
    sizes, ranks = chunk_sizes(config, mesh), mesh.pipeline
    crossing = boundaries(sizes, ranks, keeps_history=keeps_history, resend=resend)
    between: list[Boundary | None] = [None, *crossing, None]
    units = units_of(config.model, config.residual, Share(mesh.tensor, mesh.expert_ranks))
    found: list[list[Chunk]] = [[] for _ in range(ranks)]
    start = 0
    for number, size in enumerate(sizes):
        blocks = range(start, start + size)
        weights = units.chunk(blocks, first=number == 0, last=number == len(sizes) - 1)
        found[number % ranks].append(Chunk(number, blocks, between[number], between[number + 1], weights))
        start += size
    return [tuple(chunks) for chunks in found]


def plain(config: Config) -> Config:
    """The same for every mesh: what is counted of the model alone is counted once."""
    return dataclasses.replace(config, train=dataclasses.replace(config.train, parallel=ParallelConfig()))
