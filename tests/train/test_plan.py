"""`dualres train --dry-run`: what it counts is what a run holds, and what it checks is what a start would refuse."""

import argparse
import contextlib
import json
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from dualres.cli import main
from dualres.commands.train import introduce
from dualres.config import Config
from dualres.experiment import load_config
from dualres.model.accounting import parameters
from dualres.model.block import recompute_blocks
from dualres.model.decoder import build_decoder
from dualres.train import checkpoint, run
from dualres.train.build import build_engine
from dualres.train.engine import TorchEngine
from dualres.train.memory import CASTING, count_pass, memory, total
from dualres.train.objective import Objective
from dualres.train.plan import USABLE
from dualres.train.recipe import learning_rate
from dualres.train.world import World
from tests.train.tiny import ALONE, Told, overrides, tiny_config

GIB = 2**30


class Handle:
    """What autograd holds instead of a tensor; it dies with the node that holds it."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor.detach()  # which does not hold the node


class Allocated(NamedTuple):
    """Bytes of PyTorch's allocator in a piece of work, by its profiler."""

    left: int
    most: int


def allocated(work: Callable[[], Any]) -> Allocated:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = work()
    assert profiled.profiler is not None
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    del result  # what the work returned was still there
    return Allocated(now, most)


def real_objective(config: Config, engine: str) -> Objective:
    decoder = build_decoder(config.model, config.residual)
    if config.train.precision == "bf16" and engine in CASTING:
        decoder.to(torch.bfloat16)
    recompute_blocks(decoder.stack, config.train.recompute)
    return Objective(decoder, config.train.loss_rows)


def sequences(config: Config) -> Tensor:
    shape = config.train.micro_batch, config.model.context + 1
    return torch.randint(0, config.model.vocab_size, shape, generator=torch.Generator().manual_seed(0))


def autocast(config: Config, engine: str) -> contextlib.AbstractContextManager[Any]:
    casts = config.train.precision == "bf16" and engine not in CASTING
    return torch.autocast("cpu", torch.bfloat16) if casts else contextlib.nullcontext()


KEPT = [
    ("standard", "dense", "fp32", "single"),
    ("mhc-2", "moe", "fp32", "fsdp2"),
    ("attnres-full", "dense", "bf16", "fsdp2"),
    ("dar-block", "dense", "bf16", "single"),
    ("dar-block", "moe", "bf16", "fsdp2"),
]


@pytest.mark.parametrize(("residual", "feedforward", "precision", "engine"), KEPT)
def test_counted_activations_are_what_autograd_keeps(residual: str, feedforward: str, precision: str, engine: str):
    """To the byte, on a real model. The handles of nodes that nothing uses are gone: they are not counted either."""
    config = tiny_config(residual, feedforward, train__precision=precision)
    decoder = real_objective(config, engine).decoder
    own = {p.untyped_storage().data_ptr() for p in decoder.parameters()}
    handles: weakref.WeakSet[Handle] = weakref.WeakSet()

    def pack(tensor: Tensor) -> Handle:
        handle = Handle(tensor)
        handles.add(handle)
        return handle

    with saved_tensors_hooks(pack, lambda handle: handle.tensor), autocast(config, engine):
        hidden = decoder.hidden(sequences(config)[:, :-1])
    storages = {handle.tensor.untyped_storage().data_ptr(): handle.tensor.untyped_storage() for handle in handles}
    kept = sum(storage.nbytes() for address, storage in storages.items() if address not in own)
    assert hidden.requires_grad
    assert count_pass(config, engine).activations == kept


SCALARS = 8 * 64  # bytes of numbers that PyTorch turns into tensors below the reach of Python


@pytest.mark.parametrize(
    ("residual", "feedforward", "recompute"),
    [
        ("dar-block", "dense", "none"),
        ("dar-block", "moe", "selective"),
        ("dar-block", "dense", "full"),
        ("standard", "dense", "selective"),
        ("standard", "moe", "full"),
    ],
)
def test_counted_bytes_are_what_the_allocator_gave(residual: str, feedforward: str, recompute: str):
    """After a forward pass with its loss, also where blocks are recomputed: checkpoints hide tensors from hooks."""
    config = tiny_config(residual, feedforward, train__recompute=recompute, train__precision="bf16")
    objective, batch = real_objective(config, "single"), sequences(config)

    def forward() -> Tensor:
        with autocast(config, "single"):
            return objective(batch.clone())

    counted = count_pass(config, "single")
    assert 0 <= allocated(forward).left - (counted.activations + counted.loss) < SCALARS


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def held_bytes(engine: TorchEngine) -> dict[str, int]:
    """Of weights, gradients and moments, after a micro-batch."""
    moments = [value for name, value in engine.tensors().items() if name.startswith("optimizer.")]
    gradients = [p.grad for p in engine.parameters.values() if p.grad is not None]
    weights: list[Tensor] = list(engine.parameters.values())
    kinds = {"weights": weights, "gradients": gradients, "moments": moments}
    return {kind: sum(local(tensor).nbytes for tensor in tensors) for kind, tensors in kinds.items()}


def planned_bytes(config: Config, name: str, ranks: int) -> dict[str, int]:
    return {part.name: part.bytes for part in memory(config, name, ranks)}


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[World]:
    """The first of so many ranks whose others do not exist: it talks to no one, and holds what it would hold."""
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield World(0, request.param, torch.device("cpu"), None, None)
    dist.destroy_process_group()


def step_memory(config: Config, world: World) -> tuple[dict[str, int], int]:
    """What an engine holds between micro-batches, and the most that a micro-batch adds."""
    engine, batch = build_engine(config, world, 256), sequences(config)
    assert isinstance(engine, TorchEngine)
    engine.accumulate(batch, 1.0, True)
    engine.accumulate(batch, 1.0, True)  # the first may allocate what stays
    return held_bytes(engine), allocated(lambda: engine.accumulate(batch, 1.0, True)).most


PEAKS = [
    ("dar-block", "dense", "none", "bf16"),
    ("dar-block", "moe", "full", "fp32"),
    ("standard", "moe", "selective", "fp32"),
    ("mhc-2", "dense", "full", "bf16"),
]


def deeper(residual: str, feedforward: str, recompute: str, precision: str) -> Config:
    return tiny_config(residual, feedforward, train__recompute=recompute, train__precision=precision, model__layers=4)


@pytest.mark.parametrize("case", PEAKS, ids="-".join)
def test_memory_of_one_process(case: tuple[str, str, str, str]):
    """State to the byte. The peak nearly: kernels allocate inside, and not all that is kept is there at once."""
    config = deeper(*case)
    held, most = step_memory(config, ALONE)
    planned = planned_bytes(config, "single", 1)
    assert {name: planned[name] for name in held} == held
    assert 0.9 * most < sum(planned.values()) - sum(held.values()) < 1.15 * most


WIDE: dict[str, Any] = {  # mostly weights, as a large model on many GPUs
    "model__width": 192,
    "model__ffn_width": 768,
    "model__layers": 6,  # three blocks: one in use, one on its way in, one on its way out
    "model__context": 8,
    "train__micro_batch": 1,
    "train__tokens": 10**5,
}
SHARDED = {  # ranks (three divide almost none of its tensors), and how far the estimate may lie above the measured peak
    "many tokens": (2, deeper(*PEAKS[0]), 1.1),
    "many tokens, recomputed": (3, deeper(*PEAKS[1]), 1.15),
    "many weights": (3, tiny_config(train__precision="bf16", **WIDE), 1.1),
    "many weights, recomputed": (2, tiny_config(train__recompute="full", **WIDE), 1.02),
}


@pytest.mark.parametrize(("ranks", "config", "above"), SHARDED.values(), ids=SHARDED, indirect=["ranks"])
def test_memory_of_a_rank_of_fsdp2(ranks: World, config: Config, above: float):
    held, most = step_memory(config, ranks)
    planned = planned_bytes(config, "fsdp2", ranks.size)
    assert {name: planned[name] for name in held} == held
    assert 0.99 * most < sum(planned.values()) - sum(held.values()) < above * most
    whole = planned_bytes(config, "single", 1)["weights"]
    tensors = list(build_decoder(config.model, config.residual, device="meta").parameters())
    padding = sum((ranks.size - 1) * 4 * tensor[0].numel() for tensor in tensors)
    assert whole <= ranks.size * planned["weights"] <= whole + padding


@pytest.mark.parametrize(
    ("engine", "stage", "bytes_per_parameter"),
    [
        ("ddp", 0, 4 + 4 + 8 + 4),  # the last are its buckets
        ("deepspeed", 1, 2 + 2 * 2 + 12 / 8),
        ("deepspeed", 2, 2 + 2 / 8 + 12 / 8),
        ("deepspeed", 3, (2 + 2 + 12) / 8 + 2),  # the last are gathered weights: all of a small model
    ],
)
def test_state_of_other_engines(engine: str, stage: int, bytes_per_parameter: float):
    config = tiny_config(train__precision="bf16", train__parallel__zero_stage=stage)
    count = parameters(build_decoder(config.model, config.residual, device="meta")).total
    held = planned_bytes(config, engine, 8)
    state = sum(size for name, size in held.items() if name not in ("activations", "loss", "work", "bucket"))
    assert state == pytest.approx(bytes_per_parameter * count, rel=2e-3)
    assert held.get("bucket", 0) == (2 * 500_000_000 if engine == "deepspeed" else 0)


def plan_of(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main(["train", *arguments, "--dry-run", "--json"])
    return code, json.loads(capsys.readouterr().out)


def checks_of(made: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {check["name"]: (check["state"], check["says"]) for check in made["checks"]}


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a large disk, to plan in."""
    monkeypatch.chdir(tmp_path)
    disk = shutil.disk_usage(tmp_path)._replace(free=10**13)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    return tmp_path


@pytest.mark.parametrize(
    ("scale", "batch", "steps", "accumulation"), [("1b", 256, 47_683, 16), ("moe-7b", 128, 60_000, 8)]
)
def test_the_papers_large_models(
    scale: str, batch: int, steps: int, accumulation: int, elsewhere: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["train", scale, "dar-block", "--dry-run", "--gpus", "8"]) == 0
    text = capsys.readouterr().out
    config = load_config(scale, "dar-block")
    count = parameters(build_decoder(config.model, config.residual, device="meta"))
    for number in count:
        assert f"{number:,}" in text
    assert f"{4096 * batch:,}: 8 ranks × micro-batch 2 × {accumulation} accumulation steps" in text
    assert f"{steps:,}, {steps * 4096 * batch:,} tokens in all" in text
    assert "0.0003 at step 2,000 after 2,000 of warmup, cosine decay to 3e-05" in text
    for step in (1, 1000, 2000, steps):
        assert f"{step:>6,}  {learning_rate(step - 1, steps, config.train):.3e}" in text
    assert f"{total(memory(config, 'fsdp2', 8)) / GIB:.2f}" in text
    assert "FineWeb-Edu-100B" in text
    assert "zero_stage=1: the paper's mesh; fsdp2 trains data-parallel" in text
    assert "estimate that no GPU has confirmed" in text
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
        "run folder": "ok",
        "disk": "ok",
        "memory": "ok",
    }
    assert made["engine"] == "fsdp2"
    assert made["batch"] == {
        "micro_batch": 2,
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
    assert made["memory"]["total"] == sum(part["bytes"] for part in made["memory"]["parts"])
    assert made["launch"].startswith("torchrun --nproc-per-node 2 -m dualres train nano dar-block --set model.layers=2")
    assert made["launch"].endswith(f"--data {data} --out new")
    assert list(elsewhere.iterdir()) == []


FAILING: dict[str, tuple[list[str], dict[str, Any], str, str]] = {
    "batch": (["--gpus", "3"], {}, "batch", "train.global_batch=4 does not cut"),
    "vocabulary": ([], {"model__vocab_size": 256}, "vocabulary", "257 entries and the model 256: set model.vocab_size"),
    "processes": (["--gpus", "2"], {"train__engine": "single"}, "engine", "use ddp, fsdp2 or deepspeed"),
    "alone": ([], {"train__engine": "fsdp2"}, "engine", "needs processes"),
    "stage": (["--gpus", "2"], {"train__engine": "deepspeed"}, "engine", "zero_stage=0 shards nothing"),
    "held out": (
        [],
        {"model__context": 2**17, "train__tokens": 2**24, "train__loss_rows": 2**18},
        "validation",
        "too few for a sequence",
    ),
    "missing data": (["--data", "nowhere"], {}, "data", "nowhere has no index.json: make it with `dualres prepare"),
    "file": (["--out", "file"], {}, "run folder", "file is no folder that can be written: give another --out"),
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
    assert err == f"dualres: it cannot start so: {check}\n"


def planned_folder(folder: Path, data: Path, capsys: pytest.CaptureFixture[str], **changes: Any) -> tuple[str, str]:
    """The check of a run's folder, which it leaves as it was."""
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != run.LOCK}
    code, made = plan_of(*tiny("--data", str(data), "--out", str(folder), **changes), capsys=capsys)
    state, says = checks_of(made)["run folder"]
    assert code == (1 if state == "problem" else 0)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != run.LOCK} == before
    return state, says


def test_a_run_that_goes_on(whole: Path, data: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]):
    folder = elsewhere / "begun"
    shutil.copytree(whole, folder)
    assert planned_folder(folder, data, capsys) == (
        "note",
        f"{folder} is finished, with step-000000040: nothing is left to do",
    )
    shutil.rmtree(checkpoint.found(folder / run.CHECKPOINTS)[-1])
    assert planned_folder(folder, data, capsys) == ("ok", f"{folder} goes on from step-000000036 of 40 steps")
    assert planned_folder(folder, data, capsys, train__recompute="full")[0] == "ok"  # computes the same
    with run.locked(folder):
        state, says = planned_folder(folder, data, capsys)
    assert (state, says) == ("problem", f"another process trains in {folder}: wait for it, or use a new folder")


def test_a_folder_of_another_run(whole: Path, data: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]):
    folder = elsewhere / "other"
    shutil.copytree(whole, folder)
    state, says = planned_folder(folder, data, capsys, train__learning_rate=0.02)
    assert state == "problem"
    assert f"{folder} holds a run with another config (train.learning_rate" in says
    described = json.loads((folder / run.CONFIG).read_text())
    described["data"]["content"] = "others"
    (folder / run.CONFIG).write_text(json.dumps(described))
    state, says = planned_folder(folder, data, capsys)
    assert state == "problem"
    assert "holds a run on other data" in says
    (folder / run.CONFIG).unlink()
    state, says = planned_folder(folder, data, capsys)
    assert state == "problem"
    assert "has checkpoints and no config.json" in says


def test_tokens_that_are_seen_again(data: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]):
    changes = {"train__tokens": 50_000_000, "train__validation_tokens": 10_000_000}
    code, made = plan_of(*tiny("--data", str(data), **changes), capsys=capsys)
    assert code == 0
    checks = checks_of(made)
    assert checks["tokens"][0] == checks["validation"][0] == "note"
    index = json.loads((data / "index.json").read_text())
    tokens = sum(shard["tokens"] for shard in index["train"])
    passes = made["batch"]["tokens"] / ((tokens - 1) // 32 * 32)
    assert checks["tokens"][1] == f"{passes:.3g} passes over {tokens:,} tokens: prepare more for one"
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
    assert "pip install 'dualres[deepspeed]'" in checks_of(made)["engine"][1]
    assert "pip install 'dualres[wandb]'" in checks_of(made)["wandb"][1]


def gib(parts: list[Any]) -> float:
    return total(parts) / USABLE / GIB


def test_what_to_change_when_it_does_not_fit(elsewhere: Path, capsys: pytest.CaptureFixture[str]):
    """The remedy is one that fits: each is counted."""
    none, full = (gib(memory(tiny_config(train__recompute=how), "single", 1)) for how in ("none", "full"))
    least = tiny_config(train__recompute="full", train__micro_batch=1)
    one, two, four = (gib(memory(least, engine, n)) for engine, n in (("single", 1), ("fsdp2", 2), ("fsdp2", 4)))
    assert four < two < one < full < none
    for limit, state, says in (
        (none, "ok", "GiB"),
        (0.999 * none, "problem", "use train.recompute="),
        (0.999 * full, "problem", "use train.micro_batch=1 with train.recompute=full, "),
        (0.999 * one, "problem", "use train.micro_batch=1 with train.recompute=full and 2 GPUs, "),
        (0.999 * two, "problem", "use train.micro_batch=1 with train.recompute=full and 4 GPUs, "),
        (0.5 * four, "problem", "no recomputation, micro-batch or number of GPUs"),
    ):
        code, made = plan_of(*tiny("--gpu-memory", repr(limit)), capsys=capsys)
        found, text = checks_of(made)["memory"]
        assert (found, code) == (state, 1 if state == "problem" else 0), limit
        assert says in text


def test_a_start_says_which_mesh_it_does_not_use(tmp_path: Path):
    given = argparse.Namespace(scale="moe-7b", residual="dar-block", data=tmp_path)
    progress = Told()
    introduce(load_config("moe-7b", "dar-block"), given, tmp_path, ALONE, progress)
    assert progress.said[1:] == [
        "train.parallel tensor=2, expert=4, sequence_parallel=True, zero_stage=1: the paper's mesh; single trains "
        "data-parallel, which computes the same"
    ]
    progress = Told()
    introduce(tiny_config(), given, tmp_path, ALONE, progress)
    assert len(progress.said) == 1


@pytest.mark.parametrize("arguments", [["--gpus", "8"], ["--gpu-memory", "80"], ["--json"]], ids=str)
def test_a_plan_is_asked_for(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("dualres.commands.train.join_world", None)
    assert main(["train", "nano", "dar-block", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"dualres: {arguments[0]} belongs to a plan: add --dry-run")


@pytest.mark.parametrize("gpus", ["0", "-8"])
def test_a_plan_for_no_gpu(gpus: str, capsys: pytest.CaptureFixture[str]):
    assert main(["train", "nano", "dar-block", "--dry-run", f"--gpus={gpus}"]) == 2
    assert capsys.readouterr().err == f"dualres: --gpus {gpus} is not positive: use 1 or more\n"


def test_a_launch_over_machines(elsewhere: Path, capsys: pytest.CaptureFixture[str]):
    _, made = plan_of(*tiny("--gpus", "16", train__global_batch=32, train__tokens=40_960), capsys=capsys)
    assert made["launch"].startswith(
        "torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 --nproc-per-node 8 -m dualres train nano"
    )
