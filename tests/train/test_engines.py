"""Every engine on two processes trains like one process: the same losses, the same router, the same weights."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dualres.hub.hf_model import DualResForCausalLM
from dualres.hub.open_model import open_model
from dualres.model.decoder import build_decoder
from dualres.train.engines.build import engine_name
from dualres.train.loop import train
from dualres.util.errors import TrainError
from tests.launching import torchrun
from tests.small import relative_error
from tests.train.engine_worker import CASES, SHORT, name
from tests.train.tiny import ALONE, Told, losses, rows, tiny_config, train_tiny

GROUPS = [
    pytest.param("torch"),
    pytest.param(
        "deepspeed",
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
            pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler, and DeepSpeed builds an operator"),
        ],
    ),
]


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each kind on one process, the dense one from a saved model, which is there too."""
    folder = tmp_path_factory.mktemp("alone")
    dense, moe = (tiny_config(feedforward=feedforward, **SHORT) for feedforward in ("dense", "moe"))
    DualResForCausalLM.of(build_decoder(dense.model, dense.residual, seed=7)).save_pretrained(folder / "start")
    train(dense, data, folder / "dense", ALONE, Told(), start=folder / "start")
    train(moe, data, folder / "moe", ALONE, Told())
    return {name: folder / name for name in ("start", "dense", "moe")}


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this PyTorch was built without gloo")
@pytest.mark.parametrize("group", GROUPS)
def test_two_processes_train_like_one(group: str, alone: dict[str, Path], data: Path, tmp_path: Path):
    torchrun("tests.train.engine_worker", 2, group, str(data), str(tmp_path), str(alone["start"]))
    assert json.loads((tmp_path / "errors.json").read_text()) == {}
    for case in CASES[group]:
        ours, wanted = tmp_path / name(*case), alone[case[2]]
        assert losses(ours) == pytest.approx(losses(wanted), rel=1e-5), name(*case)
        if case[2] == "moe":
            routers = [[row["router_loss"] for row in rows(folder) if "loss" in row] for folder in (ours, wanted)]
            assert routers[0] == pytest.approx(routers[1], rel=1e-5), name(*case)
        looked = [[row for row in rows(folder) if "analysis/cka" in row] for folder in (ours, wanted)]
        assert [row["step"] for row in looked[0]] == [6, 12]
        for found, one in zip(*looked, strict=True):  # all ranks look, one logs, and sees what one process alone sees
            assert found == pytest.approx(one, rel=1e-3), name(*case)
        weights = zip(open_model(ours).decoder.parameters(), open_model(wanted).decoder.parameters(), strict=True)
        # AdamW divides by the root of the second moment: where a gradient is rounding only, so is the step.
        assert max(relative_error(a, b) for a, b in weights if b.dim() > 1) < 1e-3, name(*case)
        # And a checkpoint of two ranks goes on alone: finished, so there is nothing to do but to load it.
        changes = {**SHORT, "train__engine": "single"}
        assert train_tiny(tiny_config(feedforward=case[2], **changes), data, ours).step == 12


@pytest.mark.parametrize(
    ("engine", "processes", "wanted"),
    [
        ("auto", 1, "single"),
        ("auto", 2, "fsdp2"),
        ("single", 1, "single"),
        ("ddp", 2, "ddp"),
        ("deepspeed", 8, "deepspeed"),
    ],
)
def test_the_config_picks_the_engine(engine: str, processes: int, wanted: str):
    config = tiny_config(train__engine=engine, train__parallel__zero_stage=1)
    assert engine_name(config, processes) == wanted


@pytest.mark.parametrize(("engine", "processes"), [("single", 2), ("ddp", 1), ("fsdp2", 1), ("deepspeed", 1)])
def test_impossible_engines(engine: str, processes: int):
    with pytest.raises(TrainError, match=rf"train\.engine={engine}"):
        engine_name(tiny_config(train__engine=engine), processes)


@pytest.mark.parametrize("feedforward", ["dense", "moe"])
@pytest.mark.parametrize("residual", ["standard", "dar-block"])
def test_bf16_trains(residual: str, feedforward: str, data: Path, tmp_path: Path):
    """Rounding to eight bits: the loss after twelve steps stays within a percent of float32's."""
    found = {}
    for precision in ("fp32", "bf16"):
        config = tiny_config(residual, feedforward, train__precision=precision, **SHORT)
        train_tiny(config, data, tmp_path / precision)
        found[precision] = losses(tmp_path / precision)
    assert found["bf16"] != found["fp32"]
    assert found["bf16"] == pytest.approx(found["fp32"], rel=0.01)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("default", marks=pytest.mark.slow),
        pytest.param("max-autotune", marks=pytest.mark.exhaustive),  # test_build.py: the mode reaches the compiler
    ],
)
def test_compiled_blocks_train_alike(data: Path, tmp_path: Path, how: str):
    torch._dynamo.reset()
    for compile in ("off", how):
        config = tiny_config("standard", train__compile=compile, train__recompute="selective", **SHORT)
        train_tiny(config, data, tmp_path / compile)
    assert losses(tmp_path / how) == pytest.approx(losses(tmp_path / "off"), rel=1e-5)
