"""Schedules and gathers are PyTorch's own."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

from dualres.parallel.mesh import Mesh
from dualres.parallel.pipeline import micro_batches
from dualres.plan.stages import ChunkBytes, actions, gathers, in_flight

INTERLEAVED = [(2, 2, 4), (2, 3, 6), (4, 2, 8), (4, 4, 4), (3, 2, 7), (2, 4, 2)]


def torchs(ranks: int, virtual: int, count: int, rank: int) -> list[Any]:
    rounds = max(1, count // ranks)
    schedule = SimpleNamespace(
        n_local_stages=virtual, microbatches_per_round=count // rounds, pp_group_size=ranks, _n_microbatches=count
    )
    return ScheduleInterleaved1F1B._calculate_single_rank_operations(schedule, rank)  # type: ignore[arg-type]


@pytest.mark.parametrize(("ranks", "virtual", "count"), INTERLEAVED)
def test_the_interleaved_schedule(ranks: int, virtual: int, count: int):
    mesh = Mesh(pipeline=ranks, virtual=virtual)
    for rank in range(ranks):
        wanted = [action._replace(microbatch_index=None) for action in torchs(ranks, virtual, count, rank) if action]
        assert list(actions(mesh, count, rank)) == wanted


@pytest.mark.parametrize(("ranks", "count"), [(2, 2), (4, 6), (3, 12)])
def test_1f1b_has_as_many_on_their_way_as_ranks_follow(ranks: int, count: int):
    for rank in range(ranks):
        order = actions(Mesh(pipeline=ranks), count, rank)
        assert len(order) == 2 * count
        flight = in_flight(order, ranks, {rank: ChunkBytes(1, 0, 0)})
        assert flight.kept[rank] == min(count, ranks - rank)


GATHERS = [  # (blocks, root) of each of a rank's chunks; most are alike on all ranks
    ((2, 1, 3), [(4, 1)]),
    ((4, 1, 6), [(7, 1)]),
    ((2, 2, 4), [(5, 1), (5, 1)]),
    ((4, 2, 8), [(9, 1), (9, 1)]),
    ((3, 2, 7), [(9, 1), (7, 1)]),
    ((4, 4, 4), [(5, 2), (5, 1), (5, 1), (5, 1)]),  # more chunks than PyTorch holds gathered
    ((2, 4, 2), [(3, 2), (3, 1), (3, 1), (3, 1)]),
]


@pytest.mark.parametrize(("schedule", "wanted"), GATHERS)
def test_gathers(schedule: tuple[int, int, int], wanted: list[tuple[int, int]]):
    ranks, virtual, count = schedule
    mesh = Mesh(pipeline=ranks, virtual=virtual)
    for rank in range(ranks):
        assert [gathers(mesh, count, chunk) for chunk in range(rank, ranks * virtual, ranks)] == wanted


def test_a_batch_that_does_not_divide_is_filled_up():
    assert micro_batches(12, 2, Mesh(4)) == 2
    assert micro_batches(12, 2, Mesh(2, pipeline=4)) == 4  # at least one per stage
    assert micro_batches(10, 2, Mesh(1, pipeline=2, virtual=2)) == 6  # whole rounds
