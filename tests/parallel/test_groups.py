"""Who belongs to which group of a mesh, by ranks that talk to no one."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from dualres.parallel.mesh import Mesh, make_groups


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """One of sixteen ranks whose others do not exist."""
    dist.init_process_group("fake", rank=request.param, world_size=16, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


def members(mesh: DeviceMesh) -> list[int]:
    return mesh.mesh.flatten().tolist()


GROUPS = [  # rank 8·stage + 2·data + tensor, or 4·stage + …: data, experts, tensor, pipeline, both ends of its pipeline
    (6, Mesh(data=4, tensor=2, pipeline=2, expert=2), [0, 2, 4, 6], [4, 5, 6, 7], [6, 7], [6, 14], [6, 14]),
    (1, Mesh(data=2, tensor=2, pipeline=4), [1, 3], [0, 1], [0, 1], [1, 5, 9, 13], [1, 13]),
    (15, Mesh(data=2, tensor=2, pipeline=4, expert=2), [13, 15], [12, 13, 14, 15], [14, 15], [3, 7, 11, 15], [3, 15]),
    (5, Mesh(data=2, tensor=2, pipeline=4), [5, 7], [4, 5], [4, 5], [1, 5, 9, 13], None),  # a stage between the ends
]


@pytest.mark.parametrize(
    ("rank", "mesh", "data", "experts", "tensor", "pipeline", "ends"),
    GROUPS,
    ids=lambda value: value.describe() if isinstance(value, Mesh) else None,
    indirect=["rank"],
)
def test_members(
    rank: int,
    mesh: Mesh,
    data: list[int],
    experts: list[int],
    tensor: list[int],
    pipeline: list[int],
    ends: list[int] | None,
):
    groups = make_groups(mesh, "cpu")
    found = [members(part) for part in (groups.data, groups.experts, groups.tensor, groups.pipeline)]
    assert found == [data, experts, tensor, pipeline]
    assert groups.stage == pipeline.index(rank)
    assert (None if groups.ends is None else dist.get_process_group_ranks(groups.ends)) == ends
