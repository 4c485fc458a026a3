"""`dualres train --dry-run`: what it prints, and that it checks what a start would refuse."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dualres.cli import main
from dualres.config.loading import load_config
from dualres.config.schema import Config
from dualres.model.accounting import parameters
from dualres.model.decoder import build_decoder
from dualres.parallel.mesh import Mesh, mesh_of
from dualres.plan.estimate import estimate
from dualres.plan.hardware import GIB, USABLE, Hardware
from dualres.train import checkpoint, run_folder
from dualres.train.optimizer import learning_rate
from dualres.train.preflight import check_start, unused_mesh
from dualres.util.atomic_files import LOCK
from tests.train.tiny import overrides, tiny_config


def plan_of(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main(["train", *arguments, "--dry-run", "--json"])
    return code, json.loads(capsys.readouterr().out)


def checks_of(made: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {check["name"]: (check["state"], check["details"]) for check in made["checks"]}


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a large disk, to plan in."""
    monkeypatch.chdir(tmp_path)
    disk = shutil.disk_usage(tmp_path)._replace(free=10**13)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "batch", "steps", "ranks"), [("1b", 256, 47_683, 8), ("moe-7b", 128, 60_000, 4)])
def test_the_papers_large_models(
    scale: str, batch: int, steps: int, ranks: int, elsewhere: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["train", scale, "dar-block", "--dry-run", "--gpus", "8"]) == 0
    text = capsys.readouterr().out
    config = load_config(scale, "dar-block")
    count = parameters(build_decoder(config.model, config.residual, device="meta"))
    for number in count:
        assert f"{number:,}" in text
    assert f"{4096 * batch:,} in {batch} sequences of 4,096: {ranks} ranks × 16 micro-batches of 2" in text
    assert f"{steps:,}, {steps * 4096 * batch:,} tokens in total" in text
    assert "0.0003 at step 2,000 after 2,000 warmup steps, cosine decay to 3e-05" in text
    for step in (1, 1000, 2000, steps):
        assert f"{step:,}: {learning_rate(step - 1, steps, config.train):.3e}" in text
    held = estimate(config, "fsdp2", mesh_of(config, 8), Hardware()).peak_memory
    assert f"{held / GIB:.2f}" in text
    assert "FineWeb-Edu-100B" in text
    assert "train.parallel zero_stage=1 is ignored by fsdp2: only DeepSpeed uses it" in text
    assert "not validated on GPUs" in text
    assert f"torchrun --nproc-per-node 8 -m dualres train {scale} dar-block\n" in text
    assert list(elsewhere.iterdir()) == []  # neither data nor a run


def tiny(*arguments: str, **changes: Any) -> list[str]:
    sets = [word for override in overrides(**changes) for word in ("--set", override)]
    return ["nano", "dar-block", *sets, *arguments]


def test_a_plan_that_can_start(data: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]):
    arguments = tiny("--data", str(data), "--gpus", "2", "--gpu-memory", "1", "--out", "new")
    code, made = plan_of(*arguments, capsys=capsys)
    assert code == 0
    checks = checks_of(made)
    assert {name: state for name, (state, _) in checks.items() if name != "GPUs"} == {
        "batch": "ok",
        "engine": "ok",
        "data": "ok",
        "vocabulary": "ok",
        "tokens": "ok",
        "validation": "ok",
        "checksums": "ok",
        "run folder": "ok",
        "disk": "ok",
        "memory": "ok",
    }
    assert made["engine"] == "fsdp2"
    assert made["batch"] == {
        "micro_batch": 2,
        "gpus": 2,
        "ranks": 2,
        "accumulation": 1,
        "tokens_per_step": 4 * 32,
        "steps": 40,
        "tokens": 40 * 4 * 32,
    }
    config = tiny_config()
    steps = [step for step, _ in made["schedule"]["samples"]]
    assert (steps[0], steps[-1], made["schedule"]["peak_step"]) == (1, 40, 4)
    assert [rate for _, rate in made["schedule"]["samples"]] == [
        learning_rate(step - 1, 40, config.train) for step in steps
    ]
    assert max(rate for _, rate in made["schedule"]["samples"]) == learning_rate(3, 40, config.train)
    (held,) = made["residuals"]["dar-block"]["memory"]
    assert held["total"] == estimate(config, "fsdp2", Mesh(2), Hardware()).peak_memory
    start = f"torchrun --nproc-per-node 2 -m dualres train nano dar-block --data {data} --out new --set model.layers=2 "
    assert made["launch"].startswith(start)
    assert list(elsewhere.iterdir()) == []


FAILING: dict[str, tuple[list[str], dict[str, Any], str, str]] = {
    "batch": (["--gpus", "3"], {}, "batch", "train.global_batch=4 must be at least"),
    "vocabulary": ([], {"model__vocab_size": 256}, "vocabulary", "257 tokens, more than model.vocab_size=256"),
    "processes": (["--gpus", "2"], {"train__engine": "single"}, "engine", "use ddp, fsdp2 or deepspeed"),
    "alone": ([], {"train__engine": "fsdp2"}, "engine", "needs several processes"),
    "stage": (["--gpus", "2"], {"train__engine": "deepspeed"}, "engine", "zero_stage=0 shards nothing"),
    "held out": (
        [],
        {"model__context": 2**17, "train__tokens": 2**24, "train__loss_rows": 2**18},
        "validation",
        "too few for a sequence",
    ),
    "missing data": (["--data", "nowhere"], {}, "data", "nowhere has no index.json: create it with `dualres prepare"),
    "file": (["--out", "file"], {}, "run folder", "file is not a writable folder: use a different --out"),
}


@pytest.mark.parametrize(("arguments", "changes", "check", "says"), FAILING.values(), ids=FAILING)
def test_a_failed_check(
    arguments: list[str],
    changes: dict[str, Any],
    check: str,
    says: str,
    data: Path,
    elsewhere: Path,
    capsys: pytest.CaptureFixture[str],
):
    (elsewhere / "file").touch()
    assert main(["train", *tiny("--data", str(data), *arguments, **changes), "--dry-run"]) == 1
    out, err = capsys.readouterr()
    [row] = [line for line in out.splitlines() if line.startswith(check) and "problem" in line]
    assert says in row
    assert err == f"dualres: cannot start: {check}\n"


def planned_folder(folder: Path, data: Path, capsys: pytest.CaptureFixture[str], **changes: Any) -> tuple[str, str]:
    """The check of a run's folder, which it leaves as it was."""
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != LOCK}
    code, made = plan_of(*tiny("--data", str(data), "--out", str(folder), **changes), capsys=capsys)
    state, says = checks_of(made)["run folder"]
    assert code == (1 if state == "problem" else 0)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != LOCK} == before
    return state, says


def test_a_run_that_goes_on(whole: Path, data: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]):
    folder = elsewhere / "begun"
    shutil.copytree(whole, folder)
    assert planned_folder(folder, data, capsys) == (
        "note",
        f"{folder} is finished, with step-000000040: nothing is left to train",
    )
    shutil.rmtree(checkpoint.complete_checkpoints(folder / run_folder.CHECKPOINTS)[-1])
    assert planned_folder(folder, data, capsys) == ("ok", f"{folder} resumes from step-000000036 of 40 steps")
    assert planned_folder(folder, data, capsys, train__recompute="full")[0] == "ok"  # computes the same
    with run_folder.lock_run(folder):
        state, says = planned_folder(folder, data, capsys)
    assert (state, says) == ("problem", f"another process is training in {folder}: wait for it, or use a new folder")


def test_a_folder_of_another_run(whole: Path, data: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]):
    folder = elsewhere / "other"
    shutil.copytree(whole, folder)
    state, says = planned_folder(folder, data, capsys, train__learning_rate=0.02)
    assert state == "problem"
    assert f"the run in {folder} has a different config (train.learning_rate" in says
    described = json.loads((folder / run_folder.CONFIG).read_text())
    described["data"]["content"] = "others"
    (folder / run_folder.CONFIG).write_text(json.dumps(described))
    state, says = planned_folder(folder, data, capsys)
    assert state == "problem"
    assert "was trained on different data" in says
    (folder / run_folder.CONFIG).unlink()
    state, says = planned_folder(folder, data, capsys)
    assert state == "problem"
    assert "has no config.json" in says


@pytest.mark.parametrize(
    ("gpus", "parallel", "says"),
    [
        (2, {}, "4 = 2 ranks × 1 × 2 micro-batches"),
        (3, {}, "4 = 3 ranks × 1 × 2 micro-batches, padded with 2 zero-weight micro-batches"),
        (2, {"train__parallel__pipeline": 2}, "4 = 1 ranks × 1 × 4 micro-batches"),
        (
            4,
            {"train__parallel__pipeline": 2, "train__global_batch": 2},
            "2 = 2 ranks × 1 × 2 micro-batches, padded with 2",
        ),
    ],
)
def test_a_batch_that_is_filled_up(
    gpus: int, parallel: dict[str, Any], says: str, data: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
):
    changes = {"train__micro_batch": 1, "train__global_batch": 4, "residual__branches_per_block": 2, **parallel}
    _, made = plan_of(*tiny("--data", str(data), "--gpus", str(gpus), **changes), capsys=capsys)
    state, found = checks_of(made)["batch"]
    assert found.startswith(says)
    assert state == ("note" if "padded" in says else "ok")
    assert made["batch"]["accumulation"] == int(says.split()[7])


def test_tokens_that_are_seen_again(data: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]):
    changes = {"train__tokens": 50_000_000, "train__validation_tokens": 10_000_000}
    code, made = plan_of(*tiny("--data", str(data), **changes), capsys=capsys)
    assert code == 0
    checks = checks_of(made)
    assert checks["tokens"][0] == checks["validation"][0] == "note"
    index = json.loads((data / "index.json").read_text())
    tokens = sum(shard["tokens"] for shard in index["train"])
    passes = made["batch"]["tokens"] / ((tokens - 1) // 32 * 32)
    assert (
        checks["tokens"][1] == f"{passes:.3g} epochs over {tokens:,} tokens: prepare more data to see each token once"
    )
    assert "fewer than the 10,000,000 of train.validation_tokens" in checks["validation"][1]


def test_a_small_disk(elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    config = tiny_config()
    needed = 12 * (2 + 2) * parameters(build_decoder(config.model, config.residual, device="meta")).total
    disk = shutil.disk_usage(elsewhere)
    for free, state in ((needed, "ok"), (needed - 1, "problem")):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: disk._replace(free=free))
        code, made = plan_of(*tiny(), capsys=capsys)
        assert checks_of(made)["disk"][0] == state
        assert code == (1 if state == "problem" else 0)
    short = {"train__tokens": 2 * 4 * 32, "train__warmup_steps": 0}  # it saves once, at its end
    assert checks_of(plan_of(*tiny(**short), capsys=capsys)[1])["disk"][0] == "ok"
    if torch.cuda.device_count() < 2:  # the disk of a machine that only plans stops nothing
        code, made = plan_of(*tiny("--gpus", "2"), capsys=capsys)
        assert (code, checks_of(made)["disk"][0]) == (0, "note")


def test_packages_that_are_missing(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    changes = {"train__engine": "deepspeed", "train__parallel__zero_stage": 1}
    code, made = plan_of(*tiny("--gpus", "2", "--wandb", "project", **changes), capsys=capsys)
    assert code == 1
    assert "pip install -e '.[deepspeed]'" in checks_of(made)["engine"][1]
    assert "pip install -e '.[wandb]'" in checks_of(made)["wandb"][1]


DEEP: dict[str, Any] = {"model__layers": 8}  # in two layers, the one block that is computed again is nearly all


def gib(config: Config, engine: str, ranks: int) -> float:
    """Of a GPU that it just fits, with a byte for the rounding of this number."""
    return (estimate(config, engine, Mesh(data=ranks), Hardware()).peak_memory + 1) / USABLE / GIB


def test_what_to_change_when_it_does_not_fit(elsewhere: Path, capsys: pytest.CaptureFixture[str]):
    """The remedy is one that fits: each is counted."""
    none, full = (gib(tiny_config(**DEEP, train__recompute=how), "single", 1) for how in ("none", "full"))
    least = tiny_config(**DEEP, train__recompute="full", train__micro_batch=1)
    one, two, four = (gib(least, engine, n) for engine, n in (("single", 1), ("fsdp2", 2), ("fsdp2", 4)))
    assert four < two < one < full < none
    for limit, state, says in (
        (none, "ok", "GiB fits 90%"),
        (0.999 * none, "problem", "use train.recompute="),
        (0.999 * full, "problem", "use train.micro_batch=1 with train.recompute=full, "),
        (0.999 * one, "problem", "use train.micro_batch=1 with train.recompute=full and 2 GPUs, "),
        (0.999 * two, "problem", "use train.micro_batch=1 with train.recompute=full and 4 GPUs, "),
        (0.5 * four, "problem", "number of GPUs that was tried is enough"),
    ):
        code, made = plan_of(*tiny("--gpu-memory", repr(limit), **DEEP), capsys=capsys)
        found, text = checks_of(made)["memory"]
        assert (found, code) == (state, 1 if state == "problem" else 0), limit
        assert says in text


def test_ddp_that_does_not_fit_is_told_to_shard(elsewhere: Path, capsys: pytest.CaptureFixture[str]):
    limit = gib(tiny_config(), "fsdp2", 2)
    given = tiny("--gpus", "2", "--gpu-memory", repr(limit), train__engine="ddp")
    assert "use train.engine=fsdp2, " in checks_of(plan_of(*given, capsys=capsys)[1])["memory"][1]


@pytest.mark.slow
def test_activations_that_compiling_may_save_are_no_problem(elsewhere: Path, capsys: pytest.CaptureFixture[str]):
    """Where even recomputation is not enough, or nothing compiles, it is one."""
    least = gib(tiny_config(**DEEP, train__recompute="full"), "single", 1)
    for compile, limit, state in (
        ("default", least, "note"),
        ("default", 0.999 * least, "problem"),
        ("off", least, "problem"),
    ):
        code, made = plan_of(*tiny("--gpu-memory", repr(limit), **DEEP, train__compile=compile), capsys=capsys)
        assert (checks_of(made)["memory"][0], code) == (state, 1 if state == "problem" else 0)


def test_an_altered_shard_is_found_without_starting(
    data: Path, elsewhere: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    copy = shutil.copytree(data, tmp_path / "altered")
    shard = next(copy.glob("train-*"))
    content = bytearray(shard.read_bytes())
    content[10] ^= 1
    shard.write_bytes(content)
    for folder, state in ((data, "ok"), (copy, "problem")):
        code, made = plan_of(*tiny("--data", str(folder)), capsys=capsys)
        assert (checks_of(made)["checksums"][0], code) == (state, 1 if state == "problem" else 0)


def test_a_mesh_that_is_not_used(data: Path, tmp_path: Path):
    config = load_config("moe-7b", "dar-block")
    [mesh] = [check for check in check_start(config, 1, data, tmp_path) if check.name == "mesh"]
    assert mesh.state == "note"
    assert mesh.details == (
        "train.parallel tensor=2, expert=4, sequence_parallel=True, zero_stage=1 is ignored by single: single "
        "shards no model, which gives the same results"
    )
    assert "mesh" not in [check.name for check in check_start(tiny_config(), 1, data, tmp_path)]
    assert unused_mesh(config, "deepspeed") == (
        "train.parallel tensor=2, expert=4, sequence_parallel=True is ignored by deepspeed: deepspeed "
        "shards no model, which gives the same results"
    )
    assert unused_mesh(config, "fsdp2") == "train.parallel zero_stage=1 is ignored by fsdp2: only DeepSpeed uses it"


@pytest.mark.parametrize("arguments", [["--gpus", "8"], ["--gpu-memory", "80"], ["--json"]], ids=str)
def test_a_plan_is_asked_for(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("dualres.train.process_group.join_world", None)
    assert main(["train", "nano", "dar-block", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"dualres: {arguments[0]} requires --dry-run")


@pytest.mark.parametrize("gpus", ["0", "-8"])
def test_a_plan_for_no_gpu(gpus: str, capsys: pytest.CaptureFixture[str]):
    assert main(["train", "nano", "dar-block", "--dry-run", f"--gpus={gpus}"]) == 2
    assert capsys.readouterr().err == f"dualres: --gpus {gpus} is not positive and finite: use a positive number\n"


@pytest.mark.parametrize("memory", ["nan", "inf", "-1"])
def test_a_plan_for_no_memory(memory: str, capsys: pytest.CaptureFixture[str]):
    assert main(["train", "nano", "dar-block", "--dry-run", f"--gpu-memory={memory}"]) == 2
    assert "is not positive and finite" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
def test_both_commands_plan_the_same(engine: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]):
    """On a mesh too, and for the engines of which only memory is estimated."""
    cut = {"train__parallel__pipeline": 2, "model__layers": 4} if engine == "fsdp2" else {}
    given = tiny("--gpus", "2", "--gpu-memory", "1", **cut, train__engine=engine, train__global_batch=8)
    code, dry = plan_of(*given, capsys=capsys)
    assert code == 0
    assert main(["plan", *given, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert dry["residuals"]["dar-block"] == made["residuals"]["dar-block"]
    assert ("seconds" in dry["residuals"]["dar-block"]) == (engine == "fsdp2")
    for key in ("engine", "mesh", "parameters", "flops_per_token", "batch", "schedule", "fits"):
        assert dry[key] == made[key], key
    assert checks_of(dry)["memory"] == checks_of(made)["memory"]


def test_an_impossible_mesh_is_called_one(elsewhere: Path, capsys: pytest.CaptureFixture[str]):
    code, made = plan_of(*tiny("--gpus", "3", train__parallel__pipeline=2), capsys=capsys)
    assert code == 1
    state, says = checks_of(made)["mesh"]
    assert state == "problem"
    assert "does not divide 3 processes" in says
    assert "batch" not in checks_of(made)


def test_a_launch_over_machines(elsewhere: Path, capsys: pytest.CaptureFixture[str]):
    _, made = plan_of(*tiny("--gpus", "16", train__global_batch=32, train__tokens=40_960), capsys=capsys)
    assert made["launch"].startswith(
        "torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 --nproc-per-node 8 -m dualres train nano"
    )
