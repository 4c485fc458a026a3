"""What a pipeline rank runs in a step, in order: forward and backward passes of its chunks, as PyTorch schedules them.

1F1B where a rank has one chunk, interleaved 1F1B where it has several. C = P·V chunks; chunk c lies on rank c mod P.
"""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from dualres.parallel.mesh import Mesh

ACTIVE_STAGES = 3  # whose weights the interleaved schedule holds gathered at a time: PyTorch's default


class Action(NamedTuple):
    """One pass of one chunk for one micro-batch."""

    kind: Literal["forward", "backward"]
    chunk: int
    micro_batch: int


class Gathers(NamedTuple):
    """How often FSDP2 gathers the weights of one chunk in a step."""

    blocks: int
    root: int  # what is in no block: vocabulary, readout, final norm


@functools.cache
def actions(mesh: Mesh, count: int, rank: int) -> tuple[Action, ...]:
    """All passes of a pipeline rank for `count` micro-batches."""
    ranks, virtual = mesh.pipeline, mesh.virtual
    rounds = max(1, count // ranks)
    per_round = count // rounds if virtual > 1 else count
    if virtual == 1:
        warmup = min(count, ranks - rank)  # as many as are in flight when the first comes back
    else:
        warmup = min((virtual - 1) * per_round + 2 * (ranks - 1 - rank), virtual * count)
    forward, backward = Counter[int](), Counter[int]()
    found: list[Action] = []

    def add(kind: Literal["forward", "backward"], step: int) -> None:
        turn, numbers = step // per_round % virtual, forward if kind == "forward" else backward
        chunk = (turn if kind == "forward" else virtual - 1 - turn) * ranks + rank
        found.append(Action(kind, chunk, numbers[chunk]))
        numbers[chunk] += 1

    total = virtual * count
    for step in range(warmup):
        add("forward", step)
    for step in range(total):  # PyTorch's 1F1B runs backward first, the interleaved schedule forward
        if virtual == 1:
            add("backward", step)
        if step + warmup < total:
            add("forward", step + warmup)
        if virtual > 1:
            add("backward", step)
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


def in_flight(order: Sequence[Action], ranks: int, size_of: Mapping[int, ChunkBytes]) -> InFlight:
    """The moment at which a rank holds most."""
    held, waiting, done = Counter[int](), Counter[int](), Counter[int]()
    most = held, waiting, done
    top = size = moment = 0
    for at, (kind, chunk, _) in enumerate(order):
        if kind == "forward":
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
            top, moment, most = size, at + 1, (held.copy(), waiting.copy(), done.copy())
    last, later = {a.chunk: a.kind for a in order[:moment]}, {a.chunk for a in order[moment:]}
    return InFlight(
        *most,
        frozenset(action.chunk for action in order[:moment] if action.kind == "backward"),
        frozenset(chunk for chunk, kind in last.items() if kind == "backward" and chunk in later),
        next(action.chunk for action in order[moment:] if action.kind == "backward"),
    )


@functools.cache
def gathers(order: tuple[Action, ...], chunk: int) -> Gathers:
    """Blocks reshard their weights after a forward pass and not after a backward pass; the root keeps its own.

    A rank of several chunks also prefetches a chunk's weights, and reshards those of chunks that are not next.
    """
    several = len({action.chunk for action in order}) > 1
    ends = {action.chunk: at for at, action in enumerate(order)}
    blocks = root = 0
    whole = whole_root = False
    active: list[int] = []
    for at, action in enumerate(order):
        if several:
            coming = _next(order, at, min(ACTIVE_STAGES, sum(end >= at for end in ends.values())))
            if chunk in active and chunk not in coming:
                whole = whole_root = False
            if chunk in coming and chunk not in active:
                blocks, root = blocks + (not whole), root + (not whole_root)
                whole = whole_root = True
            active = coming
        if action.chunk != chunk:
            continue
        blocks, root = blocks + (not whole), root + (not whole_root)
        whole_root = True
        whole = action.kind == "backward"
    return Gathers(blocks, root)


def _next(order: Sequence[Action], at: int, count: int) -> list[int]:
    """The next `count` different chunks."""
    found: list[int] = []
    while len(found) < count:
        if order[at].chunk not in found:
            found.append(order[at].chunk)
        at += 1
    return found
