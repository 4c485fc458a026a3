"""What crosses the boundaries of a pipeline, against the formula and against a simulation that moves sets of states."""

import itertools

import pytest

from dualres.parallel.mesh import even_chunks
from dualres.parallel.pipeline import boundaries

SHAPES = list(itertools.product([2, 3, 4, 8], [1, 2, 3, 5], [1, 2, 3]))  # ranks, passes, blocks of a chunk


def sent(chunks: list[int], ranks: int, *, resend: bool = False) -> tuple[int, int]:
    """How many states of blocks cross, and how often H_0 does."""
    every = [s for b in boundaries(chunks, ranks, keeps_history=True, resend=resend) for s in b.sent]
    return sum(s > 0 for s in every), every.count(0)


@pytest.mark.parametrize(("ranks", "passes", "blocks"), SHAPES)
def test_even_chunks_follow_the_formula(ranks: int, passes: int, blocks: int):
    p, v, c = ranks, passes, ranks * passes
    assert sent([blocks] * c, p, resend=True) == (blocks * c * (c - 1) // 2, c - 1)
    assert sent([blocks] * c, p) == (blocks * (p * (p - 1) // 2 + (v - 1) * p * (p - 1)), p - 1)


@pytest.mark.parametrize("chunks", [[2, 1, 1], [3, 1, 2, 2, 1, 1], [1, 4, 2, 1, 1, 3, 2, 2, 1], [2, 2, 2, 1, 1, 1]])
@pytest.mark.parametrize("ranks", [2, 3])
def test_uneven_chunks_follow_a_simulation(chunks: list[int], ranks: int):
    """Ranks hold sets of states. A chunk may run when its rank has all before it, and sees to it that the next has."""
    holds: list[set[int]] = [set() for _ in range(ranks)]
    holds[0].add(0)
    made, moved = 0, []
    between = boundaries(chunks, ranks, keeps_history=True)
    for c, blocks in enumerate(chunks):
        here = holds[c % ranks]
        assert here >= set(range(made + 1)), "a chunk lacks a state that it reads"
        here |= set(range(made + 1, made + blocks + 1))
        made += blocks
        if c + 1 < len(chunks):
            there = holds[(c + 1) % ranks]
            lacking = here - there
            moved.append(lacking)
            there |= lacking
            assert set(between[c].sent) == lacking
            assert set(between[c].cached) == there - lacking
    assert sum(map(len, moved)) == sum(sent(chunks, ranks))


@pytest.mark.parametrize("ranks", [2, 4])
def test_without_history_one_state_crosses(ranks: int):
    between = boundaries([2, 1, 2, 1], ranks, keeps_history=False)
    assert [b.sent for b in between] == [(2,), (3,), (5,)]
    assert all(not b.cached for b in between)


@pytest.mark.parametrize(
    ("blocks", "chunks", "wanted"), [(4, 4, [1] * 4), (7, 4, [2, 2, 2, 1]), (9, 2, [5, 4]), (5, 3, [2, 2, 1])]
)
def test_blocks_are_cut_as_even_as_can_be(blocks: int, chunks: int, wanted: list[int]):
    assert even_chunks(blocks, chunks) == wanted
