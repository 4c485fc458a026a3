"""What a pipeline rank runs in a step, in order: forward and backward passes of its chunks, as PyTorch schedules them.

1F1B where a rank has one chunk, interleaved 1F1B where it has several. C = P·V chunks; chunk c lies on rank c mod P.
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
    root: int  # what is in no block: vocabulary, readout, final norm


@functools.cache
def actions(mesh: Mesh, count: int, rank: int) -> tuple[_Action, ...]:
    """All passes of a pipeline rank for `count` micro-batches."""
    ranks, virtual, total = mesh.pipeline, mesh.virtual, mesh.virtual * count
    per_round = count // max(1, count // ranks)
    if virtual == 1:
        warmup = min(count, ranks - rank)  # as many as are in flight when the first comes back
    else:
        warmup = min((virtual - 1) * per_round + 2 * (ranks - 1 - rank), total)
    found: list[_Action] = []

    def add(kind: _ComputationType, step: int) -> None:
        turn = step // per_round % virtual
        found.append(_Action((turn if kind == FORWARD else virtual - 1 - turn) * ranks + rank, kind))

    for step in range(warmup):
        add(FORWARD, step)
    for step in range(total):  # PyTorch's 1F1B runs backward first, the interleaved schedule forward
        if virtual == 1:
            add(FULL_BACKWARD, step)
        if step + warmup < total:
            add(FORWARD, step + warmup)
        if virtual > 1:
            add(FULL_BACKWARD, step)
    return tuple(found)


class InFlight(NamedTuple):
    """What a rank holds at a moment of a step."""

    kept: Counter[int]  # micro-batches of each chunk between forward and backward
    left: Counter[int]  # after backward, with gradients of states that an earlier chunk of the rank still waits for
    done: Counter[int]  # after backward
    summed: frozenset[int]  # chunks that have run backward: the gradients of their weights are there
    gathered: frozenset[int]  # chunks that ran backward last and have more to do: their blocks keep their weights
    coming: int  # the chunk that runs backward next


class ChunkBytes(NamedTuple):
    """What one micro-batch holds in one chunk."""

    kept: int  # between forward and backward
    left: int  # from then until the rank's chunk before it has gone back
    done: int  # from then to the end of the step


def in_flight(order: Sequence[_Action], ranks: int, size_of: Mapping[int, ChunkBytes]) -> InFlight:
    """The moment at which a rank holds most."""
    held, waiting, done = Counter[int](), Counter[int](), Counter[int]()
    most = held, waiting, done
    top = size = moment = 0
    for at, (chunk, kind, *_) in enumerate(order, 1):
        if kind == FORWARD:
            held[chunk] += 1
            size += size_of[chunk].kept
        else:
            held[chunk] -= 1
            waiting[chunk] += 1
            done[chunk] += 1
            size += size_of[chunk].left + size_of[chunk].done - size_of[chunk].kept
            if chunk + ranks in size_of:
                waiting[chunk + ranks] -= 1
                size -= size_of[chunk + ranks].left
        if size >= top and held.total():
            top, moment, most = size, at, (held.copy(), waiting.copy(), done.copy())
    last, later = dict(action[:2] for action in order[:moment]), {action.stage_index for action in order[moment:]}
    return InFlight(
        *most,
        frozenset(chunk for chunk, kind, *_ in order[:moment] if kind == FULL_BACKWARD),
        frozenset(chunk for chunk, kind in last.items() if kind == FULL_BACKWARD and chunk in later),
        next(chunk for chunk, kind, *_ in order[moment:] if kind == FULL_BACKWARD),
    )


@functools.cache
def gathers(mesh: Mesh, count: int, chunk: int) -> Gathers:
    """Of a chunk: blocks reshard their weights after a forward pass, not after a backward pass; the root keeps its own.

    For a rank of several chunks, PyTorch also prefetches weights and reshards those of chunks that are not next.
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
