"""Which states cross a pipeline's boundaries: each rank keeps what it has seen, so only what it lacks is sent.

The N blocks are cut into C = P·V chunks; chunk c lies on rank c mod P and is its (c div P)-th pass. The state H_b is
made by block b (1 … N); H_0 is the embedding.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Boundary(NamedTuple):
    """What chunk c−1 hands to chunk c."""

    sent: tuple[int, ...]  # states, in order of depth
    cached: tuple[int, ...]  # states that an earlier pass left on the rank of chunk c


def boundaries(chunks: Sequence[int], ranks: int, *, keeps_history: bool, resend: bool = False) -> list[Boundary]:
    """The C−1 boundaries of chunks with so many blocks each; `resend` forgets what a rank has seen (for comparison)."""
    seen: list[set[int]] = [set() for _ in range(ranks)]
    found, state = [], 0
    for number, blocks in enumerate(chunks):
        here = seen[number % ranks]
        if number > 0:
            needed = range(state + 1) if keeps_history else (state,)
            known = here if keeps_history and not resend else set()
            found.append(Boundary(tuple(s for s in needed if s not in known), tuple(s for s in needed if s in known)))
        here.update(range(state + blocks + 1))
        state += blocks
    return found


def cut(blocks: int, chunks: int) -> list[int]:
    """How many blocks each chunk has: as even as can be, the first ones more (the last has the vocabulary to do)."""
    least, more = divmod(blocks, chunks)
    return [least + (number < more) for number in range(chunks)]
