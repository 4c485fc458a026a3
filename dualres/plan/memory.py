"""Memory of one rank, by part, for every engine and mesh. The parts add up to the peak.

Without a pipeline, FSDP2 holds the gathered weights of two blocks and of the root; with one, all weights and gradients
of a rank's chunks stay gathered through a step, and several micro-batches are in flight. `torch.compile` keeps fewer
activations; kernel workspaces, NCCL's buffers and allocator fragmentation are not counted.
"""

import math
from collections.abc import Iterator

from dualres.plan.activations import Memory
from dualres.plan.stages import ChunkBytes, InFlight, PipelineRank, actions, elements, in_flight

FLOAT32 = 4  # bytes
DEEPSPEED_BUCKET, DEEPSPEED_GATHERED = 500_000_000, 1_000_000_000  # elements: its defaults


def memory(rank: PipelineRank) -> Memory:
    """Peak memory of a rank at this position in the pipeline."""
    if rank.mesh.pipeline > 1:
        return _pipelined(rank)
    passes, (chunk,) = rank.passes, rank.chunks
    # The readout's activations are freed before the blocks run backward.
    back = max(block.work for block in passes.blocks) - passes.end.kept
    return engine_memory(rank).plus(chunk.kept)._replace(work=max(passes.end.work, back, 0))


def engine_memory(rank: PipelineRank) -> Memory:
    """Weights, gradients, optimizer state and buffers of the engine; in a pipeline, without gathered weights."""
    config, mesh, width = rank.config, rank.mesh, rank.width
    count = sum(weight.elements for weight in rank.weights)
    if rank.engine == "deepspeed":
        stage, share = config.train.parallel.zero_stage, -(-count // mesh.data)
        return Memory(
            weights=width * (share if stage == 3 else count),
            gathered_weights=width * min(count, DEEPSPEED_GATHERED) if stage == 3 else 0,
            gradients=width * (share if stage >= 2 else 2 * count),  # of this micro-batch and of earlier ones
            reduced_gradients=width * DEEPSPEED_BUCKET,
            optimizer=3 * FLOAT32 * share,
        )
    sharded = rank.engine == "fsdp2"
    stored = FLOAT32 * (sum(weight.shard(mesh) for weight in rank.weights) if sharded else count)
    optimizer = 2 * stored + FLOAT32 * len(rank.weights)  # two moments, and a step count per tensor
    base = Memory(weights=stored, gradients=stored, optimizer=optimizer)
    if sharded and mesh.pipeline == 1:
        (chunk,) = rank.chunks
        blocks = sorted(map(elements, chunk.units))
        gathered = width * (elements(chunk.root) + sum(blocks[-2:]))
        return base._replace(gathered_weights=gathered, reduced_gradients=FLOAT32 * blocks[-1])
    return base._replace(reduced_gradients=stored) if rank.engine == "ddp" else base


def minimum_memory(rank: PipelineRank) -> int:
    """A lower bound that ignores activations: in a pipeline, when one chunk has run backward."""
    base = engine_memory(rank).total
    if rank.mesh.pipeline == 1:
        return base
    return base + min(
        rank.width * elements(*chunk.units, chunk.root) + FLOAT32 * elements(*chunk.units[1:]) for chunk in rank.chunks
    )


def stored_memory(rank: PipelineRank) -> int:
    """Weights, gradients and optimizer state: what a run cannot do without."""
    held = engine_memory(rank)
    return held.weights + held.gradients + held.optimizer


def ample_memory(rank: PipelineRank) -> float:
    """Several times what any method needs, without counting: a device with this much memory needs no estimate."""
    model, train = rank.config.model, rank.config.train
    if rank.mesh.pipeline > 1:  # several micro-batches are in flight
        return math.inf
    hidden = model.ffn_width or (model.moe.active * model.moe.expert_width if model.moe else 0)
    per_layer = 64 * model.width + 16 * hidden + 2 * model.heads * model.context
    activations = train.micro_batch * model.context * model.layers * per_layer
    return engine_memory(rank).total + FLOAT32 * (activations + 8 * train.loss_rows * model.vocab_size)


def _pipelined(rank: PipelineRank) -> Memory:
    """Peak memory with several micro-batches in flight: in the backward pass after the fullest moment."""
    chunks, several = rank.chunks, rank.mesh.virtual > 1
    # PyTorch's interleaved schedule frees sent states and gradients only at the end of a step.
    sizes = {
        c.number: ChunkBytes(c.kept.total + c.received, c.left, c.sent + c.received if several else 0) for c in chunks
    }
    order = actions(rank.mesh, rank.micro_batches, rank.number)
    flight = in_flight(order, rank.mesh.pipeline, sizes)
    total, moved = engine_memory(rank), max(chunk.sent for chunk in chunks)
    for chunk in chunks:
        times, size = flight.kept[chunk.number], sizes[chunk.number]
        total = total.plus(chunk.kept, times)
        moved += chunk.received * times
        moved += size.left * flight.left[chunk.number] + size.done * flight.done[chunk.number]
    if several:  # the interleaved schedule prefetches the next states
        moved += max(chunk.received for chunk in chunks)
    moments = (total.plus(moment) for moment in _backward_moments(rank, flight))
    return max(moments, key=lambda moment: moment.total)._replace(pipeline=moved)


def _backward_moments(rank: PipelineRank, flight: InFlight) -> Iterator[Memory]:
    """Memory that a micro-batch's backward pass adds, less what it has freed, block by block; gradients are unsharded.

    Weights that were resharded after the forward pass are gathered again, block by block, and stay gathered.
    """
    (chunk,) = (chunk for chunk in rank.chunks if chunk.number == flight.next_backward)
    others = [other for other in rank.chunks if other is not chunk]
    blocks, passes = [elements(unit) for unit in chunk.units], rank.passes
    gathered = elements(*(each.root for each in rank.chunks))
    gathered += sum(elements(*other.units) for other in others if other.number in flight.gathered)
    summed = sum(elements(*other.units, other.root) for other in others if other.number in flight.summed)
    again = chunk.number in flight.summed  # an earlier micro-batch has accumulated gradients
    everything, root = summed + elements(*chunk.units, chunk.root), elements(chunk.root) if chunk.last else 0
    freed = Memory()
    if chunk.last:
        weights = rank.width * (gathered + sum(sorted(blocks)[-2:]))
        whole = FLOAT32 * (everything if again else summed)
        yield Memory(gathered_weights=weights, reduced_gradients=whole, work=passes.end.work)
        freed = passes.end._replace(loss=0, work=0)
    for at in reversed(range(len(blocks))):
        weights = rank.width * (gathered + sum(blocks[max(0, at - 1) :]))  # and the block being gathered next
        # The block's own gradients are part of its work.
        whole = FLOAT32 * (everything if again else summed + sum(blocks[at + 1 :]) + root)
        part = passes.blocks[chunk.blocks[at]]
        work = Memory(gathered_weights=weights, reduced_gradients=whole, work=part.work)
        yield work.plus(freed, -1)
        freed = freed.plus(part._replace(work=0))
