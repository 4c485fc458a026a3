"""Every mesh of four processes trains like one process: losses, gradients and weights of three steps."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from dualres.parallel.mesh import Mesh
from dualres.train.checkpoint import Checkpoints
from dualres.train.engines.build import build_engine
from tests.launching import torchrun
from tests.parallel import uneven_worker
from tests.parallel.cases import MESHES, REPRESENTATIVE, cases, config_of
from tests.parallel.checks_worker import CHECKS, SOME
from tests.parallel.mesh_worker import ALONE
from tests.parallel.reshard_worker import CASE, SAME, go_on

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this PyTorch was built without gloo")


@pytest.mark.parametrize(
    ("name", "every"),
    [
        *(pytest.param(name, False, id=name, marks=pytest.mark.slow) for name in REPRESENTATIVE),
        *(pytest.param(name, True, id=f"{name} in every case", marks=pytest.mark.exhaustive) for name in MESHES),
    ],
)
def test_the_mesh_trains_like_one_process(name: str, every: bool, tmp_path: Path):
    mesh = MESHES[name]
    torchrun("tests.parallel.mesh_worker", mesh.processes, name, str(tmp_path), "every" if every else "")
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert results == {case.name: [] for case in cases(mesh, every)}


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(REPRESENTATIVE, id="representative", marks=pytest.mark.slow),
        pytest.param(tuple(MESHES), id="all", marks=pytest.mark.exhaustive),
    ],
)
def test_checkpoints_move_between_meshes(names: tuple[str, ...], tmp_path: Path):
    """Twenty or ninety moves, and from each mesh to one process."""
    torchrun("tests.parallel.reshard_worker", 4, str(tmp_path), *names)
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert results == {f"{source} to {name}": [] for name in names for source in (*names, "alone")}
    wanted = json.loads((tmp_path / "wanted.json").read_text(encoding="utf-8"))
    config = config_of(CASE, Mesh(), **SAME)
    engine = build_engine(config, ALONE, end_of_text=0)
    for source in names:
        assert go_on(source, config, engine, tmp_path, wanted) == [], source


@pytest.mark.slow
def test_a_vocabulary_that_tensor_groups_do_not_divide_is_saved(tmp_path: Path):
    torchrun("tests.parallel.uneven_worker", uneven_worker.PROCESSES, str(tmp_path))
    for name, (_, case) in uneven_worker.CASES.items():
        trained = load_file(tmp_path / f"{name}.safetensors")
        engine = build_engine(config_of(case, Mesh(), uneven_worker.LAYERS), ALONE, end_of_text=0)
        tensors = engine.tensors()
        Checkpoints(tmp_path / name, ALONE, keep=1, say=print).restore(tensors)
        assert tensors.keys() == trained.keys()
        assert [key for key in tensors if not torch.equal(tensors[key], trained[key])] == [], name


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(SOME, id="some", marks=pytest.mark.slow),
        pytest.param(tuple(CHECKS), id="all", marks=pytest.mark.exhaustive),
    ],
)
def test_properties_of_meshes(names: tuple[str, ...], tmp_path: Path):
    """Bytes between stages, the sum over tensor ranks, fewer rows, compiled blocks, bfloat16 with recomputation."""
    torchrun("tests.parallel.checks_worker", 4, str(tmp_path), *names)
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert results == {name: [] for name in names}
