"""Schedules and gathers are PyTorch's own."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import (
    FORWARD,
    RESHARD,
    UNSHARD,
    ScheduleInterleaved1F1B,
    _add_unshard_reshard,
)

from dualres.parallel.mesh import Mesh
from dualres.parallel.pipeline import micro_batches
from dualres.plan.pipeline_schedule import Action, ChunkBytes, actions, gathers, in_flight

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
        wanted = [
            Action("forward" if a.computation_type == FORWARD else "backward", a.stage_index, a.microbatch_index)
            for a in torchs(ranks, virtual, count, rank)
            if a is not None
        ]
        assert list(actions(mesh, count, rank)) == wanted


@pytest.mark.parametrize(("ranks", "count"), [(2, 2), (4, 6), (3, 12)])
def test_1f1b_has_as_many_on_their_way_as_ranks_follow(ranks: int, count: int):
    for rank in range(ranks):
        order = actions(Mesh(pipeline=ranks), count, rank)
        assert len(order) == 2 * count
        flight = in_flight(order, ranks, {rank: ChunkBytes(1, 0, 0)})
        assert flight.kept[rank] == min(count, ranks - rank)


@pytest.mark.parametrize(("ranks", "virtual", "count"), INTERLEAVED)
def test_gathers_of_a_rank_with_several_chunks(ranks: int, virtual: int, count: int):
    """Played through with PyTorch's list of when a stage's weights are fetched and given back."""
    mesh = Mesh(pipeline=ranks, virtual=virtual)
    for rank in range(ranks):
        order = actions(mesh, count, rank)
        for chunk in range(rank, ranks * virtual, ranks):
            blocks = root = 0
            whole = whole_root = False
            for action in _add_unshard_reshard(torchs(ranks, virtual, count, rank)):
                if action.stage_index != chunk:
                    continue
                if action.computation_type == RESHARD:
                    whole = whole_root = False
                    continue
                blocks, root = blocks + (not whole), root + (not whole_root)
                whole_root = True
                whole = action.computation_type != FORWARD
                if action.computation_type == UNSHARD:
                    whole = True
            assert gathers(order, chunk) == (blocks, root)


def test_a_batch_that_does_not_divide_is_filled_up():
    assert micro_batches(12, 2, Mesh(4)) == 2
    assert micro_batches(12, 2, Mesh(2, pipeline=4)) == 4  # at least one per stage
    assert micro_batches(10, 2, Mesh(1, pipeline=2, virtual=2)) == 6  # whole rounds
