"""The forward and backward passes of a pipeline rank's chunks in a step, in the order in which PyTorch schedules them.

1F1B if a rank has one chunk, interleaved 1F1B if it has several. C = P·V chunks; chunk c is on rank c mod P.
"""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch.distributed.pipelining.schedules import (
    FORWARD,
    FULL_BACKWARD,
    RESHARD,
    _Action,
    _add_unshard_reshard,
    _ComputationType,
)

from dualres.parallel.mesh import Mesh


class Gathers(NamedTuple):
    """How often FSDP2 gathers the weights of one chunk in a step."""

    blocks: int
    root: int  # parameters outside of blocks: vocabulary, readout, final norm


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
def gathers(mesh: Mesh, count: int, chunk: int) -> Gathers:
    """Gathers of a chunk: blocks reshard after a forward pass, not after a backward pass; the root stays gathered.

    If a rank has several chunks, PyTorch also prefetches weights and reshards those of chunks that are not next.
    """
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
    return Gathers(blocks, root)
