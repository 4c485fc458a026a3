"""Memory of one rank on a mesh, by part. The sum is the peak.

Without a pipeline FSDP2 holds the gathered weights of two blocks and the root's; with one, all weights and gradients of
a rank's chunks stay gathered through a step, and several micro-batches are on their way.
"""

from collections.abc import Iterator
from typing import NamedTuple

from dualres.config.schema import Config
from dualres.parallel.mesh import Mesh
from dualres.parallel.pipeline import micro_batches
from dualres.plan.passes import Kept, Passes
from dualres.plan.ranks import Chunk
from dualres.plan.run_memory import CASTING, FLOAT32, WIDTH
from dualres.plan.schedule import Flight, Held, actions_of, in_flight
from dualres.plan.weights import Unit


class Memory(NamedTuple):
    """Bytes of one rank at its fullest moment."""

    weights: int  # float32, this rank's shards
    gathered: int  # in use, in the precision of the products
    gradients: int  # float32, shards
    whole_gradients: int  # before every rank takes its share
    optimizer: int  # AdamW's two moments
    activations: int
    history: int  # states that this rank has made
    live: int  # streams inside blocks, and states of methods without history
    pipeline: int  # states received, gradients of states, and what was sent as long as the schedule holds it
    loss: int  # gradients of hidden states and output weights
    work: int  # at most for a moment: logits, or a block's backward pass

    @property
    def total(self) -> int:
        """The peak."""
        return sum(self)


WHAT = {
    "weights": "float32, sharded",
    "gathered": "weights in use",
    "gradients": "float32, sharded",
    "whole_gradients": "before each rank takes its share",
    "optimizer": "AdamW's moments, float32, sharded",
    "activations": "kept by branches",
    "history": "states H_0 … H_b made here",
    "live": "streams and branch outputs",
    "pipeline": "states and gradients on their way",
    "loss": "gradients of its inputs",
    "work": "logits or a block's backward",
}


def memory(
    config: Config, mesh: Mesh, chunks: tuple[Chunk, ...], passes: Passes, rank: int, engine: str = "fsdp2"
) -> Memory:
    """Of the first rank with this place in the pipeline."""
    everything = [weight for chunk in chunks for weight in chunk.weights.all]
    shards = sum(weight.shard(mesh) for weight in everything) * FLOAT32
    held = {"weights": shards, "gradients": shards, "optimizer": 2 * shards + len(everything) * FLOAT32}
    width = WIDTH[config.train.precision]
    if mesh.pipeline == 1:
        return Memory(**held, **_sharded(chunks[0], width, engine), **_alone(chunks[0], passes))
    return Memory(**held, **_on_their_way(config, mesh, chunks, passes, rank))


def least_memory(mesh: Mesh, chunks: tuple[Chunk, ...], width: int, engine: str) -> int:
    """Bytes that a rank holds at least, whatever its micro-batches keep: of a pipeline, when a chunk has gone back."""
    state = 4 * FLOAT32 * sum(weight.shard(mesh) for chunk in chunks for weight in chunk.weights.all)
    if mesh.pipeline == 1:
        return state + sum(_sharded(chunks[0], width, engine).values())
    return state + min(
        width * sum(map(_whole, chunk.weights.units)) + FLOAT32 * sum(map(_whole, chunk.weights.blocks[1:]))
        for chunk in chunks
    )


def _sharded(chunk: Chunk, width: int, engine: str) -> dict[str, int]:
    """Of two blocks at a time."""
    if engine not in CASTING:
        return {"gathered": 0, "whole_gradients": 0}
    blocks = sorted(_whole(unit) for unit in chunk.weights.blocks)
    gathered = (_whole(chunk.weights.root) + sum(blocks[-2:])) * width
    return {"gathered": gathered, "whole_gradients": blocks[-1] * FLOAT32}


def _whole(unit: Unit) -> int:
    return sum(weight.elements for weight in unit)


def _alone(chunk: Chunk, passes: Passes) -> dict[str, int]:
    """One micro-batch at a time, in a whole model."""
    kept = chunk.kept(passes).plus(Kept(passes.loss), -1)
    by_readout = passes.end.total  # gone when the blocks' turn comes
    back = max(back.work for back in passes.backward) - by_readout
    return {**kept._asdict(), "pipeline": 0, "loss": passes.loss, "work": max(passes.logits, back, 0)}


def _on_their_way(config: Config, mesh: Mesh, chunks: tuple[Chunk, ...], passes: Passes, rank: int) -> dict[str, int]:
    """Several micro-batches, at the fullest moment of the last one's way back."""
    train = config.train
    count = micro_batches(train.global_batch, train.micro_batch, mesh)
    held = {chunk.number: _held(chunk, passes, mesh) for chunk in chunks}
    flight = in_flight(actions_of(mesh, count, rank), mesh.pipeline, held)
    kept, received, losses = Kept(), 0, 0
    for chunk in chunks:
        times, loss = flight.kept[chunk.number], passes.loss if chunk.leaving is None else 0
        losses += loss * times
        kept = kept.plus(chunk.kept(passes).plus(Kept(loss), -1), times)
        received += chunk.received(passes) * times + held[chunk.number].left * flight.left[chunk.number]
        received += held[chunk.number].done * flight.done[chunk.number]
    received += max(chunk.sent(passes) for chunk in chunks)
    if mesh.virtual > 1:  # the interleaved schedule asks for the next states before it needs them
        received += max(chunk.received(passes) for chunk in chunks)
    width = WIDTH[train.precision]
    moments = _back(chunks, passes, width, flight)
    moment = max(moments, key=lambda moment: moment.gathered + moment.whole + moment.work - moment.freed.total)
    return {
        **kept.plus(moment.freed, -1)._asdict(),
        "gathered": moment.gathered,
        "whole_gradients": moment.whole,
        "pipeline": received,
        "loss": losses,
        "work": moment.work,
    }


def _held(chunk: Chunk, passes: Passes, mesh: Mesh) -> Held:
    """PyTorch's interleaved schedule lets go of what it has sent, states and gradients, when a step ends."""
    sent = chunk.sent(passes) + chunk.received(passes) if mesh.virtual > 1 else 0
    return Held(chunk.kept(passes).total + chunk.received(passes), chunk.left(passes), sent)


class Moment(NamedTuple):
    """While a micro-batch goes back, bytes."""

    gathered: int
    whole: int  # gradients
    work: int
    freed: Kept  # by the blocks that have gone back


def _back(chunks: tuple[Chunk, ...], passes: Passes, width: int, flight: Flight) -> Iterator[Moment]:
    """Weights that were given back after the forward pass are gathered again, block by block, and stay."""
    (chunk,) = (chunk for chunk in chunks if chunk.number == flight.coming)
    others = [other for other in chunks if other is not chunk]
    last = chunk.leaving is None
    blocks = [_whole(unit) for unit in chunk.weights.blocks]
    root, everything = _whole(chunk.weights.root), sum(map(_whole, chunk.weights.units))
    gathered = root + sum(_whole(o.weights.root) for o in others)
    gathered += sum(sum(map(_whole, o.weights.blocks)) for o in others if o.number in flight.gathered)
    summed = sum(sum(map(_whole, o.weights.units)) for o in others if o.number in flight.summed)
    again = chunk.number in flight.summed
    if last:
        whole = summed + (everything if again else 0)
        yield Moment((gathered + sum(sorted(blocks)[-2:])) * width, whole * FLOAT32, passes.logits, Kept())
    freed = passes.end if last else Kept()
    for at in reversed(range(len(blocks))):
        there = gathered + sum(blocks[max(0, at - 1) :])  # the next is on its way
        whole = summed + (everything if again else sum(blocks[at + 1 :]) + root * last)  # its own are in its work
        yield Moment(there * width, whole * FLOAT32, passes.backward[chunk.blocks[at]].work, freed)
        freed = freed.plus(passes.blocks[chunk.blocks[at]])
