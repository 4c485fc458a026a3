"""A plan against runs of real processes on the same mesh: bytes sent to the byte, memory within a tenth of the peak.

The router is made to send every expert as many tokens, since a plan takes it to do so.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dualres.config.schema import Config
from dualres.parallel.mesh import Mesh, mesh_of
from dualres.plan.activations import COUNTED, count_passes, passes_of
from dualres.plan.estimate import MeshEstimate, estimate
from dualres.plan.hardware import Hardware
from dualres.plan.local_model import Share
from tests.launching import torchrun
from tests.plan.cases import MESHES, Case, cases, config_of
from tests.plan.engine_memory import step_memory
from tests.train.tiny import ALONE

TOLERANCE = 0.1
COVERED = {"tp2", "dp2/ep2", "pp2", "dp2·pp2"}  # by larger meshes: dp2·tp2/ep2, tp2·pp2, pp2×2, dp2·pp2×2


def planned(config: Config, processes: int) -> MeshEstimate:
    return estimate(config, config.train.engine, mesh_of(config, processes), Hardware())


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_gloo_available(), reason="this PyTorch was built without gloo")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive if name in COVERED else ()) for name in MESHES]
)
def test_a_plan_is_what_a_mesh_does(name: str, tmp_path: Path):
    mesh = MESHES[name]
    torchrun("tests.plan.mesh_worker", mesh.processes, name, str(tmp_path))
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(mesh.processes)]
    for case in cases(mesh):
        for rank in range(0, mesh.processes, mesh.data * mesh.tensor):  # the first of each pipeline rank
            measured = ranks[rank][case.name]
            assert "error" not in measured, measured["error"]
            compare(case, measured)


def compare(case: Case, measured: dict[str, Any]) -> None:
    found, stage = planned(config_of(case), case.mesh.processes), measured["stage"]
    assert found.step is not None
    held, sent = found.memory[stage], found.step.communication[stage]._asdict()
    assert {kind: size for kind, size in sent.items() if size} == measured["sent"], (case.name, stage)
    state = {"weights": held.weights, "gradients": held.gradients, "optimizer": held.optimizer}
    assert state == measured["held"], (case.name, stage)
    peak = sum(measured["held"].values()) + measured["most"]
    print(f"{case.name}, pipeline rank {stage}: planned {held.total:,}, measured {peak:,}, {held.total / peak:.3f}")
    assert held.total == pytest.approx(peak, rel=TOLERANCE), (case.name, stage)


@pytest.mark.parametrize(
    ("residual", "precision", "recompute"),
    [
        pytest.param("standard", "fp32", "none", marks=pytest.mark.slow),
        ("dar-block", "bf16", "none"),
        pytest.param("attnres-block", "fp32", "full", marks=pytest.mark.slow),
    ],
)
def test_memory_of_one_process(residual: str, precision: str, recompute: str):
    config = config_of(Case(Mesh(), residual, "dense", precision, recompute))
    held, most = step_memory(config, ALONE)
    assert planned(config, 1).memory[0].total == pytest.approx(sum(held.values()) + most, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("residual", "layers"),
    [
        pytest.param("standard", 8, marks=pytest.mark.slow),
        pytest.param("dar-block", 12, marks=pytest.mark.slow),
        ("attnres-block", 11),  # with a short last block
    ],
)
def test_deep_models_follow_from_their_first_blocks(residual: str, layers: int):
    """To the byte, but for what the readout keeps of a longer history: a number per token and state."""
    case = Case(Mesh(), residual, "dense", "bf16", "selective", (("model__layers", layers),))
    config, share = config_of(case), Share(2, 1)
    short, whole = passes_of(config, share, "fsdp2"), count_passes(config, share, "fsdp2")
    assert len(whole.blocks) > COUNTED + 1
    assert short._replace(end=whole.end) == whole
    assert (short.end.loss, short.end.work) == (whole.end.loss, whole.end.work)
    states = len(whole.blocks) + 1
    assert abs(whole.end.kept - short.end.kept) <= states * whole.streams * whole.shared
