"""The weights of a rank as FSDP2 holds them: in units that are gathered together, each tensor cut and padded.

A unit is a residual block; what is in none is the root's: vocabulary, readout and final norm.
"""

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from dualres.config.schema import ModelConfig, ResidualConfig
from dualres.model.attention import Attention
from dualres.model.decoder import Decoder
from dualres.model.feedforward import FeedForward
from dualres.model.moe import MoE
from dualres.parallel.mesh import Mesh
from dualres.plan.local_model import Share, local_decoder


class Weight(NamedTuple):
    """One parameter on a rank, before FSDP2 cuts it."""

    shape: tuple[int, ...]
    expert: bool  # of an expert that other ranks do not have: sharded over fewer ranks
    whole: bool  # on every rank of a tensor group
    vocabulary: bool
    uneven: bool  # a range of a vocabulary that a tensor group does not divide

    def ranks(self, mesh: Mesh) -> int:
        """That FSDP2 shards it over."""
        return mesh.rest if self.expert else mesh.data

    def shard(self, mesh: Mesh) -> int:
        """Elements that a rank keeps; the first has no less than any other."""
        n = self.ranks(mesh)
        along = 1 if self.uneven or (self.expert and self.shape[1] % n == 0) else 0
        return -(-self.shape[along] // n) * (self.elements // self.shape[along])

    @property
    def elements(self) -> int:
        """Of it all."""
        return math.prod(self.shape)


Unit = tuple[Weight, ...]


class Units(NamedTuple):
    """The weights of a whole model, by unit."""

    blocks: tuple[Unit, ...]
    into: Unit  # the vocabulary that embeds
    out: Unit  # that makes logits; the same where they are tied
    readout: Unit  # and the final norm
    tied: bool

    def chunk(self, blocks: range, *, first: bool, last: bool) -> "Weights":
        """Of these blocks; the first chunk embeds, the last reads out and has the loss."""
        vocabulary = self.into if first else ()
        if last and not (first and self.tied):
            vocabulary += self.out
        return Weights(self.blocks[blocks.start : blocks.stop], vocabulary + (self.readout if last else ()))


class Weights(NamedTuple):
    """Of one chunk of a pipeline, or of the whole model where there is none."""

    blocks: tuple[Unit, ...]
    root: Unit

    @property
    def units(self) -> tuple[Unit, ...]:
        """All."""
        return (*self.blocks, self.root)

    @property
    def all(self) -> list[Weight]:
        """Every weight."""
        return [weight for unit in self.units for weight in unit]


@functools.cache
def units_of(model: ModelConfig, residual: ResidualConfig, share: Share) -> Units:
    """All of a rank's share of the model."""
    decoder = local_decoder(model, residual, share).decoder
    stack, vocabulary, cut = decoder.stack, decoder.vocabulary, _cut(decoder)
    experts = {id(p) for p in _experts(decoder)} if share.experts > 1 else set()
    table = {id(p) for p in vocabulary.parameters()}
    uneven = cut & table if model.vocab_size % share.tensor else set()

    def unit(*parts: nn.Module | None) -> Unit:
        return tuple(
            Weight(tuple(p.shape), id(p) in experts, id(p) not in cut | experts, id(p) in table, id(p) in uneven)
            for part in parts
            if part is not None
            for p in part.parameters()
        )

    tied = vocabulary.output is None
    into = unit(vocabulary) if tied else unit(vocabulary.table, vocabulary.widen)
    out = unit(vocabulary) if tied else unit(vocabulary.output, vocabulary.narrow)
    return Units(tuple(unit(block) for block in stack), into, out, unit(stack.readout, decoder.norm), tied)


def _experts(decoder: Decoder) -> Iterator[nn.Parameter]:
    for module in decoder.modules():
        if isinstance(module, MoE):
            yield from (module.gate_up, module.down)


def _cut(decoder: Decoder) -> set[int]:
    """The parameters that a tensor group divides."""
    vocabulary = decoder.vocabulary
    found: list[nn.Module | None] = [vocabulary.table, vocabulary.output]
    for module in decoder.modules():
        if isinstance(module, Attention):
            found += [module.query, module.key, module.value, module.output]
        elif isinstance(module, FeedForward):
            found += [module.gate, module.up, module.down]
    return {id(p) for module in found if module is not None for p in module.parameters()}
